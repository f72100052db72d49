"""The fields of an entry of type `mooncake_store`. Fields that are not ours go to Mooncake's `setup` unchanged."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvstrata.config.common_model import says
from kvstrata.config.demands import nearest
from kvstrata.tiers.config import COMMON, Make, Medium
from kvstrata.tiers.media.mooncake.adapter import SETUP_KEYS, MooncakeAdapter
from kvstrata.tiers.media.mooncake.sdk import check_nics, import_store
from kvstrata.tiers.media.shared import NumWorkers, PerOpWorkers
from kvstrata.tiers.structs import Place

log = logging.getLogger(__name__)

NEARLY = 0.8
"""Similarity to one of our fields from which an unknown field counts as misspelt; others are passed on."""


REPLICAS = frozenset({"replica_num", "nof_replica_num"})
"""Options of ReplicateConfig that LMCache's entries have next to those of `setup`."""
OTHER_NAMES = {"master_server_address": "master_server_addr", "device_name": "rdma_devices"}
"""Options of `setup` by their names in Mooncake's own configuration file and in LMCache."""


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A Mooncake Store cluster."""

    # fmt: off
    setup: Annotated[dict[str, Any], says(
        "Every other field is an option of Mooncake's `setup`, which requires `local_hostname` and `metadata_server`. "
        "`replica_num` and `nof_replica_num` count as options of `replicate`.")]
    preregister_l1_memory: Annotated[bool, says("Register L1 with Mooncake's transfer engine.")] = True
    replicate: Annotated[dict[str, Any] | None, says(
        "Options of Mooncake's ReplicateConfig that every put uses.",
        extra={"must": " with options of Mooncake's ReplicateConfig"})] = None
    # fmt: on
    num_workers: NumWorkers = 4
    per_op_workers: PerOpWorkers = {}


def _renamed(setup: Mapping[str, Any]) -> dict[str, Any]:
    """The options under the names that `setup` has for them."""
    return {OTHER_NAMES.get(key, key): value for key, value in setup.items()}


def _prepare(config: MooncakeConfig, place: Place, name: str) -> Make:
    for old, new in OTHER_NAMES.items():
        if old in config.setup and new in config.setup:
            raise place.hidden(new, f"is given as {old} too; give one of them")
    setup = {key: value for key, value in _renamed(config.setup).items() if key not in REPLICAS}
    replicate = dict(config.replicate or {})
    for key in config.setup.keys() & REPLICAS:
        text = str(config.setup[key])
        if not text.isdecimal():
            raise place.wrong(key, config.setup[key], "must be a whole number from 0")
        replicate.setdefault(key, int(text))
    ours = [field for field in config.__struct_fields__ if field != "setup"]
    for key, value in setup.items():
        if key not in SETUP_KEYS:
            if hint := nearest(key, (*ours, *COMMON), cutoff=NEARLY):
                raise place.hidden(key, f"unknown field, and not an option of Mooncake{hint}")
            hint = nearest(key, SETUP_KEYS)
            log.warning("%s: unknown field%s, passed on to Mooncake", place.at(key), hint)
        if not isinstance(value, str | int | float):
            must = "must be a string, a number, true or false, like all options of Mooncake"
            raise place.wrong(key, value, must)
    for key in ("local_hostname", "metadata_server"):
        if key not in setup:
            raise place.wrong(key, None, "must be set, since Mooncake's setup requires it")
    config = msgspec.structs.replace(config, setup=setup, replicate=replicate)
    return lambda: MooncakeAdapter(config, name=name)


def _look(config: MooncakeConfig, name: str) -> None:
    if importlib.util.find_spec("mooncake") is None:
        import_store(name)  # says which package is missing
    setup = _renamed(config.setup)
    check_nics(name, str(setup.get("protocol", "tcp")), str(setup.get("rdma_devices", "")))


MEDIUM = Medium(
    MooncakeConfig,
    _prepare,
    hosted=True,
    rest="setup",
    look=_look,
)
