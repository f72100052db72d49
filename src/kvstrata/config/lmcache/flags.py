"""Flags of `lmcache server` and of `lmcache_controller`."""

from __future__ import annotations

from kvstrata.config.lmcache.fates import Fate, Name, kept, noted, refused, replaced

_OUR_LOCKS = "leases and reservations end with the process that holds them, not after a timeout"
_OUR_COPIES = "workers copy straight into and out of the pool, so the server has no transfer threads or modes"
_OUR_GROUPS = "the groups of a model's layers always have records of their own"
_OUR_KEYS = (
    "the admin HTTP port always asks for a token, that in http.token_file or one that the server makes"
)
_OUR_METRICS = "metrics cost nothing measurable and are always on"
_NO_BLEND = "blending is not supported; remove it"
_ONLY_BLEND = "it changes blending only, which is not supported"
_NO_SCRIPTS = "the server runs no scripts; remove it"
_NO_PLUGINS = "the server starts no scripts; run them as services of their own"
_NO_TRACING = "tracing is not supported yet; remove it"
_NO_RECORDING = "recording of lookups is not supported yet; remove it"
_ONLY_RECORDING = "it changes the recording of lookups only, which is not supported yet"
_L1_IS_MEMORY = "L1 is shared memory; remove it"
_ONLY_GDS = "it changes GPU direct storage only, and L1 is shared memory"
_NO_COLLECTOR = "the server watches no garbage collector"
_OUR_REPORTS = "an instance with a controller (--controller-url) reports to it, in time and without settings"

BUFFER_ONLY = "skip_l1"
"""Value of `--l2-store-policy` with which L1 keeps nothing that is in L2; LMCache's `noop` evicts no more than that."""

SERVER_FLAGS: dict[str, Name] = {
    "--instance-id": kept("instance_id"),
    "--host": kept("host"),
    "--port": kept("port"),
    "--chunk-size": kept("chunk_size"),
    "--http-host": kept("http.host"),
    "--http-port": kept("http.port"),
    "--l1-size-gb": kept("l1.size_gb"),
    "--cpu-buffer-size": Name(Fate.TRANSLATED, "l1.size_gb", "write --l1-size-gb", factor=1),
    "--eviction-policy": kept("l1.eviction_policy"),
    "--eviction-trigger-watermark": kept("l1.eviction_trigger_watermark"),
    "--eviction-ratio": kept("l1.eviction_ratio"),
    "--l2-adapter": kept("l2_adapters"),
    "--l2-prefetch-max-in-flight": kept("l2.prefetch_max_in_flight"),
    "--l1-use-hugepages": kept("l1.use_hugepages"),
    "--no-l1-use-hugepages": kept("l1.use_hugepages"),
    "--p2p-advertise-url": Name(
        Fate.TRANSLATED, "p2p.advertise", "write --p2p-advertise HOST:PORT", also="p2p.listen"
    ),
    "--p2p-listen-url": Name(Fate.TRANSLATED, "p2p.listen", "write --p2p-listen HOST:PORT"),
    "--p2p-lookup-timeout": Name(
        Fate.TRANSLATED, "p2p.lookup_timeout_ms", "ours counts milliseconds", factor=1000
    ),
    "--p2p-load-timeout": Name(
        Fate.TRANSLATED, "p2p.load_timeout_ms", "ours counts milliseconds", factor=1000
    ),
    "--p2p-transfer-engine": Name(Fate.TRANSLATED, "p2p.engine", "write --p2p-engine auto, ucx or nixl"),
    "--l2-store-policy": Name(
        Fate.REPLACED,
        "",
        'every L2 adapter has a "policy" in --l2-adapter: through (the default) puts every chunk, on_evict and '
        "second_touch put fewer; remove the flag",
        {
            "default": "",
            BUFFER_ONLY: "every chunk is put to every L2 adapter, and leaves L1 when its room is needed instead of at "
            "once",
        },
    ),
    "--l2-prefetch-policy": replaced(
        "",
        "chunks loaded from L2 stay in L1 until they are evicted; remove the flag",
        *("default", "retain"),
    ),
    "--coordinator-url": replaced(
        "controller.url",
        "a coordinator of LMCache cannot be joined; use --controller-url with the reply port of an lmcache-controller, "
        "tcp://HOST:8400",
    ),
    "--shm-name": noted(
        "KV always goes through shared memory, in files named after the port; l1.segment_dir names their folder"
    ),
    "--prometheus-port": noted(
        "metrics are /metrics on the HTTP port (--http-port); let Prometheus ask there"
    ),
    "--transport": refused("the server speaks ZMQ only; remove it", "zmq"),
    "--grpc-server-workers": noted("the server speaks ZMQ only"),
    "--grpc-server-mode": noted("the server speaks ZMQ only"),
    "--api-key-file": noted(_OUR_KEYS),
    "--http-api-key-file": noted(_OUR_KEYS),
    "--kv-load-policy": refused(
        "the server loads no classes; min_retrieve_tokens of an engine and lmcache.skip_load of a request say what is "
        "computed instead of loaded",
        "DEFAULT",
    ),
    "--l1-mlock": noted(
        "L1 is faulted in at the start; where the host swaps, keep it from that (memory.swap.max)"
    ),
    "--l1-devdax-offset-gb": noted("it changes Device-DAX only, and L1 is shared memory"),
    "--l2-prefetch-inflight-watermark": noted("--l2-prefetch-max-in-flight bounds what is loaded at a time"),
    "--enable-token-trace": noted("tokens are not recorded"),
    "--max-workers": noted(_OUR_COPIES),
    "--max-gpu-workers": noted(_OUR_COPIES),
    "--max-cpu-workers": noted(_OUR_COPIES),
    "--supported-transfer-mode": noted(_OUR_COPIES),
    "--isolated-ipc": noted("workers only need the socket directory, whatever their IPC namespace"),
    "--no-isolated-ipc": noted("workers only need the socket directory, whatever their IPC namespace"),
    "--l1-use-lazy": noted("the pool serves at once and is faulted in meanwhile"),
    "--no-l1-use-lazy": noted("the pool serves at once and is faulted in meanwhile"),
    "--l1-init-size-gb": noted("the pool has its full size from the start"),
    "--l1-align-bytes": noted("extents are always aligned to pages"),
    "--l1-write-ttl-seconds": noted(_OUR_LOCKS),
    "--l1-read-ttl-seconds": noted(_OUR_LOCKS),
    "--worker-reap-timeout-seconds": noted(_OUR_LOCKS),
    "--session-ttl-seconds": noted(_OUR_LOCKS),
    "--worker-registration-grace-seconds": noted(_OUR_LOCKS),
    "--periodic-notifier-interval-ms": noted("completions are signalled when they happen"),
    "--null-block-id": noted("block tables come from the engine, so no block id has a special meaning"),
    "--separate-object-groups": noted(_OUR_GROUPS),
    "--no-separate-object-groups": noted(_OUR_GROUPS),
    "--enable": noted("there are no experimental modules"),
    "--kv-event-log-size": noted("engines hand on events of KV themselves, with enable_kv_events"),
    "--runtime-plugin-locations": noted(_NO_PLUGINS),
    "--runtime-plugin-config": noted(_NO_PLUGINS),
    "--event-bus-queue-size": noted("there is no event bus"),
    "--disable-observability": noted(_OUR_METRICS),
    "--disable-metrics": noted(_OUR_METRICS),
    "--disable-prometheus": noted(_OUR_METRICS),
    "--disable-grpc-metrics": noted("the server speaks ZMQ only"),
    "--metrics-sample-rate": noted("every event is counted"),
    "--disable-logging": noted("--log-level says what is logged"),
    "--enable-extra-logging": noted("`kvstrata ctl status` shows the same figures at any time"),
    "--extra-logging-interval": noted("`kvstrata ctl status` shows the same figures at any time"),
    "--enable-gc-monitor": noted(_NO_COLLECTOR),
    "--gc-monitor-min-pause-ms": noted(_NO_COLLECTOR),
    "--gc-monitor-top-objects": noted(_NO_COLLECTOR),
    "--enable-segmented-prefix": noted(_ONLY_BLEND),
    "--enable-dedup-content": noted(_ONLY_BLEND),
    "--enable-blend-reorder": noted(_ONLY_BLEND),
    "--lookup-hash-log-rotation-interval": noted(_ONLY_RECORDING),
    "--lookup-hash-log-rotation-max-size": noted(_ONLY_RECORDING),
    "--lookup-hash-log-max-files": noted(_ONLY_RECORDING),
    "--trace-output": noted(_ONLY_RECORDING),
    "--gds-l1-use-direct-io": noted(_ONLY_GDS),
    "--no-gds-l1-use-direct-io": noted(_ONLY_GDS),
    "--gds-l1-backend": noted(_ONLY_GDS),
    "--no-run-script-api-enabled": noted("the server runs no scripts"),
    "--hash-algorithm": refused("chunk keys are SHA-256 and cannot be changed; remove it", "blake3"),
    "--engine-type": refused(
        "kvstrata has one kind of engine, and blending is not supported; remove it", "default"
    ),
    "--run-script-api-enabled": refused(_NO_SCRIPTS),
    "--script-allowed-imports": refused(_NO_SCRIPTS),
    "--l1-devdax-path": refused(_L1_IS_MEMORY),
    "--gds-l1-path": refused(_L1_IS_MEMORY),
    "--l1-manager": refused("kvstrata has one kind of L1; remove it"),
    "--server-module": refused("the server loads no modules; remove it"),
    "--enable-tracing": refused(_NO_TRACING),
    "--otlp-endpoint": refused(_NO_TRACING),
    "--trace-level": refused(_NO_RECORDING),
    "--lookup-hash-log-dir": refused(_NO_RECORDING),
}
"""Flags of `lmcache server`."""

FLAG_PREFIXES: dict[str, Name] = {
    "--coordinator-": noted(_OUR_REPORTS),
    "--blend": refused(_NO_BLEND),
    "--l1-gds-": refused(_L1_IS_MEMORY),
    "--gds-l1-": refused(_L1_IS_MEMORY),
}
"""Fates of all other flags that begin with one of these words."""

CONTROLLER_FLAGS: dict[str, Name] = {
    "--host": kept("http.host"),
    "--port": kept("http.port"),
    "--monitor-ports": kept("monitor_ports"),
    "--lmcache-worker-timeout": Name(Fate.TRANSLATED, "dead_after_s", "write --dead-after-s", factor=1),
    "--health-check-interval": noted("instances send a heartbeat every --heartbeat-s seconds"),
    "--monitor-port": replaced("monitor_ports.pull", "use --monitor-ports '{\"pull\": PORT}'"),
}
"""Flags of `lmcache_controller`."""
