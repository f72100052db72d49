"""Keys of `kv_connector_extra_config` and of the file in LMCACHE_CONFIG_FILE, and LMCACHE_… variables."""

from __future__ import annotations

from kvstrata.config.lmcache.fates import TUNES, Name, each, kept, noted, refused, replaced

_ON_SERVER = "it is a setting of the server"
_CONTROLLER = f"{_ON_SERVER}: controller.url (--controller-url)"
_P2P = f"{_ON_SERVER}: p2p.*"
_ADAPTER = f"{_ON_SERVER}: --l2-adapter"
_NO_PLUGINS = "no scripts are started; run them as services of their own"
_NO_PD = (
    "prefill and decode engines share KV through the server or L2; for a direct hand-over, vLLM's MultiConnector takes "
    "NixlConnector beside this connector (docs/engines.md)"
)
_NO_GDS = "GPU direct storage is not supported; an --l2-adapter of type disk or fs has its folder"

CONNECTOR_EXTRA: dict[str, Name] = {
    "lmcache.mp.host": kept("host"),
    "lmcache.mp.port": kept("port"),
    "lmcache.mp.save_decode_cache": kept("save_decode_cache"),
    "lmcache.mp.server_urls": refused("an engine has one server; set lmcache.mp.port"),
    "lmcache.mp.transfer_intermediate_tensors": refused("intermediate tensors are not moved"),
    **each(
        "lmcache.mp.mq_timeout lmcache.mp.heartbeat_interval lmcache.mp.eager_prefetch "
        "lmcache.mp.nonblocking_lookup_status lmcache.mp.mp_transfer_mode lmcache.mp.use_vmm_api "
        "lmcache.mp.isolated_ipc lmcache.mp.hash_algorithm",
        TUNES,
    ),
}
"""Keys of `kv_connector_extra_config` with this prefix; those without it are the keys of CLIENT_KEYS."""

CONNECTOR_EXTRA_PREFIXES: dict[str, Name] = {
    "lmcache.mp.lazy_offload_": TUNES,
    "lmcache.mp.lazy_offload": refused("chunks are stored as soon as they are computed"),
    "lmcache.mp.autostart.": TUNES,
    "lmcache.mp.autostart": refused("start lmcache-server yourself, before or after the engine"),
}

CLIENT_KEYS: dict[str, Name] = {
    "chunk_size": kept("chunk_size"),
    "save_decode_cache": kept("save_decode_cache"),
    "lookup_timeout_ms": kept("lookup_timeout_ms"),
    "min_retrieve_tokens": kept("min_retrieve_tokens"),
    "enable_kv_events": kept("enable_kv_events"),
    "mp_host": kept("host"),
    "mp_port": kept("port"),
    "lmcache_instance_id": noted("it would name this engine in logs; the server has --instance-id"),
    "local_cpu": replaced("", f"{_ON_SERVER}: L1 is always on"),
    "local_device": replaced("", f"{_ON_SERVER}: L1 is host memory, KV on the GPU is the engine's"),
    **each(
        "max_local_cache_size max_local_cpu_size",
        replaced("", f"{_ON_SERVER}: --l1-size-gb, one pool for all workers of the host"),
    ),
    "reserve_local_cpu_size": replaced("", f"{_ON_SERVER}: --l1-size-gb leaves free what it does not name"),
    "local_cpu_use_hugepages": replaced("", f"{_ON_SERVER}: --l1-use-hugepages"),
    "local_disk": replaced(
        "", f'{_ON_SERVER}: --l2-adapter \'{{"type": "disk", "base_path": …, "capacity_gb": …}}\''
    ),
    "local_disk_path_sharding": replaced("", f"{_ADAPTER}, of one folder for all GPUs"),
    "max_local_disk_size": replaced("", f'{_ON_SERVER}: "capacity_gb" in --l2-adapter'),
    **each("remote_url storage_plugins remote_storage_plugins external_backends", replaced("", _ADAPTER)),
    "remote_serde": replaced("", f'{_ON_SERVER}: "codec" in --l2-adapter'),
    "cache_policy": replaced("", f"{_ON_SERVER}: --eviction-policy"),
    "numa_mode": replaced("", f"{_ON_SERVER}: --l1-numa"),
    "enable_p2p": replaced("", f"{_ON_SERVER}: p2p.*, on in a cluster unless p2p.engine is off"),
    **each("peer_init_ports peer_lookup_ports distributed_url", replaced("", _P2P)),
    **each("lookup_url enable_controller", replaced("", _CONTROLLER)),
    **each("enable_async_loading async_loading", noted("load_mode says when hits are loaded")),
    "save_unfull_chunk": kept("save_unfull_chunk"),
    "discard_partial_chunks": noted("save_unfull_chunk says whether an unfinished chunk is stored"),
    "retrieve_locations": noted("tiers are asked in the order of the server's adapters"),
    "store_location": noted("the server's adapters decide by their policy"),
    "extra_config": replaced("", f"{_ON_SERVER}: `kvstrata migrate FILE` tells of each key"),
    **each("runtime_plugin_locations plugin_locations", noted(_NO_PLUGINS)),
    **each("gds_path weka_path kvikio_cache_dir", refused(_NO_GDS)),
    "maru_path": refused("Maru is not supported"),
    **each("enable_pd enable_xpyd enable_nixl", refused(_NO_PD)),
    "enable_blending": refused("blending is not supported"),
    "enable_hidden_state_cache": refused("hidden states are not cached"),
    "remote_config_url": refused("settings are read from this file only"),
    **each("run_script_api_enabled script_allowed_imports", refused("no scripts are run")),
    **each(
        "use_native use_gpu_connector_v3 lmcache_rpc_port error_handling pre_caching_hash_algorithm "
        "skip_last_n_tokens blocking_timeout_secs enable_lazy_memory_allocator pin_timeout_sec "
        "pin_check_interval_sec enable_chunk_statistics py_enable_gc external_lookup_client "
        "lookup_server_worker_ids enable_scheduler_bypass_lookup app_id audit_actual_remote_url "
        "cufile_buffer_size use_gds maru_pool_size max_hidden_state_cpu_size hit_miss_ratio use_layerwise "
        "pipelined_backend enable_gpu_storage priority_limit",
        TUNES,
    ),
}
"""Keys of the file in LMCACHE_CONFIG_FILE, and, upper-cased, of LMCACHE_<KEY> variables."""

CLIENT_KEY_PREFIXES: dict[str, Name] = {
    "lazy_memory_": TUNES,
    "internal_api_server_": noted("the server has an admin HTTP port"),
    "chunk_statistics_": TUNES,
    "pd_": noted(_NO_PD),
    "blend_": TUNES,
    "gds_": TUNES,
    "hidden_state": TUNES,
    "cost_aware_": TUNES,
    "p2p_": replaced("", _P2P),
    "nixl_backends": replaced("", _P2P),
    "nixl_": noted(_NO_PD),
    "transfer_channel": replaced("", _P2P),
    "controller_": replaced("", _CONTROLLER),
    "lmcache_worker_": replaced("", _CONTROLLER),
}
"""Fates of all other keys that begin with one of these words."""

VARIABLES: dict[str, Name] = {
    **each(
        "LMCACHE_TRACK_USAGE LMCACHE_USAGE_TRACK_INTERVAL LMCACHE_USAGE_TRACK_URL",
        noted("nothing is reported to anybody"),
    ),
    "LMCACHE_LOG_LEVEL": noted("engines log as VLLM_LOGGING_LEVEL says, the server has --log-level"),
    "LMCACHE_SERVER_URL": replaced(
        "port", "engines attach to the server of their own host; set KVSTRATA_PORT to the port of its --port"
    ),
    "LMCACHE_COORDINATOR_URL": replaced(
        "controller.url",
        "a coordinator of LMCache cannot be joined; set KVSTRATA_CONTROLLER_URL for the server, to the reply port of "
        "an lmcache-controller, tcp://HOST:8400",
    ),
    "LMCACHE_FORCE_SKIP_SAVE": replaced("", "kv_role: kv_consumer in vLLM only loads"),
    "LMCACHE_GPU_STAGING_BUFFER_BYTES": replaced("gpu_staging_mb", "set KVSTRATA_GPU_STAGING_MB, in MB"),
    "LMCACHE_CONTROLLER_CONFIG_FILE": replaced("", "lmcache-controller has --config"),
    **each(
        "LMCACHE_USE_EXPERIMENTAL LMCACHE_DISABLE_BANNER LMCACHE_MP_TRANSFER_MODE LMCACHE_MQ_TIMEOUT "
        "LMCACHE_OFFLOAD_RPC_PORT LMCACHE_DEVICE_BACKEND LMCACHE_ROCM_ENABLE_BATCH_MEMCPY",
        TUNES,
    ),
}
"""Variables that are not keys of the file upper-cased."""

VARIABLE_PREFIXES: dict[str, Name] = {
    "LMCACHE_COORDINATOR_": noted("instances report to their controller without settings"),
    **each("LMCACHE_RUNTIME_PLUGIN_ LMCACHE_PLUGIN_", noted(_NO_PLUGINS)),
    **each(
        "LMCACHE_API_KEY LMCACHE_HTTP_API_KEY",
        replaced(
            "",
            "the server's HTTP port always asks for a token: that in http.token_file, or one that it makes",
        ),
    ),
    "LMCACHE_REQUEST_TELEMETRY_": noted("nothing is reported to anybody"),
    "LMCACHE_RESP_": replaced("", 'the fields of --l2-adapter \'{"type": "resp", …}\' name the server'),
    "LMCACHE_AEROSPIKE_": noted("there is no adapter for Aerospike"),
    "LMCACHE_EC_": TUNES,
    "LMCACHE_MUSA_": TUNES,
}
"""Fates of all other variables that begin with one of these words."""

_NOT_COPIED = "credentials are not copied (docs/remote-tiers.md says where the server finds them)"

EXTRA_KEYS: dict[str, Name] = {
    "use_odirect": noted("disk and fs read and write past the page cache where the file system can"),
    "storage_root_dir": refused("set MOONCAKE_STORAGE_ROOT_DIR in the environment of lmcache-server to it"),
    "prefer_local_alloc": refused(
        '"replicate": {"preferred_segment": "HOST:PORT"} of the adapter names one place'
    ),
    "transfer_timeout": noted('"deadline_ms" of an adapter bounds each operation'),
    **each("username password", noted(_NOT_COPIED)),
}
"""Keys of `extra_config` that make no field of an adapter; Mooncake's also with `mooncake_` before them."""

EXTRA_PREFIXES: dict[str, Name] = {
    "aws_": noted(_NOT_COPIED),
    **each("s3_ azure_ valkey_", noted("the adapter has settings of its own (docs/remote-tiers.md)")),
    **each("remote_storage_plugin. storage_plugin.", noted("it belongs to a plugin for LMCache")),
}
"""Fates of other keys of `extra_config` that begin with one of these words; all others are TUNES."""
