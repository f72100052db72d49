"""Errors of settings: what each value must be, in English, and everything that is wrong at once."""

from __future__ import annotations

import msgspec
import pytest

from kvstrata.config import load as loading
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError

STRUCTS = (ServerSettings, ControllerSettings, ClientSettings)


@pytest.mark.parametrize(
    ("text", "struct", "found"),
    [
        ("l1: {eviction_policy: s3fifo}", ServerSettings, lambda one: one.l1.eviction_policy == "S3FIFO"),
        ("l1: {eviction_policy: NOOP}", ServerSettings, lambda one: one.l1.eviction_policy == "noop"),
        ("log_level: INFO", ControllerSettings, lambda one: one.log_level == "info"),
        ("load_mode: Sync", ClientSettings, lambda one: one.load_mode == "sync"),
        ("p2p: {engine: off}", ServerSettings, lambda one: one.p2p.engine == "off"),
    ],
)
def test_words_of_a_list_are_understood_in_any_case(text, struct, found):
    assert found(loading.convert(struct, loading.parse_yaml(text), "file"))


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_setting_of_every_kind_has_a_demand_of_its_own(struct):
    for key, kind in loading.leaves(struct):
        with pytest.raises(ConfigError) as caught:
            nested: dict = {}
            loading.put(nested, key, object())
            loading.convert(struct, nested, "file")
        assert caught.value.message.startswith(f"file: {key}: must be "), key
        assert caught.value.field == key
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(object(), kind)
