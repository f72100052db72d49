"""Flags of `lmcache server` and of `lmcache_controller`."""

from __future__ import annotations

from kvstrata.config.lmcache.fates import TUNES, Fate, Name, each, kept, noted, refused, replaced

_OUR_KEYS = "the HTTP port always asks for a token: that in http.token_file, or one that the server makes"
_L1_IS_MEMORY = "L1 is shared memory; remove it"

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
    **each("--l1-use-hugepages --no-l1-use-hugepages", kept("l1.use_hugepages")),
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
        "", "chunks loaded from L2 stay in L1 until they are evicted; remove the flag", *("default", "retain")
    ),
    "--coordinator-url": replaced(
        "controller.url",
        "a coordinator of LMCache cannot be joined; use --controller-url with the reply port of an lmcache-controller, "
        "tcp://HOST:8400",
    ),
    "--shm-name": noted(
        "KV always goes through shared memory, in files named after the port; l1.segment_dir names their folder"
    ),
    "--prometheus-port": noted("metrics are /metrics on the HTTP port (--http-port)"),
    "--transport": refused("the server speaks ZMQ only; remove it", "zmq"),
    **each("--api-key-file --http-api-key-file", noted(_OUR_KEYS)),
    "--kv-load-policy": refused(
        "the server loads no classes; min_retrieve_tokens of an engine and lmcache.skip_load of a request say what is "
        "computed instead of loaded",
        "DEFAULT",
    ),
    "--l1-mlock": noted("L1 is faulted in, but not locked: memory.swap.max keeps it in memory"),
    "--l2-prefetch-inflight-watermark": noted("--l2-prefetch-max-in-flight bounds what is loaded at a time"),
    **each(
        "--separate-object-groups --no-separate-object-groups",
        noted("groups of layers always have their own records"),
    ),
    **each(
        "--runtime-plugin-locations --runtime-plugin-config",
        noted("the server starts no scripts; run them as services"),
    ),
    "--disable-logging": noted("--log-level says what is logged"),
    **each("--enable-extra-logging --extra-logging-interval", noted("`kvstrata ctl status` shows the same")),
    "--hash-algorithm": refused("chunk keys are SHA-256 and cannot be changed; remove it", "blake3"),
    "--engine-type": refused("blending is not supported; remove it", "default"),
    **each(
        "--run-script-api-enabled --script-allowed-imports", refused("the server runs no scripts; remove it")
    ),
    **each("--l1-devdax-path --gds-l1-path", refused(_L1_IS_MEMORY)),
    "--l1-manager": refused("kvstrata has one kind of L1; remove it"),
    "--server-module": refused("the server loads no modules; remove it"),
    **each("--enable-tracing --otlp-endpoint", refused("tracing is not supported yet; remove it")),
    **each("--trace-level --lookup-hash-log-dir", refused("lookups are not recorded; remove it")),
    **each(
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
    "--coordinator-": noted("instances report to their controller (--controller-url) without settings"),
    "--blend": refused("blending is not supported; remove it"),
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
