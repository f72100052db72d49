"""Names that users of LMCache have in their deployments, and how each is treated here.

    kept        same name, same meaning
    noted       accepted; one log line says why it has no effect
    replaced    our setting has another name.  As a flag, LMCache's name is an error; in a client's file or variables,
                one log line says that it has no effect.  Both texts name our setting.
    refused     an error that says what to do

A name in no table is an error that suggests the nearest known name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvstrata.config.nearest import nearest
from kvstrata.errors import ConfigError


class Fate(enum.StrEnum):
    """What happens to a known name."""

    KEPT = "kept"
    NOTED = "noted"
    REPLACED = "replaced"
    REFUSED = "refused"


class Name(NamedTuple):
    """`target`: our setting for KEPT and REPLACED (dotted path; empty where no single setting has that meaning).
    `say`: the text of the log line or the error, without the name itself."""

    fate: Fate
    target: str = ""
    say: str = ""


def _kept(target: str) -> Name:
    return Name(Fate.KEPT, target)


def _noted(say: str) -> Name:
    return Name(Fate.NOTED, "", say)


def _refused(say: str) -> Name:
    return Name(Fate.REFUSED, "", say)


_OUR_LOCKS = "leases and reservations end with the process that holds them, not after a timeout"
_OUR_COPIES = "workers copy straight into and out of the pool, so the server has no transfer threads or modes"
_NO_BLEND = "blending is not supported; remove it"
_NO_SCRIPTS = "the server runs no scripts; remove it"

SERVER_FLAGS: dict[str, Name] = {
    "--instance-id": _kept("instance_id"),
    "--host": _kept("host"),
    "--port": _kept("port"),
    "--chunk-size": _kept("chunk_size"),
    "--http-host": _kept("http.host"),
    "--http-port": _kept("http.port"),
    "--l1-size-gb": _kept("l1.size_gb"),
    "--eviction-policy": _kept("l1.eviction_policy"),
    "--eviction-trigger-watermark": _kept("l1.eviction_trigger_watermark"),
    "--eviction-ratio": _kept("l1.eviction_ratio"),
    "--l2-adapter": _kept("l2_adapters"),
    "--l2-prefetch-max-in-flight": _kept("l2.prefetch_max_in_flight"),
    "--l1-use-hugepages": _kept("l1.use_hugepages"),
    "--l2-store-policy": Name(
        Fate.REPLACED, "", 'use the adapter\'s own "policy" (through, on_evict, second_touch) in --l2-adapter'
    ),
    "--l2-prefetch-policy": Name(
        Fate.REPLACED, "", "chunks loaded from L2 always stay in L1 until they are evicted; remove the flag"
    ),
    "--shm-name": Name(Fate.REPLACED, "l1.segment_dir", "the pool's files live in a directory"),
    "--prometheus-port": Name(Fate.REPLACED, "http.port", "metrics are served as /metrics on the HTTP port"),
    "--coordinator-url": Name(
        Fate.REPLACED,
        "controller.url",
        "use --controller-url with the controller's reply port, tcp://HOST:8400",
    ),
    "--p2p-advertise-url": Name(Fate.REPLACED, "p2p.advertise", "use --p2p-advertise HOST:PORT"),
    "--p2p-listen-url": Name(Fate.REPLACED, "p2p.listen", "use --p2p-listen HOST:PORT"),
    "--p2p-lookup-timeout": Name(
        Fate.REPLACED,
        "p2p.lookup_timeout_ms",
        "the time that a lookup waits for peers is given in milliseconds",
    ),
    "--p2p-load-timeout": Name(Fate.REPLACED, "p2p.load_timeout_ms", "the time is given in milliseconds"),
    "--p2p-transfer-engine": Name(Fate.REPLACED, "p2p.engine", "use --p2p-engine auto, ucx or nixl"),
    "--transport": Name(Fate.NOTED, "", "the transport is always zmq"),
    "--max-workers": _noted(_OUR_COPIES),
    "--max-gpu-workers": _noted(_OUR_COPIES),
    "--max-cpu-workers": _noted(_OUR_COPIES),
    "--supported-transfer-mode": _noted(_OUR_COPIES),
    "--isolated-ipc": _noted("workers only need the socket directory, whatever their IPC namespace"),
    "--l1-use-lazy": _noted("the pool serves at once and is faulted in meanwhile"),
    "--l1-init-size-gb": _noted("the pool has its full size from the start"),
    "--l1-align-bytes": _noted("extents are always aligned to pages"),
    "--l1-write-ttl-seconds": _noted(_OUR_LOCKS),
    "--l1-read-ttl-seconds": _noted(_OUR_LOCKS),
    "--worker-reap-timeout-seconds": _noted(_OUR_LOCKS),
    "--session-ttl-seconds": _noted(_OUR_LOCKS),
    "--worker-registration-grace-seconds": _noted(_OUR_LOCKS),
    "--periodic-notifier-interval-ms": _noted("completions are signalled when they happen"),
    "--null-block-id": _noted("block tables come from the engine, so no block id has a special meaning"),
    "--event-bus-queue-size": _noted("there is no event bus"),
    "--disable-observability": _noted("metrics cost nothing measurable and are always on"),
    "--hash-algorithm": _refused("chunk keys are SHA-256 and cannot be changed; remove it"),
    "--engine-type": _refused("kvstrata has one kind of engine, and blending is not supported; remove it"),
    "--run-script-api-enabled": _refused(_NO_SCRIPTS),
    "--script-allowed-imports": _refused(_NO_SCRIPTS),
    "--l1-devdax-path": _refused("L1 is shared memory; remove it"),
    "--l1-manager": _refused("kvstrata has one kind of L1; remove it"),
    "--server-module": _refused("start lmcache-server itself; remove it"),
    "--enable-tracing": _refused("tracing is not supported yet; remove it"),
    "--otlp-endpoint": _refused("tracing is not supported yet; remove it"),
    "--lookup-hash-log-dir": _refused("recording of lookups is not supported yet; remove it"),
}
"""Flags of `lmcache server`."""

FLAG_PREFIXES: dict[str, Name] = {
    "--blend": _refused(_NO_BLEND),
    "--l1-gds-": _refused("L1 is shared memory; remove it"),
    "--gds-l1-": _refused("L1 is shared memory; remove it"),
}
"""Flags that begin with one of these words are refused."""

CONNECTOR_EXTRA: dict[str, Name] = {
    "lmcache.mp.host": _kept("host"),
    "lmcache.mp.port": _kept("port"),
    "lmcache.mp.save_decode_cache": _kept("save_decode_cache"),
    "lmcache.mp.mq_timeout": _noted("every wait has its own short bound"),
    "lmcache.mp.heartbeat_interval": _noted("liveness is read from shared memory"),
    "lmcache.mp.eager_prefetch": _noted("lookups start as soon as the request is known"),
    "lmcache.mp.nonblocking_lookup_status": _noted("lookups never block"),
    "lmcache.mp.mp_transfer_mode": _noted(_OUR_COPIES),
    "lmcache.mp.isolated_ipc": _noted("workers only need the socket directory"),
    "lmcache.mp.use_vmm_api": _noted(_OUR_COPIES),
    "lmcache.mp.server_urls": _refused(
        "one server per host is supported; set lmcache.mp.host and lmcache.mp.port"
    ),
    "lmcache.mp.transfer_intermediate_tensors": _refused("intermediate tensors are not moved; remove it"),
    "lmcache.mp.hash_algorithm": _refused("chunk keys are SHA-256 and cannot be changed; remove it"),
}
"""Keys of `kv_connector_extra_config`."""

CONNECTOR_EXTRA_PREFIXES: dict[str, Name] = {
    "lmcache.mp.lazy_offload": _refused("lazy offload is not supported; remove it"),
    "lmcache.mp.autostart": _refused("start lmcache-server yourself, before or after the engine; remove it"),
}

_ON_SERVER = "is a setting of the server"

CLIENT_KEYS: dict[str, Name] = {
    "chunk_size": _kept("chunk_size"),
    "save_decode_cache": _kept("save_decode_cache"),
    "lookup_timeout_ms": _kept("lookup_timeout_ms"),
    "min_retrieve_tokens": _kept("min_retrieve_tokens"),
    "enable_kv_events": _kept("enable_kv_events"),
    "lmcache_instance_id": _noted(
        "it would only name this engine in logs; the server has its own --instance-id"
    ),
    "local_cpu": Name(Fate.REPLACED, "", f"{_ON_SERVER}: L1 is always on"),
    "max_local_cpu_size": Name(Fate.REPLACED, "", f"{_ON_SERVER}: --l1-size-gb"),
    "local_disk": Name(
        Fate.REPLACED,
        "",
        f'{_ON_SERVER}: --l2-adapter \'{{"type": "disk", "base_path": …, "capacity_gb": …}}\'',
    ),
    "max_local_disk_size": Name(Fate.REPLACED, "", f'{_ON_SERVER}: "capacity_gb" in --l2-adapter'),
    "remote_url": Name(Fate.REPLACED, "", f"{_ON_SERVER}: --l2-adapter"),
    "cache_policy": Name(Fate.REPLACED, "", f"{_ON_SERVER}: --eviction-policy"),
    "storage_plugins": Name(Fate.REPLACED, "", f"{_ON_SERVER}: --l2-adapter"),
    "remote_storage_plugins": Name(Fate.REPLACED, "", f"{_ON_SERVER}: --l2-adapter"),
    "numa_mode": Name(Fate.REPLACED, "", f"{_ON_SERVER}: --l1-numa"),
    "use_layerwise": _noted("loads are overlapped where that is faster"),
    "enable_async_loading": _noted("load_mode chooses between synchronous and asynchronous loads"),
    "pre_caching_hash_algorithm": _noted("chunk keys are SHA-256"),
    "save_unfull_chunk": _noted("only full chunks are stored"),
    "blocking_timeout_secs": _noted("every wait has its own short bound"),
    "retrieve_locations": _noted("tiers are asked in the order of the server's adapters"),
    "store_location": _noted("the server's adapters decide by their policy"),
    "enable_lazy_memory_allocator": _noted("the pool serves at once and is faulted in meanwhile"),
    "pin_timeout_sec": _noted(_OUR_LOCKS),
    "enable_chunk_statistics": _noted("statistics are always on"),
    "extra_config": _noted("its keys belong to other implementations"),
    "py_enable_gc": _noted("kvstrata does not change the garbage collector's settings"),
    "enable_pd": _refused("prefill/decode disaggregation is not supported yet; remove it"),
    "enable_blending": _refused(_NO_BLEND),
    "remote_config_url": _refused("settings are read from this file only; remove it"),
    "enable_p2p": Name(
        Fate.REPLACED,
        "",
        f"{_ON_SERVER}: instances with a controller read from each other unless p2p.engine is off",
    ),
    "enable_controller": Name(Fate.REPLACED, "", f"{_ON_SERVER}: controller.url (--controller-url)"),
}
"""Keys of the file in LMCACHE_CONFIG_FILE, and, upper-cased, of LMCACHE_<KEY> variables."""

CLIENT_KEY_PREFIXES: dict[str, Name] = {
    "lazy_memory_": _noted("the pool serves at once and is faulted in meanwhile"),
    "internal_api_server_": _noted("the server has an admin HTTP port"),
    "pd_": _refused("prefill/decode disaggregation is not supported yet; remove it"),
    "blend_": _refused(_NO_BLEND),
    "gds_": _refused("GPU direct storage is not supported; remove it"),
    "maru_": _refused("Maru is not supported; remove it"),
    "hidden_state_": _refused("hidden states are not cached; remove it"),
    "p2p_": Name(Fate.REPLACED, "", f"{_ON_SERVER}: p2p.*"),
    "nixl_": Name(Fate.REPLACED, "", f"{_ON_SERVER}: p2p.*"),
    "transfer_channel": Name(Fate.REPLACED, "", f"{_ON_SERVER}: p2p.*"),
    "controller_": Name(Fate.REPLACED, "", f"{_ON_SERVER}: controller.url (--controller-url)"),
    "lmcache_worker_": Name(Fate.REPLACED, "", f"{_ON_SERVER}: controller.url (--controller-url)"),
}

_FALSY = (False, None, "", "false", "False", "0", 0)


def find(name: str, table: Mapping[str, Name], prefixes: Mapping[str, Name]) -> Name | None:
    """The entry of the whole name, or else of a prefix of it."""
    if name in table:
        return table[name]
    return next((entry for prefix, entry in prefixes.items() if name.startswith(prefix)), None)


def translate(
    values: Mapping[str, Any],
    *,
    source: str,
    table: Mapping[str, Name],
    prefixes: Mapping[str, Name],
    own: Iterable[str],
) -> tuple[dict[str, Any], list[str]]:
    """Translate settings that a user gave under LMCache's or our own names; returns our settings and the log lines.

    `own`: names of our settings, accepted as they are.  Raises ConfigError for refused and unknown names.  A refused
    switch that is off asks for nothing, so it only gets a log line.
    """
    own_names = set(own)
    settings: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in values.items():
        entry = find(name, table, prefixes)
        if entry is None and name in own_names:
            entry = _kept(name)
        if entry is None:
            raise ConfigError(
                f"{source}: {name}: unknown key{nearest(name, [*own_names, *table])}", field=name
            )
        if entry.fate is Fate.KEPT:
            settings[entry.target] = value
        elif entry.fate is Fate.REFUSED and value not in _FALSY:
            raise ConfigError(f"{source}: {name}: {entry.say} (value {value!r:.80})", field=name)
        else:
            notes.append(f"{source}: {name} has no effect: {entry.say}")
    return settings, notes
