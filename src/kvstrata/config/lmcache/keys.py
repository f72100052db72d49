"""Keys of `kv_connector_extra_config` and of the file in LMCACHE_CONFIG_FILE, and LMCACHE_… variables."""

from __future__ import annotations

from kvstrata.config.lmcache.fates import Name, kept, noted, refused, replaced

_OUR_LOCKS = "leases and reservations end with the process that holds them, not after a timeout"
_OUR_COPIES = "workers copy straight into and out of the pool, so there are no transfer threads or modes"
_OUR_SOCKETS = "workers only need the socket directory, whatever their IPC namespace"
_ALWAYS_COUNTED = "statistics are always on"
_AT_ONCE = "the pool serves at once and is faulted in meanwhile"
_BOUNDED = "every wait has its own short bound"
_ON_SERVER = "it is a setting of the server"
_CONTROLLER = f"{_ON_SERVER}: controller.url (--controller-url)"
_P2P = f"{_ON_SERVER}: p2p.*"
_ADAPTER = f"{_ON_SERVER}: --l2-adapter"
_NO_SCRIPTS = "no scripts are run; remove it"
_NO_PLUGINS = "no scripts are started; run them as services of their own"
_NO_PD = "prefill/decode disaggregation is not supported yet; remove it"
_ONLY_PD = "it changes prefill/decode disaggregation only, which is not supported yet"
_NO_BLEND = "blending is not supported; remove it"
_ONLY_BLEND = "it changes blending only, which is not supported"
_NO_GDS = "GPU direct storage is not supported; remove it"
_ONLY_GDS = "it changes GPU direct storage only, which is not supported"
_NO_HIDDEN = "hidden states are not cached; remove it"
_ONLY_HIDDEN = "it changes the caching of hidden states only, which is not supported"
_ONLY_SERVER = "engines send every lookup to the server of their host"

CONNECTOR_EXTRA: dict[str, Name] = {
    "lmcache.mp.host": kept("host"),
    "lmcache.mp.port": kept("port"),
    "lmcache.mp.save_decode_cache": kept("save_decode_cache"),
    "lmcache.mp.mq_timeout": noted(_BOUNDED),
    "lmcache.mp.heartbeat_interval": noted("liveness is read from shared memory"),
    "lmcache.mp.eager_prefetch": noted("lookups start as soon as the request is known"),
    "lmcache.mp.nonblocking_lookup_status": noted("lookups never block"),
    "lmcache.mp.mp_transfer_mode": noted(_OUR_COPIES),
    "lmcache.mp.isolated_ipc": noted(_OUR_SOCKETS),
    "lmcache.mp.use_vmm_api": noted(_OUR_COPIES),
    "lmcache.mp.server_urls": refused(
        "one server per host is supported; set lmcache.mp.host and lmcache.mp.port"
    ),
    "lmcache.mp.transfer_intermediate_tensors": refused("intermediate tensors are not moved; remove it"),
    "lmcache.mp.hash_algorithm": refused("chunk keys are SHA-256 and cannot be changed; remove it", "blake3"),
}
"""Keys of `kv_connector_extra_config` with this prefix; those without it are the keys of CLIENT_KEYS."""

CONNECTOR_EXTRA_PREFIXES: dict[str, Name] = {
    "lmcache.mp.lazy_offload_": noted("it changes lazy offload only, which is not supported"),
    "lmcache.mp.lazy_offload": refused("lazy offload is not supported; remove it"),
    "lmcache.mp.autostart.": noted(
        "it changes the start of a server by the engine only, which is not supported"
    ),
    "lmcache.mp.autostart": refused("start lmcache-server yourself, before or after the engine; remove it"),
}

CLIENT_KEYS: dict[str, Name] = {
    "chunk_size": kept("chunk_size"),
    "save_decode_cache": kept("save_decode_cache"),
    "lookup_timeout_ms": kept("lookup_timeout_ms"),
    "min_retrieve_tokens": kept("min_retrieve_tokens"),
    "enable_kv_events": kept("enable_kv_events"),
    "mp_host": kept("host"),
    "mp_port": kept("port"),
    "lmcache_instance_id": noted(
        "it would only name this engine in logs; the server has its own --instance-id"
    ),
    "local_cpu": replaced("", f"{_ON_SERVER}: L1 is always on"),
    "max_local_cpu_size": replaced("", f"{_ON_SERVER}: --l1-size-gb, one pool for all workers of the host"),
    "reserve_local_cpu_size": replaced("", f"{_ON_SERVER}: --l1-size-gb leaves free what it does not name"),
    "local_cpu_use_hugepages": replaced("", f"{_ON_SERVER}: --l1-use-hugepages"),
    "local_disk": replaced(
        "",
        f'{_ON_SERVER}: --l2-adapter \'{{"type": "disk", "base_path": …, "capacity_gb": …}}\'',
    ),
    "local_disk_path_sharding": replaced("", f"{_ADAPTER}, one for each directory"),
    "max_local_disk_size": replaced(
        "", f'{_ON_SERVER}: "capacity_gb" in --l2-adapter, for all workers of the host'
    ),
    "remote_url": replaced("", _ADAPTER),
    "remote_serde": replaced("", f'{_ON_SERVER}: "codec" in --l2-adapter'),
    "cache_policy": replaced("", f"{_ON_SERVER}: --eviction-policy"),
    "storage_plugins": replaced("", _ADAPTER),
    "remote_storage_plugins": replaced("", _ADAPTER),
    "external_backends": replaced("", _ADAPTER),
    "numa_mode": replaced("", f"{_ON_SERVER}: --l1-numa"),
    "enable_p2p": replaced(
        "",
        f"{_ON_SERVER}: instances with a controller read from each other unless p2p.engine is off",
    ),
    "peer_init_ports": replaced("", _P2P),
    "peer_lookup_ports": replaced("", _P2P),
    "enable_controller": replaced("", _CONTROLLER),
    "use_layerwise": noted("loads are overlapped where that is faster"),
    "enable_async_loading": noted("load_mode chooses between synchronous and asynchronous loads"),
    "pre_caching_hash_algorithm": noted("chunk keys are SHA-256"),
    "save_unfull_chunk": kept("save_unfull_chunk"),
    "discard_partial_chunks": noted(
        "save_unfull_chunk says whether the last chunk is stored before it is full"
    ),
    "skip_last_n_tokens": noted("whole blocks are stored and loaded, whatever the last tokens are"),
    "lmcache_rpc_port": noted("workers and scheduler talk to the server, not to each other"),
    "use_native": noted("there is one implementation"),
    "use_gpu_connector_v3": noted("gpu_copy_engine chooses how KV is copied"),
    "blocking_timeout_secs": noted(_BOUNDED),
    "retrieve_locations": noted("tiers are asked in the order of the server's adapters"),
    "store_location": noted("the server's adapters decide by their policy"),
    "enable_lazy_memory_allocator": noted(_AT_ONCE),
    "pin_timeout_sec": noted(_OUR_LOCKS),
    "pin_check_interval_sec": noted(_OUR_LOCKS),
    "enable_chunk_statistics": noted(_ALWAYS_COUNTED),
    "extra_config": noted("its keys belong to other implementations"),
    "py_enable_gc": noted("kvstrata does not change the garbage collector's settings"),
    "external_lookup_client": noted(_ONLY_SERVER),
    "lookup_server_worker_ids": noted(_ONLY_SERVER),
    "enable_scheduler_bypass_lookup": noted(_ONLY_SERVER),
    "hit_miss_ratio": noted("hits are counted by the server; see `kvstrata ctl status`"),
    "priority_limit": noted("requests of every priority are cached"),
    "runtime_plugin_locations": noted(_NO_PLUGINS),
    "plugin_locations": noted(_NO_PLUGINS),
    "app_id": noted("it names the application to a configuration service, and none is asked"),
    "audit_actual_remote_url": noted("it changes the remote type audit only, which is not supported"),
    "cufile_buffer_size": noted(_ONLY_GDS),
    "use_gds": noted(_ONLY_GDS),
    "maru_pool_size": noted("it changes Maru only, which is not supported"),
    "max_hidden_state_cpu_size": noted(_ONLY_HIDDEN),
    "gds_path": refused(_NO_GDS),
    "maru_path": refused("Maru is not supported; remove it"),
    "enable_pd": refused(_NO_PD),
    "enable_xpyd": refused(_NO_PD),
    "enable_blending": refused(_NO_BLEND),
    "enable_hidden_state_cache": refused(_NO_HIDDEN),
    "remote_config_url": refused("settings are read from this file only; remove it"),
    "run_script_api_enabled": refused(_NO_SCRIPTS),
    "script_allowed_imports": refused(_NO_SCRIPTS),
}
"""Keys of the file in LMCACHE_CONFIG_FILE, and, upper-cased, of LMCACHE_<KEY> variables."""

CLIENT_KEY_PREFIXES: dict[str, Name] = {
    "lazy_memory_": noted(_AT_ONCE),
    "internal_api_server_": noted("the server has an admin HTTP port"),
    "chunk_statistics_": noted(_ALWAYS_COUNTED),
    "pd_": noted(_ONLY_PD),
    "blend_": noted(_ONLY_BLEND),
    "gds_": noted(_ONLY_GDS),
    "hidden_state": noted(_ONLY_HIDDEN),
    "p2p_": replaced("", _P2P),
    "nixl_": replaced("", _P2P),
    "transfer_channel": replaced("", _P2P),
    "controller_": replaced("", _CONTROLLER),
    "lmcache_worker_": replaced("", _CONTROLLER),
}
"""Fates of all other keys that begin with one of these words."""

VARIABLES: dict[str, Name] = {
    "LMCACHE_USE_EXPERIMENTAL": noted("there is one implementation"),
    "LMCACHE_TRACK_USAGE": noted("nothing is reported to anybody"),
    "LMCACHE_USAGE_TRACK_INTERVAL": noted("nothing is reported to anybody"),
    "LMCACHE_USAGE_TRACK_URL": noted("nothing is reported to anybody"),
    "LMCACHE_DISABLE_BANNER": noted("there is no banner"),
    "LMCACHE_LOG_LEVEL": noted(
        "an engine's log follows vLLM's (VLLM_LOGGING_LEVEL), and the server has --log-level"
    ),
    "LMCACHE_MP_TRANSFER_MODE": noted(_OUR_COPIES),
    "LMCACHE_MQ_TIMEOUT": noted(_BOUNDED),
    "LMCACHE_SERVER_URL": noted("it is read by LMCache's connector for TensorRT-LLM, and there is none here"),
    "LMCACHE_OFFLOAD_RPC_PORT": noted("workers and scheduler talk to the server, not to each other"),
    "LMCACHE_COORDINATOR_URL": replaced(
        "controller.url",
        "a coordinator of LMCache cannot be joined; set KVSTRATA_CONTROLLER_URL for the server, to the reply port of "
        "an lmcache-controller, tcp://HOST:8400",
    ),
    "LMCACHE_FORCE_SKIP_SAVE": replaced(
        "", "vLLM's kv_role says whether an engine stores: kv_consumer only loads"
    ),
    "LMCACHE_GPU_STAGING_BUFFER_BYTES": replaced("gpu_staging_mb", "set KVSTRATA_GPU_STAGING_MB, in MB"),
    "LMCACHE_DEVICE_BACKEND": noted("the device is the engine's"),
    "LMCACHE_ROCM_ENABLE_BATCH_MEMCPY": noted("ROCm is not supported"),
    "LMCACHE_CONTROLLER_CONFIG_FILE": replaced("", "lmcache-controller has --config"),
}
"""Variables that are not keys of the file upper-cased."""

VARIABLE_PREFIXES: dict[str, Name] = {
    "LMCACHE_COORDINATOR_": noted(
        "an instance with a controller reports to it, in time and without settings"
    ),
    "LMCACHE_RUNTIME_PLUGIN_": noted(_NO_PLUGINS),
    "LMCACHE_PLUGIN_": noted(_NO_PLUGINS),
    "LMCACHE_REQUEST_TELEMETRY_": noted("nothing is reported to anybody"),
    "LMCACHE_RESP_": replaced("", 'the fields of --l2-adapter \'{"type": "resp", …}\' name the server'),
    "LMCACHE_AEROSPIKE_": noted("there is no adapter for Aerospike"),
    "LMCACHE_EC_": noted("caches of encoders are not supported"),
    "LMCACHE_MUSA_": noted("MUSA is not supported"),
}
"""Fates of all other variables that begin with one of these words."""
