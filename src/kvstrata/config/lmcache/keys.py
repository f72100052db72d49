"""Keys of `kv_connector_extra_config` and of the file in LMCACHE_CONFIG_FILE, and LMCACHE_… variables."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvstrata.config.lmcache.fates import TUNES, Fate, Name, each, find, hint, kept, meant, no_effect, refused
from kvstrata.config.load import is_pod_link

HOST = Name(Fate.KEPT, "host", "it must be this host; tcp://localhost:5555 also sets the port")
_NO_PD = (
    "engines of one server share chunks by themselves, and the gateway's `split: kvstrata` chooses who prefills "
    "(docs/pd.md); for a direct transfer, put NixlConnector beside this connector in vLLM's MultiConnector"
)
_CLUSTER = no_effect("instances find each other through the server's controller.url and p2p.listen")

CONNECTOR_EXTRA: dict[str, Name] = {
    "lmcache.mp.host": HOST,
    **{
        f"lmcache.mp.{name}": entry
        for name, entry in kept(port="port", save_decode_cache="save_decode_cache").items()
    },
    "lmcache.mp.lazy_offload": Name(Fate.KEPT, "store", "true: `late`, false: `commit`"),
    "lmcache.mp.server_urls": refused("an engine uses one server; set lmcache.mp.port"),
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
    "lmcache.mp.autostart": refused("start lmcache-server yourself, before or after the engine"),
}

OF_SERVER: dict[str, Name] = {
    **each(
        "local_cpu local_device max_local_cache_size max_local_cpu_size reserve_local_cpu_size",
        no_effect("set the server's l1.size_gb, which is for all workers of the host"),
    ),
    "local_cpu_use_hugepages": no_effect("set the server's l1.use_hugepages"),
    "numa_mode": no_effect("set the server's l1.numa"),
    "cache_policy": no_effect("set the server's l1.eviction_policy"),
    "lmcache_instance_id": no_effect("set the server's instance_id"),
    **each(
        "local_disk local_disk_path_sharding max_local_disk_size",
        no_effect("add an entry of type disk to the server's l2_adapters"),
    ),
    **each(
        "remote_url remote_serde storage_plugins remote_storage_plugins external_backends extra_config",
        no_effect("add an entry for the store to the server's l2_adapters (docs/tiers.md)"),
    ),
    **each(
        "enable_controller enable_p2p peer_init_ports peer_lookup_ports distributed_url lookup_url",
        _CLUSTER,
    ),
}
"""Keys of the file for LMCache that say what a server's settings say here."""

OF_SERVER_PREFIXES = each("p2p_ nixl_backends transfer_channel controller_ lmcache_worker_", _CLUSTER)

CLIENT_KEYS: dict[str, Name] = {
    **kept(
        chunk_size="chunk_size",
        save_decode_cache="save_decode_cache",
        lookup_timeout_ms="lookup_timeout_ms",
        enable_kv_events="enable_kv_events",
        save_unfull_chunk="save_unfull_chunk",
        mp_port="port",
    ),
    "mp_host": HOST,
    **OF_SERVER,
    **each("enable_async_loading async_loading", no_effect("load_mode sets when hits are loaded")),
    "min_retrieve_tokens": no_effect("the server loads from L2 if computing would be slower (l2.load)"),
    "discard_partial_chunks": no_effect("save_unfull_chunk sets whether an unfinished chunk is stored"),
    **each("retrieve_locations store_location", no_effect("the server asks its adapters in their order")),
    **each("gds_path weka_path kvikio_cache_dir", refused("GPU direct storage is not supported")),
    **each("enable_pd enable_xpyd enable_nixl", refused(_NO_PD)),
    "enable_blending": refused("blending is not supported"),
    "enable_hidden_state_cache": refused("hidden states are not cached"),
    "remote_config_url": refused("settings are read only from this file"),
    "maru_path": refused("Maru is not supported"),
    **each("run_script_api_enabled script_allowed_imports", refused("no scripts are run")),
    **each("runtime_plugin_locations plugin_locations", refused("no scripts are run")),
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
    **OF_SERVER_PREFIXES,
    **each("pd_ nixl_", no_effect(_NO_PD)),
    **each(
        "lazy_memory_ internal_api_server_ chunk_statistics_ blend_ gds_ hidden_state cost_aware_",
        TUNES,
    ),
}
"""Fates of all other keys that begin with one of these words."""

VARIABLES: dict[str, Name] = {
    "LMCACHE_LOG_LEVEL": no_effect("set VLLM_LOGGING_LEVEL for engines and --log-level for the server"),
    "LMCACHE_SERVER_URL": no_effect(
        "engines attach to the server of their own host; set KVSTRATA_PORT to the port of its --port"
    ),
    "LMCACHE_COORDINATOR_URL": no_effect(
        "kvstrata cannot join an LMCache coordinator; set the server's KVSTRATA_CONTROLLER_URL to the reply port of "
        "an lmcache-controller, tcp://HOST:8400"
    ),
    "LMCACHE_FORCE_SKIP_SAVE": no_effect("use kv_role: kv_consumer in vLLM, which only loads"),
    "LMCACHE_CONTROLLER_CONFIG_FILE": no_effect("use --config of lmcache-controller"),
    **each(
        "LMCACHE_TRACK_USAGE LMCACHE_USAGE_TRACK_INTERVAL LMCACHE_USAGE_TRACK_URL LMCACHE_USE_EXPERIMENTAL "
        "LMCACHE_DISABLE_BANNER LMCACHE_MP_TRANSFER_MODE LMCACHE_MQ_TIMEOUT LMCACHE_OFFLOAD_RPC_PORT "
        "LMCACHE_DEVICE_BACKEND LMCACHE_ROCM_ENABLE_BATCH_MEMCPY LMCACHE_GPU_STAGING_BUFFER_BYTES",
        TUNES,
    ),
}
"""Variables that are not keys of the file upper-cased."""

VARIABLE_PREFIXES: dict[str, Name] = {
    **each(
        "LMCACHE_API_KEY LMCACHE_HTTP_API_KEY",
        no_effect(
            "the server's HTTP port always requires a token, from http.token_file or created by the server"
        ),
    ),
    **each(
        "LMCACHE_COORDINATOR_ LMCACHE_RUNTIME_PLUGIN_ LMCACHE_PLUGIN_ LMCACHE_REQUEST_TELEMETRY_ LMCACHE_RESP_ "
        "LMCACHE_AEROSPIKE_ LMCACHE_EC_ LMCACHE_MUSA_",
        TUNES,
    ),
}
"""Fates of all other variables that begin with one of these words."""


PREFIX = "LMCACHE_"
FILE = "LMCACHE_CONFIG_FILE"


def engine_keys(environment: Mapping[str, str], own: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The variable of each key that an engine's variables give, and notes for the other variables.

    `own`: names of the engine's own settings.
    """
    keys: dict[str, str] = {}
    notes = []
    for name in _variables(environment):
        key = name.removeprefix(PREFIX).lower()
        if entry := find(name, VARIABLES, VARIABLE_PREFIXES):
            notes.append(f"environment: {name} has no effect: {entry.say}")
        elif key in own or find(key, CLIENT_KEYS, CLIENT_KEY_PREFIXES):
            keys[key] = name
        else:
            notes.append(_unknown(name, own))
    return keys, notes


def server_notes(environment: Mapping[str, str], own: Collection[str]) -> list[str]:
    """Notes for the variables that say something to a server. Those of an engine that shares its environment do not.

    `own`: names of an engine's own settings.
    """
    notes = []
    for name in _variables(environment):
        key = name.removeprefix(PREFIX).lower()
        if entry := find(name, VARIABLES, VARIABLE_PREFIXES) or find(key, OF_SERVER, OF_SERVER_PREFIXES):
            notes.append(f"environment: {name} has no effect: {entry.say}")
        elif find(key, CLIENT_KEYS, CLIENT_KEY_PREFIXES) is None and key not in own:
            notes.append(_unknown(name, own))
    if environment.get(FILE):
        notes.append(
            f"environment: {FILE} has no effect on a server: name its own file with --config "
            "(docs/coming-from-lmcache.md)"
        )
    return notes


def _variables(environment: Mapping[str, str]) -> list[str]:
    """The names of the variables that are set; an empty one is not."""
    return sorted(
        name
        for name, text in environment.items()
        if name.startswith(PREFIX) and name != FILE and meant(text) and not is_pod_link(name, text)
    )


def _unknown(name: str, own: Collection[str]) -> str:
    keys = {PREFIX + key.upper(): entry for key, entry in CLIENT_KEYS.items()}
    known: dict[str, Name] = {**keys, **VARIABLES}
    says = hint(name, [PREFIX + key.upper() for key in own], known)
    return f"environment: {name} has no effect: unknown variable{says}"
