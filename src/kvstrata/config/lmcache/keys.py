"""Keys of `kv_connector_extra_config` and of the file in LMCACHE_CONFIG_FILE, and LMCACHE_… variables."""

from __future__ import annotations

from kvstrata.config.lmcache.fates import Name, kept, noted, refused, replaced

_OUR_LOCKS = "leases and reservations end with the process that holds them, not after a timeout"
_OUR_COPIES = "workers copy straight into and out of the pool, so there are no transfer threads or modes"
_OUR_SOCKETS = "workers only need the socket directory, whatever their IPC namespace"
_ALWAYS_COUNTED = "statistics are always on"
_AT_ONCE = "the pool serves at once and is faulted in meanwhile"
_LOAD_MODE = "load_mode chooses between synchronous and asynchronous loads"
_BOUNDED = "every wait has its own short bound"
_ON_SERVER = "it is a setting of the server"
_CONTROLLER = f"{_ON_SERVER}: controller.url (--controller-url)"
_P2P = f"{_ON_SERVER}: p2p.*"
_ADAPTER = f"{_ON_SERVER}: --l2-adapter"
_NO_SCRIPTS = "no scripts are run"
_NO_PLUGINS = "no scripts are started; run them as services of their own"
_NO_PD = (
    "prefill and decode engines share KV through the server or L2; for a direct hand-over, vLLM's MultiConnector takes "
    "NixlConnector beside this connector (docs/engines.md)"
)
_NO_BLEND = "blending is not supported"
_ONLY_BLEND = "it changes blending only, which is not supported"
_NO_GDS = (
    "GPU direct storage is not supported: L2 reads and writes through L1, --l2-adapter of type disk or fs"
)
_ONLY_GDS = "it changes GPU direct storage only, which is not supported"
_NO_HIDDEN = "hidden states are not cached"
_ONLY_HIDDEN = "it changes the caching of hidden states only, which is not supported"
_KEYS = "the server's HTTP port always asks for a token, that in http.token_file or one that the server makes"
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
    "lmcache.mp.transfer_intermediate_tensors": refused("intermediate tensors are not moved"),
    "lmcache.mp.hash_algorithm": noted("chunk keys are SHA-256"),
}
"""Keys of `kv_connector_extra_config` with this prefix; those without it are the keys of CLIENT_KEYS."""

CONNECTOR_EXTRA_PREFIXES: dict[str, Name] = {
    "lmcache.mp.lazy_offload_": noted("it changes lazy offload only, which is not supported"),
    "lmcache.mp.lazy_offload": refused("chunks are stored as soon as they are computed"),
    "lmcache.mp.autostart.": noted(
        "it changes the start of a server by the engine only, which is not supported"
    ),
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
    "lmcache_instance_id": noted(
        "it would only name this engine in logs; the server has its own --instance-id"
    ),
    "local_cpu": replaced("", f"{_ON_SERVER}: L1 is always on"),
    "local_device": replaced(
        "", f"{_ON_SERVER}: L1 is always host memory; KV on the GPU is the engine's own"
    ),
    "max_local_cache_size": replaced("", f"{_ON_SERVER}: --l1-size-gb, one pool for all workers of the host"),
    "enable_gpu_storage": noted("KV on the GPU is the engine's own prefix cache"),
    "max_local_cpu_size": replaced("", f"{_ON_SERVER}: --l1-size-gb, one pool for all workers of the host"),
    "reserve_local_cpu_size": replaced("", f"{_ON_SERVER}: --l1-size-gb leaves free what it does not name"),
    "local_cpu_use_hugepages": replaced("", f"{_ON_SERVER}: --l1-use-hugepages"),
    "local_disk": replaced(
        "",
        f'{_ON_SERVER}: --l2-adapter \'{{"type": "disk", "base_path": …, "capacity_gb": …}}\'',
    ),
    "local_disk_path_sharding": replaced("", f"{_ADAPTER}, of one folder for all GPUs"),
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
    "lookup_url": replaced("", _CONTROLLER),
    "distributed_url": replaced("", _P2P),
    "enable_controller": replaced("", _CONTROLLER),
    "use_layerwise": noted("loads are overlapped where that is faster"),
    "enable_async_loading": noted(_LOAD_MODE),
    "async_loading": noted(_LOAD_MODE),
    "pipelined_backend": noted("loads are overlapped where that is faster"),
    "error_handling": noted("whatever fails is a miss, and the engine computes the tokens"),
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
    "extra_config": replaced(
        "", f"{_ON_SERVER}: `kvstrata migrate FILE` says what each of its keys is in --l2-adapter"
    ),
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
    "weka_path": refused(_NO_GDS),
    "kvikio_cache_dir": refused(_NO_GDS),
    "maru_path": refused("Maru is not supported"),
    "enable_pd": refused(_NO_PD),
    "enable_xpyd": refused(_NO_PD),
    "enable_nixl": refused(_NO_PD),
    "enable_blending": refused(_NO_BLEND),
    "enable_hidden_state_cache": refused(_NO_HIDDEN),
    "remote_config_url": refused("settings are read from this file only"),
    "run_script_api_enabled": refused(_NO_SCRIPTS),
    "script_allowed_imports": refused(_NO_SCRIPTS),
}
"""Keys of the file in LMCACHE_CONFIG_FILE, and, upper-cased, of LMCACHE_<KEY> variables."""

CLIENT_KEY_PREFIXES: dict[str, Name] = {
    "lazy_memory_": noted(_AT_ONCE),
    "internal_api_server_": noted("the server has an admin HTTP port"),
    "chunk_statistics_": noted(_ALWAYS_COUNTED),
    "pd_": noted(_NO_PD),
    "blend_": noted(_ONLY_BLEND),
    "gds_": noted(_ONLY_GDS),
    "hidden_state": noted(_ONLY_HIDDEN),
    "cost_aware_": noted("the server evicts by --eviction-policy"),
    "p2p_": replaced("", _P2P),
    "nixl_backends": replaced("", _P2P),
    "nixl_": noted(_NO_PD),
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
    "LMCACHE_SERVER_URL": replaced(
        "port", "engines attach to the server of their own host; set KVSTRATA_PORT to the port of its --port"
    ),
    "LMCACHE_API_KEY": replaced("", _KEYS),
    "LMCACHE_API_KEY_FILE": replaced("", _KEYS),
    "LMCACHE_HTTP_API_KEY": replaced("", _KEYS),
    "LMCACHE_HTTP_API_KEY_FILE": replaced("", _KEYS),
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

_BY_ADAPTER = "the adapter has settings of its own (docs/remote-tiers.md)"
_SHARED_ONCE = "what all ranks share is stored once"
_NOT_COPIED = "credentials are not copied (docs/remote-tiers.md says where the server finds them)"

EXTRA_KEYS: dict[str, Name] = {
    "use_odirect": noted("disk and fs read and write past the page cache where the file system can"),
    "use_exists_sync": noted("one question asks for all keys"),
    "save_chunk_meta": noted("every record has a header of its own"),
    "save_only_first_rank": noted(_SHARED_ONCE),
    "remote_enable_mla_worker_id_as0": noted(_SHARED_ONCE),
    "gpu_to_numa_mapping": noted("l1.numa names nodes, not GPUs"),
    "storage_root_dir": refused("set MOONCAKE_STORAGE_ROOT_DIR in the environment of lmcache-server to it"),
    "prefer_local_alloc": refused(
        'Mooncake places records; "replicate": {"preferred_segment": "HOST:PORT"} in the adapter names a place'
    ),
    "transfer_timeout": noted('"deadline_ms" of an adapter bounds each operation'),
    "username": noted(_NOT_COPIED),
    "password": noted(_NOT_COPIED),
}
"""Keys of `extra_config` that make no field of an adapter; Mooncake's also with `mooncake_` before them."""

EXTRA_PREFIXES: dict[str, Name] = {
    "aws_": noted(_NOT_COPIED),
    "s3_": noted(_BY_ADAPTER),
    "azure_": noted(_BY_ADAPTER),
    "valkey_": noted(_BY_ADAPTER),
    "audit_": noted("it changes the remote type audit only, which is not supported"),
    "nixl_": noted("it changes LMCache's NIXL storage only"),
    "remote_storage_plugin.": noted("it belongs to a plugin for LMCache"),
    "storage_plugin.": noted("it belongs to a plugin for LMCache"),
}
"""Fates of all other keys of `extra_config` that begin with one of these words."""
