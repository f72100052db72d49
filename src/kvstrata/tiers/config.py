"""The settings of tiers: from an entry of `l2_adapters` (the JSON of `--l2-adapter`) to a checked TierConfig.

The fields that all types have are `CommonFields`.  A type is one of

    kvstrata's own      TYPES names its `Medium`; its fields are checked when the server reads its settings
    another package's   an entry point in the group `kvstrata.l2_adapters` names a callable
                        `(fields: dict, path: str) -> StorageAdapter`, which raises ConfigError for wrong fields; it is
                        imported and called when the adapter is made (for an isolated tier, in its child process)

kvstrata's own type wins over another package's type of the same name.  A wrong entry stops the start with an error that
names the field's path, its value and what to write instead.  `importlib.metadata` is imported where another package's
type is, since a server starts 10 ms sooner without it.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import says
from kvstrata.config.demands import nearest
from kvstrata.config.load import unusable_value
from kvstrata.config.secrets import remember_secrets, scrubbed
from kvstrata.errors import AllWrong, ConfigError
from kvstrata.tiers import structs
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.codec import ChainSettings, read_chain
from kvstrata.tiers.structs import Place

GROUP = "kvstrata.l2_adapters"

TYPES = {
    "disk": "kvstrata.tiers.media.disk:MEDIUM",
    "fs": "kvstrata.tiers.media.fs:MEDIUM",
    "fs_native": "kvstrata.tiers.media.fs:MEDIUM",
    "mooncake_store": "kvstrata.tiers.media.mooncake.config:MEDIUM",
    "object_store": "kvstrata.tiers.media.object_store.config:MEDIUM",
    "s3": "kvstrata.tiers.media.object_store.config:MEDIUM",
    "resp": "kvstrata.tiers.media.resp.config:MEDIUM",
    "redis": "kvstrata.tiers.media.resp.config:MEDIUM",
    "valkey": "kvstrata.tiers.media.resp.config:MEDIUM",
    "plugin": "kvstrata.tiers.media.plugin:MEDIUM",
    "peer": "kvstrata.p2p.medium:MEDIUM",
}
"""kvstrata's own types: MODULE:ATTRIBUTE of each one's Medium, which is imported when an entry names the type."""

ELSEWHERE = (
    "raw_block", "dax", "hf3fs",
    "aerospike", "bigtable", "hfbucket", "sagemaker_hyperpod", "nixl_store", "nixl_store_dynamic",
    "nixl_native", "native_plugin",
)  # fmt: skip
"""Types of other cache servers that kvstrata lacks; an installed plugin may provide them."""

Make = Callable[[], StorageAdapter]
"""Makes the bare adapter, not open. Raises ConfigError for a mistake in the fields that is detected only then."""


class StorePolicy(enum.StrEnum):
    """When a chunk is put to an adapter; tiers/puts.py acts on it."""

    THROUGH = "through"
    SECOND_TOUCH = "second_touch"


class CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that every type of adapter has."""

    # fmt: off
    type: Annotated[str, says("Type of the adapter.", min_length=1)]
    policy: Annotated[StorePolicy, says(
        "Which chunks of L1 are put into this adapter. `through`: all; "
        "`second_touch`: chunks used a second time.")] = StorePolicy.THROUGH
    deadline_ms: Annotated[Annotated[int, Meta(ge=1, le=600_000)] | None, says(
        "Milliseconds that one operation may take, plus the same for every 64 MB of its payload; not set: 5000."
        )] = None
    max_stuck_mb: Annotated[Annotated[float, Meta(ge=1, le=1 << 20)] | None, says(
        "MB that operations past their deadline may keep pinned; at this limit no further put or load starts; not "
        "set: a sixteenth of L1.")] = None
    isolation: Annotated[Literal["in_process", "process"] | None, says(
        "`process` runs the adapter in a child process; not set: the type's own default.")] = None
    host_kill_ms: Annotated[Annotated[int, Meta(ge=10, le=3_600_000)] | None, says(
        "Milliseconds after which a child process that has work and sends nothing is killed; longer if many bytes "
        "are under way; not set: three deadlines.")] = None
    eviction: Annotated[Any, says("Accepted, but has no effect.")] = None
    serde: Annotated[Any, says("Refused; `codec` replaced it.")] = None
    codec: Annotated[Any, says(
        "How records are encoded: a name (`zstd`, `aes-gcm`, `mac`), an object with a `name` and its options, or a "
        "list of such names and objects, in this order.")] = None
    codec_staging_mb: Annotated[float, says(
        "MB of memory for records that are being encoded or decoded.", ge=1, le=1 << 20)] = 256
    codec_workers: Annotated[int, says("Threads that encode and decode.", ge=1, le=64)] = 2
    # fmt: on


COMMON = CommonFields.__struct_fields__


def _nothing() -> str:
    return ""


def _no_folder(config: Any) -> str:
    return ""


class Medium(NamedTuple):
    """A type of adapter."""

    config: type[msgspec.Struct]
    """The type's own fields in an entry: types, bounds, defaults and meanings.

    The struct may repeat a field that all types have (CommonFields), and then gets that field's value too.
    """
    prepare: Callable[[Any, Place, str], Make]
    """Checks what the struct cannot express, for (config, place of the entry, name of the adapter). Raises ConfigError.

    Nothing is opened.  It runs in the server, and for an isolated tier again in the child.
    """
    hosted: bool = False
    """Whether the adapter runs in a process of its own unless its entry says otherwise."""
    rest: str = ""
    """The field of `config` that collects all fields whose names `config` does not have; empty: they are errors."""
    look: Callable[[Any, str], None] | None = None
    """Checks that this machine has what an entry needs, for (config, name of the adapter). Raises StorageError."""
    folder: Callable[[Any], str] = _no_folder
    """The directory on this host with the records of an entry with these fields; empty: none.

    The server probes it while the tier is in service (tiers/tier.py).
    """
    refusal: Callable[[], str] = _nothing
    """Why this installation cannot honour any entry of this type, with advice; empty if it can."""


class TierConfig(NamedTuple):
    """One tier, checked; nothing is opened yet."""

    name: str
    """`<type>-<number>`, in logs, metrics and status."""
    make: Make
    """Makes the bare adapter in this process."""
    medium: str = ""
    """MODULE:ATTRIBUTE of the medium's type, for an adapter host."""
    fields: msgspec.Struct | None = None
    """The medium's fields, in its type's struct."""
    place: Place = Place("")
    """Where the fields stand in the settings, for errors."""
    entry: Mapping[str, Any] = {}
    """The original entry, for admins."""
    common: CommonFields = CommonFields(type="")
    chain: ChainSettings = ChainSettings()
    isolated: bool = False
    """Whether the tier's medium runs in a process of its own."""
    folder: str = ""
    """The directory on this host with the records; empty: none."""


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
    medium = common = chain = fields = make = None
    wrong, kind, reference, isolated = AllWrong(), "", "", False
    with wrong:
        kind = kind_of(entry, place)
        medium, reference, point = find(kind, place.at("type"))
    name = f"{kind}-{index}"
    with wrong:
        common = _common(entry, place)
        if medium is not None:
            isolated = _isolated(common, medium, place)
    with wrong:
        chain = read_chain(entry.get("codec"), place.at("codec"))
        if chain.encodes and isolated:
            raise place.hidden(
                "codec",
                "an adapter host moves the bytes of L1 without codecs; remove codec, or set isolation to 'in_process'",
            )
    if medium is not None:
        with wrong:
            fields = fields_of(medium, point, entry, place)
            make = medium.prepare(fields, place, name)
    wrong.tell()
    assert medium and common and chain is not None and fields is not None and make is not None
    return TierConfig(
        name=name,
        make=make,
        medium=reference,
        fields=fields,
        place=place,
        entry=dict(entry),
        common=common,
        chain=chain,
        isolated=isolated,
        folder=medium.folder(fields),
    )


class _Kind(msgspec.Struct):
    """The field that must be read before the others."""

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
    if unusable := unusable_value(entry, path):
        where, must, found = unusable
        raise ConfigError(f"{where}: {must}, found {found!a:.80}", field=where)
    return entry


def fields_of(medium: Medium, point: str, entry: Mapping[str, Any], place: Place) -> msgspec.Struct:
    """The type's own fields of an entry; `point` is another package's entry point or "". Raises ConfigError."""
    kind = medium.config
    own = {
        name: value for name, value in entry.items() if name not in COMMON or name in kind.__struct_fields__
    }
    if point:
        return InstalledConfig(point, own)
    return structs.read(kind, own, place, also=COMMON, rest=medium.rest)


def _common(entry: Mapping[str, Any], place: Place) -> CommonFields:
    """The fields that all types have. Raises ConfigError."""
    own = {name: value for name, value in entry.items() if name in COMMON}
    common = structs.read(CommonFields, own, place)
    if common.eviction is not None:
        place.log_no_effect("eviction", "the adapter's own cap evicts the least recently used records")
    if common.serde is not None:
        advice = 'write "codec": ["zstd"] or "codec": [{"name": "aes-gcm", "key_file": PATH}]'
        raise place.refused("serde", common.serde, f"it was replaced by codec; {advice}")
    return common


def _isolated(common: CommonFields, medium: Medium, place: Place) -> bool:
    """Whether the tier runs in a process of its own. Raises ConfigError for fields that do not fit."""
    isolated = (common.isolation or ("process" if medium.hosted else "in_process")) == "process"
    if common.host_kill_ms is not None and not isolated:
        advice = 'only an adapter with "isolation": "process" has a host; remove it'
        raise place.refused("host_kill_ms", common.host_kill_ms, advice)
    return isolated


def find(kind: str, where: str) -> tuple[Medium, str, str]:
    """(type, its MODULE:ATTRIBUTE, entry point of another package or "") of this name.

    Raises ConfigError for the field `where` if the name is unknown or the type is refused.
    """
    if kind in TYPES:
        medium = load(TYPES[kind])
        if advice := medium.refusal():
            raise ConfigError(f"{where}: {kind!r:.80} is not supported: {advice}", field=where)
        return medium, TYPES[kind], ""
    from importlib.metadata import entry_points

    others: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        value = others.setdefault(point.name, point.value)
        if point.name == kind and value != point.value:
            raise ConfigError(
                f"{where}: {kind!r:.80} names two plugins, {value} and {point.value}; uninstall one of their packages",
                field=where,
            )
    if kind in others:
        return INSTALLED, f"{__name__}:INSTALLED", others[kind]
    if kind in ELSEWHERE:
        raise ConfigError(
            f"{where}: {kind!r} is not part of this version; a plugin can provide it: install a package with"
            f" an entry point {kind!r} in the group {GROUP!r}, or use type 'plugin'",
            field=where,
        )
    here = sorted({*TYPES, *others})
    hint = nearest(kind, [*here, *ELSEWHERE])
    raise ConfigError(
        f"{where}: unknown adapter {kind!r:.80}{hint}; known types: {', '.join(here)}", field=where
    )


def load(reference: str) -> Medium:
    """The type at MODULE:ATTRIBUTE."""
    medium = pkgutil.resolve_name(reference)
    assert isinstance(medium, Medium), reference
    return medium


@contextlib.contextmanager
def plugin_boundary(path: str, source: str) -> Iterator[None]:
    """Run a third party's code, which may raise anything, leave the interpreter, print or fork.

    Its output goes to standard error, since standard output belongs to the command.  A child that it forks ends here
    instead of continuing as a second server.  Raises ConfigError.
    """
    pid = os.getpid()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the plugin boundary
        raise ConfigError(
            f"{path}: {source} cannot be made: {type(error).__name__}: {scrubbed(error)}", field=path
        ) from error
    finally:
        if os.getpid() != pid:
            os._exit(0)


def checked(made: object, path: str, source: str) -> StorageAdapter:
    """Return `made`, which a third party's code has made, if it is an adapter. Raises ConfigError otherwise."""
    if not isinstance(made, StorageAdapter):
        raise ConfigError(
            f"{path}: {source} must make a StorageAdapter, but made a {type(made).__name__}", field=path
        )
    return made


class InstalledConfig(msgspec.Struct, frozen=True):
    """An adapter that another package's entry point makes."""

    point: str
    """MODULE:ATTRIBUTE."""
    fields: dict[str, Any]
    """The entry's fields as given, without those that all types have."""


def _prepare_installed(config: InstalledConfig, place: Place, name: str) -> Make:
    def make() -> StorageAdapter:
        with plugin_boundary(place.path, f"plugin {config.point}"):
            return checked(
                pkgutil.resolve_name(config.point)(config.fields, place.path), place.path, config.point
            )

    return make


INSTALLED = Medium(InstalledConfig, _prepare_installed)
