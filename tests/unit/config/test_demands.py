"""Errors of settings: what each value must be, in English, and everything that is wrong at once."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from kvstrata.config import load as loading
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.flags import parse_server_flags
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError

STRUCTS = (ServerSettings, ControllerSettings, ClientSettings)


def refused(text: str, struct=ServerSettings) -> str:
    with pytest.raises(ConfigError) as caught:
        loading.convert(struct, yaml.safe_load(text), "file")
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "l1: {eviction_policy: MRU}",
            "l1.eviction_policy: must be one of LRU, ARC, S3FIFO, noop, found 'MRU'",
        ),
        ("port: 70000", "port: must be a whole number from 1 to 65535, found 70000"),
        ("port: many", "port: must be a whole number from 1 to 65535, found 'many'"),
        ("port: 1.5", "port: must be a whole number from 1 to 65535, found 1.5"),
        ("l1: {size_gb: -3}", "l1.size_gb: must be a number above 0 and at most 1048576, found -3"),
        ("l1: {eviction_ratio: 1}", "l1.eviction_ratio: must be a number of at least 0 and below 1, found 1"),
        ("l1: 4", "l1: must be a mapping, found 4"),
        ("l1: {sizegb: 3}", "l1.sizegb: unknown key (did you mean 'size_gb'?)"),
        ("l1: {use_hugepages: 2}", "l1.use_hugepages: must be true or false, found 2"),
        ("http: {host: ''}", "http.host: must be non-empty text, found ''"),
        ("instance_id: a b", "instance_id: must be at most 64 letters, digits and . _ -, found 'a b'"),
        ("p2p: {listen: nowhere}", "p2p.listen: must be HOST:PORT, such as localhost:0, found 'nowhere'"),
        ("http: {allowed_hosts: x}", "http.allowed_hosts: must be a list, found 'x'"),
        ("http: {allowed_hosts: [a, 'b c']}", "http.allowed_hosts[1]: must be a host's name or address"),
        ("quotas_gb: {blue: 0}", "quotas_gb.blue: must be a number above 0 and at most 1048576, found 0"),
        ("l2_adapters: {}", "l2_adapters: must be a list of at most 15 items, found {}"),
    ],
)
def test_an_error_says_what_the_value_must_be(text, says):
    assert f"file: {says}" in refused(text)


def test_everything_that_is_wrong_in_any_source_is_said_at_once(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("prot: 5\nl1: {size_gb: x, eviction_policy: MRU}\nhttp: {port: -1}\n")
    flags = parse_server_flags(["--sokcet-dir", "/x", "--engine-type", "blend", "--http-port", "many"])
    with pytest.raises(ConfigError) as caught:
        loading.load(
            ServerSettings,
            file=file,
            environment={"KVSTRATA_PROT": "1", "KVSTRATA_L1_SIZE_GB": "[", "KVSTRATA_LOG_LEVEL": "loud"},
            flags=flags.settings,
            flag_names=flags.names,
            wrong_flags=flags.wrong,
        )
    lines = caught.value.lines
    starts = [line.split(": must")[0].split(": unknown")[0] for line in lines]
    assert starts == [
        "command line: --sokcet-dir",
        "command line: --engine-type: blending is not supported; remove it",
        f"{file}: prot",
        f"{file}: l1.size_gb",
        f"{file}: l1.eviction_policy",
        f"{file}: http.port",
        "environment: KVSTRATA_PROT",
        "environment: KVSTRATA_L1_SIZE_GB: is not valid YAML; correct it",
        "command line: --http-port",
    ]
    assert caught.value.message.startswith("9 settings are wrong: ")
    assert all(line in caught.value.message for line in lines)


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
