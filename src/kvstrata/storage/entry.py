"""From one entry of `l2_adapters` (the JSON of `--l2-adapter`) to a checked TierConfig.

common.py has the fields that all types have, catalogue.py finds the type with its own fields.  A wrong entry stops the
start with an error that names the field's path, its value and what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.config.load import odd_value
from kvstrata.config.secrets import remember_secrets
from kvstrata.errors import AllWrong, ConfigError
from kvstrata.policy.store import StorePolicy
from kvstrata.storage import catalogue, structs
from kvstrata.storage.base import StorageAdapter
from kvstrata.storage.catalogue import FoundType
from kvstrata.storage.common import COMMON, CommonFields
from kvstrata.storage.recipe import Recipe
from kvstrata.storage.structs import Place
from kvstrata.storage.wrap.codec_fields import ChainSettings, read_chain

MB = 1 << 20


class TierConfig(NamedTuple):
    """One tier, checked; nothing is opened yet."""

    name: str
    """`<type>-<number>`, in logs, metrics and status."""
    recipe: Recipe
    make: Callable[[], StorageAdapter]
    """Makes the bare adapter in this process."""
    entry: dict[str, Any]
    """The entry as it was given; admins see it."""
    chain: ChainSettings = ChainSettings()
    codec_staging_bytes: int = 256 * MB
    codec_workers: int = 2
    policy: StorePolicy = StorePolicy.THROUGH
    deadline_ms: int | None = None
    """None: the server's `l2.deadline_ms`."""
    max_stuck_bytes: int | None = None
    """None: L1 / 16."""
    isolated: bool = False
    """The tier's medium runs in a process of its own."""
    kill_ms: int | None = None
    """None: KILL_DEADLINES deadlines (stack.py)."""
    folder: str = ""
    """The directory of this host that has the records; empty: there is none."""


def make_adapter(entry: str | Mapping[str, Any], index: int) -> StorageAdapter:
    """The bare adapter of one entry, not open. Raises ConfigError."""
    return configure_tier(entry, index).make()


def configure_tier(entry: str | Mapping[str, Any], index: int) -> TierConfig:
    """Check one entry. Raises ConfigError naming each wrong field below `l2_adapters[index]`.

    A rule about several fields is checked once each of them is right by itself.
    """
    place = Place(f"l2_adapters[{index}]")
    entry = entry_of(entry, place.path)
    remember_secrets(entry)
    found = common = chain = config = make = None
    wrong, kind, isolated = AllWrong(), "", False
    with wrong:
        kind = kind_of(entry, place)
        found = catalogue.find(kind, place.at("type"))
    name = f"{kind}-{index}"
    with wrong:
        common = _common(entry, place)
        if found is not None:
            isolated = _isolated(common, found, place)
    with wrong:
        chain = read_chain(entry.get("codec"), place.at("codec"))
        if chain.encodes and isolated:
            raise place.hidden(
                "codec",
                "an adapter in a process of its own moves bytes of L1 as they are; remove codec, or set isolation to "
                "'in_process'",
            )
    if found is not None:
        with wrong:
            config = found.config(entry, place)
            make = found.medium.prepare(config, place, name)
    wrong.tell()
    assert found and common and chain is not None and config is not None and make is not None
    return TierConfig(
        name=name,
        recipe=Recipe(found.reference, config, place, name),
        make=make,
        entry=dict(entry),
        chain=chain,
        codec_staging_bytes=int(common.codec_staging_mb * MB),
        codec_workers=common.codec_workers,
        policy=common.policy,
        deadline_ms=common.deadline_ms,
        max_stuck_bytes=None if common.max_stuck_mb is None else int(common.max_stuck_mb * MB),
        isolated=isolated,
        kill_ms=common.host_kill_ms,
        folder=found.medium.folder(config),
    )


class _Kind(msgspec.Struct):
    """The one field that must be known before the others can be read."""

    type: Annotated[str, Meta(min_length=1)]
    others: dict[str, Any]


def kind_of(entry: Mapping[str, Any], place: Place) -> str:
    """The type that an entry names. Raises ConfigError."""
    return structs.read(_Kind, entry, place, rest="others").type


def entry_of(entry: str | Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The entry as a JSON object.

    Raises ConfigError if it is not a JSON object, or holds an infinite number or broken Unicode.
    """
    if isinstance(entry, str):
        try:
            entry = json.loads(entry)
        except json.JSONDecodeError as error:
            # The text itself is not shown: it may hold a password.
            raise ConfigError(f"{path}: not JSON: {error}", field=path) from None
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f'{path}: must be an object with a "type", found {type(entry).__name__}', field=path
        )
    if odd := odd_value(entry, path):
        where, must, found = odd
        raise ConfigError(f"{where}: {must}, found {found!a:.80}", field=where)
    return entry


def _common(entry: Mapping[str, Any], place: Place) -> CommonFields:
    """The fields that all types have. Raises ConfigError."""
    own = {name: value for name, value in entry.items() if name in COMMON}
    common = structs.read(CommonFields, own, place)
    if common.eviction is not None:
        place.noted("eviction", "the adapter's own cap evicts the least recently used records")
    if common.serde is not None:
        advice = 'write "codec": ["zstd"] or "codec": [{"name": "aes-gcm", "key_file": PATH}]'
        raise place.refused("serde", common.serde, f"it was replaced by codec; {advice}")
    return common


def _isolated(common: CommonFields, found: FoundType, place: Place) -> bool:
    """Whether the tier runs in a process of its own. Raises ConfigError for fields that do not fit."""
    isolated = (common.isolation or ("process" if found.medium.hosted else "in_process")) == "process"
    if common.host_kill_ms is not None and not isolated:
        advice = 'only an adapter with "isolation": "process" has a host; remove it'
        raise place.refused("host_kill_ms", common.host_kill_ms, advice)
    return isolated
