"""From the JSON of `--l2-adapter` (or an entry of `l2_adapters` in the configuration file) to an adapter.

Fields common to all types are read here (`type`, `policy`, `deadline_ms`, `max_stuck_mb`, `isolation`,
`host_kill_ms`, `codec` and its own, `presence_ttl_ms`, `negative_ttl_ms`); the rest belongs to the type.  A type comes
from the table below or from an installed package with an entry point in the group `kvstrata.l2_adapters`: a callable
`(fields: dict, path: str) -> StorageAdapter` that raises ConfigError for wrong fields.  Whatever is wrong stops the
start with the field's path, its value and what to write instead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.clock import Clock
from kvstrata.config.lmcache_names import nearest
from kvstrata.config.load import odd_value
from kvstrata.errors import ConfigError
from kvstrata.policy.store import StorePolicy
from kvstrata.storage.base import StorageAdapter
from kvstrata.storage.fields import COMMON, Fields
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.storage.wrap.codec import CodecAdapter
from kvstrata.storage.wrap.codec_chain import Chain, ChainSettings, read_chain
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.storage.wrap.metrics import MeteredAdapter, OpReport
from kvstrata.storage.wrap.presence import PresenceAdapter, PresenceLimits

log = logging.getLogger(__name__)

GB = 1 << 30
MB = 1 << 20
PLUGIN_GROUP = "kvstrata.l2_adapters"
STUCK_SHARE = 16
"""Default of `max_stuck_mb`: L1 / 16."""

ELSEWHERE = (
    "raw_block", "dax", "hf3fs",
    "aerospike", "bigtable", "hfbucket", "sagemaker_hyperpod", "nixl_store", "nixl_store_dynamic",
    "nixl_native", "native_plugin",
)  # fmt: skip
"""Types that exist in the field and that an installed plugin may provide here."""

NEARLY = 0.8
"""How like a field of ours an unknown one must be to be taken for it, where unknown ones are passed on."""
KILL_DEADLINES = 3
"""Default of `host_kill_ms`: so many deadlines."""


class HostPlan(NamedTuple):
    """How to run an adapter in a process of its own, which reads the entry again."""

    kill_ms: int | None
    """None: KILL_DEADLINES deadlines."""


DEFAULT_CODEC_STAGING_MB = 256
DEFAULT_CODEC_WORKERS = 2


class CodecConfig(NamedTuple):
    """How records are encoded for one adapter."""

    chain: ChainSettings = ChainSettings()
    staging_bytes: int = DEFAULT_CODEC_STAGING_MB * MB
    workers: int = DEFAULT_CODEC_WORKERS


class AdapterConfig(NamedTuple):
    """One checked entry of `l2_adapters`; nothing is opened yet."""

    name: str
    """`<type>-<index>`: what logs, metrics and status say."""
    number: int
    path: str
    """`l2_adapters[<index>]`, or what the caller calls it: what error messages say."""
    policy: StorePolicy
    deadline_ms: int | None
    """None: the server's `l2.deadline_ms`."""
    max_stuck_bytes: int | None
    """None: L1 / 16."""
    make: Callable[[], StorageAdapter]
    """Makes the bare adapter in this process."""
    entry: dict[str, Any]
    """As it was given."""
    host: HostPlan | None = None
    """None: it runs in this process."""
    codec: CodecConfig = CodecConfig()
    presence: PresenceLimits | None = None
    """None: not given, the defaults hold where the storage is shared."""


class ConfiguredAdapter(NamedTuple):
    """An adapter as the controllers use it: measured, with deadline and breaker, not yet open."""

    name: str
    adapter: StorageAdapter
    policy: StorePolicy
    guard: DeadlineAdapter
    """The wrapper inside `adapter` that has the breaker and counts stuck bytes, for status pages."""
    host: HostedAdapter | None = None
    """The part inside `adapter` that runs it in another process, where one does."""
    codec: CodecAdapter | None = None
    """The wrapper inside `guard` that encodes and decodes; None where that is in another process."""
    presence: PresenceAdapter | None = None
    """The wrapper inside `guard` that remembers what is there; None where the storage is not shared."""

    def advertisement(self) -> bytes:
        """What other instances need to reach the memory that the adapter has registered."""
        adapter = self.codec or self.host
        return b"" if adapter is None else adapter.advertisement()

    def prefer(self, keys: Sequence[bytes], source: bytes) -> None:
        """See StorageAdapter.prefer."""
        adapter = self.codec or self.host
        if adapter is not None:
            adapter.prefer(keys, source)

    def status(self) -> dict[str, Any]:
        """For status pages."""
        counted = self.codec or self.host
        return {
            "breakers": self.guard.breaker_states(),
            "stuck_bytes": self.guard.stuck_bytes,
            **({} if counted is None else {"codec": counted.stats(), "numbers": counted.numbers()}),
            **({"remarks": counted.remarks()} if counted is not None and counted.remarks() else {}),
            **({} if self.host is None else {"host": self.host.host_status()}),
            **(
                {"presence": self.presence.stats()}
                if self.presence is not None and self.presence.capabilities.shared
                else {}
            ),
        }


def make_adapter(entry: str | Mapping[str, Any], index: int) -> StorageAdapter:
    """The bare adapter of one entry, not open. Raises ConfigError."""
    return configure_adapter(entry, index).make()


def build_adapter(
    config: AdapterConfig,
    *,
    clock: Clock,
    l1_bytes: int,
    report: Callable[[OpReport], None],
    deadline_ms: int = 5_000,
) -> ConfiguredAdapter:
    """The adapter of a checked entry inside its wrappers. Raises ConfigError where a plugin does."""
    limits = DeadlineLimits(
        deadline_ms=config.deadline_ms or deadline_ms,
        max_stuck_bytes=config.max_stuck_bytes or l1_bytes // STUCK_SHARE,
    )
    host: HostedAdapter | None = None
    if config.host is not None:
        host = HostedAdapter(
            config.entry,
            config.number,
            name=config.name,
            kill_ms=config.host.kill_ms or KILL_DEADLINES * limits.deadline_ms,
            bytes_per_kill=limits.bytes_per_deadline,
        )
    codec = coded_adapter(config) if host is None else None
    inner: StorageAdapter | None = codec or host
    assert inner is not None
    presence: PresenceAdapter | None = None
    if inner.capabilities.shared or host is not None or config.presence is not None:
        # What runs in another process says what it is when it is open.
        inner = presence = PresenceAdapter(inner, config.presence, clock)
    guard = DeadlineAdapter(inner, limits, clock)
    return ConfiguredAdapter(
        config.name, MeteredAdapter(guard, report, clock), config.policy, guard, host, codec, presence
    )


def coded_adapter(config: AdapterConfig) -> CodecAdapter:
    """The bare adapter of a checked entry, made in this process, with its codecs around it."""
    adapter = config.make()
    adapter.name = config.name
    return CodecAdapter(
        adapter,
        Chain(config.codec.chain),
        staging_bytes=config.codec.staging_bytes,
        workers=config.codec.workers,
    )


def configure_adapter(
    entry: str | Mapping[str, Any], index: int, *, path: str = "", by_server: bool = False
) -> AdapterConfig:
    """Check one entry. Raises ConfigError naming the field below `path`, by default `l2_adapters[index]`.

    Without `by_server` it may not be of a type that only the server itself makes.
    """
    path = path or f"l2_adapters[{index}]"
    if isinstance(entry, str):
        try:
            entry = json.loads(entry)
        except json.JSONDecodeError as error:
            # Not what it says: it may hold a password.
            raise ConfigError(f"{path}: not JSON: {error}", field=path) from None
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f'{path}: must be an object with a "type", found {type(entry).__name__}', field=path
        )
    if odd := odd_value(entry, path):
        where, must, found = odd
        raise ConfigError(f"{where}: {must}, found {found!a:.80}", field=where)
    fields = Fields(entry, path)
    kind = fields.text("type")
    if kind == "peer" and not by_server:
        fields.refuse("type", "the server makes it where controller.url is set and p2p.engine is not off")
    factory = _factory(kind, f"{path}.type")
    name = f"{kind}-{index}"
    policy = fields.choice("policy", list(StorePolicy), StorePolicy.THROUGH)
    deadline_ms = fields.number("deadline_ms", None, least=1, most=600_000, whole=True)
    stuck_mb = fields.number("max_stuck_mb", None, least=1, most=1 << 20)
    isolation = "process" if kind in _HOSTED else "in_process"
    hosted = fields.choice("isolation", ["in_process", "process"], isolation) == "process"
    kill_ms = fields.number("host_kill_ms", None, least=10, most=3_600_000, whole=True)
    if kill_ms is not None and not hosted:
        fields.refuse("host_kill_ms", 'only an adapter with "isolation": "process" has a host; remove it')
    if kind not in ("fs", "fs_native") and fields.flag("shared", False):
        fields.refuse("shared", "only a directory of type fs can be shared; remove it")
    if fields.get("eviction") is not None:
        fields.noted("eviction", "the adapter's cap evicts the least recently used")
    if fields.get("serde") is not None:
        advice = 'write "codec": ["zstd"] or "codec": [{"name": "aes-gcm", "key_file": PATH}]'
        fields.refuse("serde", f"it was replaced by codec; {advice}")
    codec = _codec(fields)
    return AdapterConfig(
        name,
        index,
        path,
        StorePolicy(policy),
        None if deadline_ms is None else int(deadline_ms),
        None if stuck_mb is None else int(stuck_mb * MB),
        factory(fields, name),
        dict(entry),
        HostPlan(None if kill_ms is None else int(kill_ms)) if hosted else None,
        codec,
        _presence(fields),
    )


def _presence(fields: Fields) -> PresenceLimits | None:
    limits = {
        name: int(ttl_ms)
        for name, most in (("presence_ttl_ms", 60_000), ("negative_ttl_ms", 10_000))
        if (ttl_ms := fields.number(name, None, least=0, most=most, whole=True)) is not None
    }
    return PresenceLimits(**limits) if limits else None


def _codec(fields: Fields) -> CodecConfig:
    chain = read_chain(fields.get("codec"), f"{fields.path}.codec")
    staging_mb = fields.number("codec_staging_mb", DEFAULT_CODEC_STAGING_MB, least=1, most=1 << 20)
    workers = fields.number("codec_workers", DEFAULT_CODEC_WORKERS, least=1, most=64, whole=True)
    assert staging_mb is not None and workers is not None
    return CodecConfig(chain, int(staging_mb * MB), int(workers))


Factory = Callable[[Fields, str], Callable[[], StorageAdapter]]


def _factory(kind: str, where: str) -> Factory:
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    installed = {point.name: point for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    if kind in installed:
        return _from_entry_point(installed[kind])
    if kind in ELSEWHERE:
        raise ConfigError(
            f"{where}: {kind!r} is not part of this version; a plugin can provide it: install a package with"
            f" an entry point {kind!r} in the group {PLUGIN_GROUP!r}, or use type 'plugin'",
            field=where,
        )
    here = [*_BUILT_IN, *installed]
    hint = nearest(kind, [*here, *ELSEWHERE])
    raise ConfigError(
        f"{where}: unknown adapter {kind!r}{hint}; there are {', '.join(sorted(here))}", field=where
    )


def _base_path(fields: Fields) -> str:
    base_path = os.path.expanduser(fields.text("base_path"))
    if base_path.startswith("~"):
        raise fields.wrong("base_path", "must be an absolute path, the home directory is not known here")
    return os.path.abspath(base_path)


def _fs(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
    from kvstrata.storage.media.fs.adapter import FsAdapter, FsSettings

    base_path = _base_path(fields)
    tmp = fields.text("relative_tmp_dir", "tmp")
    parts = tmp.split(os.sep)
    if os.path.isabs(tmp) or any(part in ("", ".", "..") for part in parts):
        raise fields.wrong("relative_tmp_dir", "must be a plain path below base_path")
    if re.fullmatch("[0-9a-f]{2}", parts[0]):
        raise fields.wrong("relative_tmp_dir", "must not be two hex digits, records lie in such directories")
    fields.noted("read_ahead_size", "a record is read in one piece")
    sizes = [
        fields.number(field, None, least=0, most=1 << 30) for field in ("capacity_gb", "max_capacity_gb")
    ]
    if sizes[0] is not None and sizes[1] is not None and sizes[0] != sizes[1]:
        raise fields.wrong("max_capacity_gb", "is another name of capacity_gb, give one of them")
    free_gb = fields.number("min_free_gb", None, least=0, most=1 << 30)
    settings = FsSettings(
        base_path=base_path,
        relative_tmp_dir=tmp,
        shared=fields.flag("shared", False),
        use_odirect=fields.flag("use_odirect", True),
        capacity_bytes=int((sizes[0] or sizes[1] or 0) * GB),
        min_free_bytes=None if free_gb is None else int(free_gb * GB),
        num_workers=int(fields.number("num_workers", 4, least=1, most=256, whole=True) or 4),
        per_op_workers=fields.workers("per_op_workers"),
    )
    fields.finish()
    return lambda: FsAdapter(settings, name=name)


def _disk(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
    from kvstrata.native.disk import MIN_CAPACITY_BYTES
    from kvstrata.storage.media.disk.adapter import DiskSettings, disk_adapter

    base_path = _base_path(fields)
    capacity_gb = fields.number("capacity_gb", None, least=MIN_CAPACITY_BYTES / GB, most=1 << 30)
    if capacity_gb is None:
        raise fields.wrong("capacity_gb", "must be a number of GB, the log's segments are made for it")
    capacity_bytes = int(capacity_gb * GB)
    segment_mb = fields.number("segment_mb", None, least=16 * 4096 / MB, most=8 << 10)
    segment_bytes = 0 if segment_mb is None else int(segment_mb * MB) // 4096 * 4096
    if segment_bytes > capacity_bytes // 16:
        raise fields.wrong(
            "segment_mb", f"must be at most a sixteenth of capacity_gb, {capacity_bytes / 16 / MB:g} MB"
        )
    settings = DiskSettings(
        base_path=base_path,
        capacity_bytes=capacity_bytes,
        segment_bytes=segment_bytes,
        min_free_bytes=int((fields.number("min_free_gb", 1, least=0, most=1 << 30) or 0) * GB),
        use_odirect=fields.flag("use_odirect", True),
        reinsert_percent=int(fields.number("reinsert_percent", 20, least=0, most=50, whole=True) or 0),
        scrub_bytes_per_s=int((fields.number("scrub_mb_s", 4, least=0, most=1 << 20) or 0) * MB),
        num_workers=int(fields.number("num_workers", 4, least=1, most=256, whole=True) or 4),
        per_op_workers=fields.workers("per_op_workers"),
    )
    fields.finish()
    return lambda: disk_adapter(settings, name=name)


def _mooncake(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
    from kvstrata.storage.media.mooncake.adapter import SETUP_KEYS, MooncakeAdapter, MooncakeSettings

    ours = ("num_workers", "per_op_workers", "preregister_l1_memory", "replicate")
    setup = {key: value for key, value in fields.rest().items() if key not in ours}
    for key, value in setup.items():
        if key not in SETUP_KEYS:
            if hint := nearest(key, (*ours, *COMMON), cutoff=NEARLY):
                where = f"{fields.path}.{key}"
                raise ConfigError(f"{where}: unknown field, and no option of Mooncake{hint}", field=where)
            hint = nearest(key, SETUP_KEYS)
            log.warning("%s.%s: not known here%s, passed on to Mooncake", fields.path, key, hint)
        if not isinstance(value, str | int | float):
            raise fields.wrong(key, "must be a string, a number, true or false, as all options of Mooncake")
    for key in ("local_hostname", "metadata_server"):
        if key not in setup:
            raise fields.wrong(key, "Mooncake needs it, as its documentation of setup says")
    replicate = fields.get("replicate") or {}
    if not isinstance(replicate, Mapping):
        raise fields.wrong("replicate", "must be an object with options of Mooncake's ReplicateConfig")
    settings = MooncakeSettings(
        setup=setup,
        replicate=dict(replicate),
        preregister=fields.flag("preregister_l1_memory", True),
        num_workers=int(fields.number("num_workers", 4, least=1, most=256, whole=True) or 4),
        per_op_workers=fields.workers("per_op_workers"),
    )
    return lambda: MooncakeAdapter(settings, name=name)


def _resp(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
    from kvstrata.storage.media.resp.adapter import RespAdapter
    from kvstrata.storage.media.resp.config import settings_from

    settings = settings_from(fields)
    return lambda: RespAdapter(settings, name=name)


def _object_store(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
    from kvstrata.storage.media.object_store.config import settings_from

    settings = settings_from(fields, COMMON)

    def make() -> StorageAdapter:
        from kvstrata.storage.media.object_store.adapter import ObjectStoreAdapter

        return ObjectStoreAdapter(settings, name=name)

    return make


def _peer(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
    from kvstrata.p2p.tier import PeerSettings

    def whole(field: str, default: int, most: int = 60_000) -> int:
        number = fields.number(field, default, least=0, most=most, whole=True)
        assert number is not None
        return int(number)

    engine = fields.choice("engine", ["nixl", "ucx"], "ucx")
    settings = PeerSettings(
        controllers=tuple(dict.fromkeys(fields.text("controller").split(","))),
        engine=engine,
        curve_file=fields.text("curve_file", ""),
        lookup_timeout_ms=whole("lookup_timeout_ms", 250),
        load_timeout_ms=whole("load_timeout_ms", 5_000),
        max_bytes_per_s=(fields.number("max_mb_s", 0, least=0, most=1 << 30) or 0) * MB,
    )
    fields.finish()

    def make() -> StorageAdapter:
        from kvstrata.p2p.engines.nixl import NixlEngine
        from kvstrata.p2p.engines.ucx import UcxEngine
        from kvstrata.p2p.tier import PeerAdapter

        return PeerAdapter(settings, NixlEngine if engine == "nixl" else UcxEngine, name=name)

    return make


def _plugin(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
    module, attribute = fields.text("module_path"), fields.text("class_name")
    parameters = fields.get("adapter_params") or {}
    if not isinstance(parameters, Mapping):
        raise fields.wrong("adapter_params", "must be an object, the keyword arguments of the class")
    fields.finish()

    def make() -> StorageAdapter:
        try:
            made = getattr(importlib.import_module(module), attribute)(**parameters)
        except Exception as error:  # the plugin boundary
            raise ConfigError(
                f"{fields.path}: {module}.{attribute} cannot be made: {type(error).__name__}: {error}",
                field=fields.path,
            ) from error
        return _checked(made, fields.path, f"{module}.{attribute}")

    return make


def _from_entry_point(point: importlib.metadata.EntryPoint) -> Factory:
    def factory(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
        def make() -> StorageAdapter:
            try:
                made = point.load()(fields.rest(), fields.path)
            except ConfigError:
                raise
            except Exception as error:  # the plugin boundary
                raise ConfigError(
                    f"{fields.path}: plugin {point.value} cannot be made: {type(error).__name__}: {error}",
                    field=fields.path,
                ) from error
            return _checked(made, fields.path, point.value)

        return make

    return factory


def _checked(made: object, path: str, source: str) -> StorageAdapter:
    if not isinstance(made, StorageAdapter):
        raise ConfigError(f"{path}: {source} made {type(made).__name__}, no StorageAdapter", field=path)
    return made


def _fault_inject(fields: Fields, name: str) -> Callable[[], StorageAdapter]:
    if importlib.util.find_spec("hypothesis") is None:
        fields.refuse("type", "faults are for tests; pip install 'kvstrata[test]'")
    from kvstrata.testing.faults import Fault, FaultPlan
    from kvstrata.testing.faulty_adapter import FaultyAdapter

    inner = fields.get("inner")
    if not isinstance(inner, Mapping):
        raise fields.wrong("inner", "must be the object of the adapter that goes wrong")
    inner_fields = Fields(inner, f"{fields.path}.inner")
    kind = inner_fields.text("type")
    if inner_fields.get("isolation") is not None:
        inner_fields.refuse("isolation", "give it beside the type fault_inject, whose process it then is")
    make_inner = _factory(kind, f"{fields.path}.inner.type")(inner_fields, name)
    rate = fields.number("rate", 0.0, least=0, most=1) or 0.0
    seed = int(fields.number("seed", 0, least=0, most=1 << 62, whole=True) or 0)
    words = fields.get("faults")
    if words is None:
        words = list(Fault)
    if not isinstance(words, list) or any(word not in list(Fault) for word in words):
        raise fields.wrong("faults", f"must be a list with some of {', '.join(Fault)}")
    fields.finish()
    return lambda: FaultyAdapter(make_inner(), FaultPlan(seed, rate, [Fault(word) for word in words]))


_BUILT_IN: dict[str, Factory] = {
    "disk": _disk,
    "fs": _fs,
    "fs_native": _fs,
    "mooncake_store": _mooncake,
    "object_store": _object_store,
    "s3": _object_store,
    "peer": _peer,
    "plugin": _plugin,
    "redis": _resp,
    "resp": _resp,
    "valkey": _resp,
    "fault_inject": _fault_inject,
}
_HOSTED = ("mooncake_store",)
"""Types that run in a process of their own unless they are told otherwise."""
