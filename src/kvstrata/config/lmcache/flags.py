"""Flags of `lmcache server` and of `lmcache_controller`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.config.lmcache.fates import TUNES, Fate, Name, each, meant, no_effect, refused

BUFFER_ONLY = "skip_l1"
"""Value of `--l2-store-policy` with which L1 keeps nothing that is in L2; LMCache's `noop` evicts no more than that."""


def _kept(**targets: str) -> dict[str, Name]:
    return {f"--{flag.replace('_', '-')}": Name(Fate.KEPT, target) for flag, target in targets.items()}


SERVER_FLAGS: dict[str, Name] = {
    **_kept(
        instance_id="instance_id",
        port="port",
        chunk_size="chunk_size",
        http_host="http.host",
        http_port="http.port",
        l1_size_gb="l1.size_gb",
        eviction_policy="l1.eviction_policy",
        l2_adapter="l2_adapters",
        l1_use_hugepages="l1.use_hugepages",
        no_l1_use_hugepages="l1.use_hugepages",
        otlp_endpoint="observability.otlp_endpoint",
    ),
    "--cpu-buffer-size": Name(Fate.TRANSLATED, "l1.size_gb", "write --l1-size-gb", factor=1),
    "--p2p-advertise-url": Name(
        Fate.TRANSLATED, "p2p.advertise", "write --p2p-advertise HOST:PORT", also="p2p.listen"
    ),
    "--p2p-listen-url": Name(Fate.TRANSLATED, "p2p.listen", "write --p2p-listen HOST:PORT"),
    "--p2p-lookup-timeout": Name(
        Fate.TRANSLATED, "p2p.lookup_timeout_ms", "this setting is in milliseconds", factor=1000
    ),
    "--p2p-load-timeout": Name(
        Fate.TRANSLATED, "p2p.load_timeout_ms", "this setting is in milliseconds", factor=1000
    ),
    "--p2p-transfer-engine": Name(Fate.TRANSLATED, "p2p.engine", "write --p2p-engine auto, tcp or nixl"),
    "--l2-store-policy": refused(
        'set "policy" of each adapter in --l2-adapter; the default, through, puts every chunk; remove the flag',
        *("default", BUFFER_ONLY),
    ),
    "--l2-prefetch-policy": refused(
        "chunks loaded from L2 stay in L1 until they are evicted; remove the flag", *("default", "retain")
    ),
    "--coordinator-url": refused(
        "kvstrata cannot join an LMCache coordinator; use --controller-url with the reply port of an "
        "lmcache-controller, tcp://HOST:8400"
    ),
    "--transport": refused("the server supports only ZMQ; remove the flag", "zmq"),
    "--kv-load-policy": refused("the server loads no custom classes; remove the flag", "DEFAULT"),
    "--hash-algorithm": refused("chunk keys always use SHA-256; remove the flag", "blake3"),
    "--engine-type": refused("blending is not supported; remove the flag", "default"),
    **each(
        "--run-script-api-enabled --script-allowed-imports --l1-devdax-path --gds-l1-path --l1-manager "
        "--server-module --enable-tracing --trace-level --lookup-hash-log-dir",
        refused("kvstrata has no such feature; remove the flag"),
    ),
    "--host": no_effect("engines attach through a unix socket on their own host"),
    "--prometheus-port": no_effect("metrics are at /metrics on the HTTP port (--http-port)"),
    **each(
        "--api-key-file --http-api-key-file",
        no_effect("the HTTP port always requires a token, from http.token_file or created by the server"),
    ),
    **each(
        "--eviction-trigger-watermark --eviction-ratio",
        no_effect("a chunk is evicted when another one needs its space, so L1 stays full"),
    ),
    "--l1-mlock": no_effect("L1 is faulted in but not locked; use memory.swap.max to keep it in memory"),
    **each(
        "--l2-prefetch-max-in-flight --l2-prefetch-inflight-watermark",
        no_effect("at most 8 lookups and 1/8 of L1's bytes are loaded from an adapter at a time"),
    ),
    "--disable-logging": no_effect("use --log-level"),
    **each(
        "--shm-name --separate-object-groups --no-separate-object-groups --runtime-plugin-locations "
        "--runtime-plugin-config --enable-extra-logging --extra-logging-interval "
        "--enable --null-block-id --periodic-notifier-interval-ms --event-bus-queue-size --enable-gc-monitor "
        "--gc-monitor-min-pause-ms --gc-monitor-top-objects --l1-align-bytes --l1-init-size-gb --l1-use-lazy "
        "--no-l1-use-lazy --grpc-server-workers --grpc-server-mode --disable-grpc-metrics --isolated-ipc "
        "--no-isolated-ipc --enable-segmented-prefix --enable-dedup-content --enable-blend-reorder "
        "--lookup-hash-log-rotation-interval --lookup-hash-log-rotation-max-size --lookup-hash-log-max-files "
        "--trace-output --gds-l1-use-direct-io --no-gds-l1-use-direct-io --gds-l1-backend --l1-devdax-offset-gb "
        "--metrics-sample-rate --disable-observability --disable-metrics --disable-prometheus "
        "--no-run-script-api-enabled --l1-write-ttl-seconds --l1-read-ttl-seconds --worker-reap-timeout-seconds "
        "--session-ttl-seconds --worker-registration-grace-seconds --max-workers --max-gpu-workers "
        "--max-cpu-workers --supported-transfer-mode --enable-token-trace --kv-event-log-size",
        TUNES,
    ),
}
"""Flags of `lmcache server`."""

FLAG_PREFIXES: dict[str, Name] = {
    "--coordinator-": TUNES,
    "--blend": refused("blending is not supported; remove the flag"),
    **each("--l1-gds- --gds-l1-", refused("kvstrata has no such feature; remove the flag")),
}
"""Fates of all other flags that begin with one of these words."""

CONTROLLER_FLAGS: dict[str, Name] = {
    **_kept(host="http.host", port="http.port", monitor_ports="monitor_ports"),
    "--lmcache-worker-timeout": Name(Fate.TRANSLATED, "dead_after_s", "write --dead-after-s", factor=1),
    "--health-check-interval": no_effect(
        "the controller asks instances at least every --heartbeat-s seconds"
    ),
    "--monitor-port": refused("use --monitor-ports '{\"reply\": PORT}'"),
}
"""Flags of `lmcache_controller`."""


def entry_of_ours(entry: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """An entry of `--l2-adapter` with a type of ours, and what is to be said if its type was LMCache's `nixl_store`.

    An entry of any other type is returned as it is.
    """
    params, kind = entry.get("backend_params"), entry.get("type")
    if kind not in ("nixl_store", "nixl_store_dynamic") or entry.get("backend") != "POSIX":
        return entry, ""
    if not isinstance(params, Mapping) or not params.get("file_path"):
        return entry, ""
    path = f"{str(params['file_path']).rstrip('/')}/kvstrata"
    theirs = ("type", "backend", "backend_params", "pool_size", "persist_enabled")
    ours = {name: value for name, value in entry.items() if name not in theirs}
    ours |= {"type": "fs", "base_path": path, **odirect(params.get("use_direct_io"))}
    cap = ", without a cap: capacity_gb sets one"
    if capacity_gb := meant(params.get("max_capacity_gb"), float):
        ours["capacity_gb"], cap = capacity_gb, ""
    return ours, f"{kind} with POSIX is taken as fs in {path}{cap}"


def odirect(asked: object) -> dict[str, Any]:
    """Whether a folder's files are read and written past the page cache, if that was asked for or against."""
    return {} if (asked := meant(asked, bool)) is None else {"use_odirect": asked}
