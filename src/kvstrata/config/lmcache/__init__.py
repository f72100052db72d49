"""The names of LMCache's settings that deployments use, and what kvstrata does with each.

flags.py has the flags of its commands, keys.py its files, variables and connector settings, this file its connectors;
docs/coming-from-lmcache.md is generated from them.  A name that kvstrata uses with another meaning is in no table. Only
names, defaults and meanings are taken from LMCache.
"""

VERSION = "0.5.7"
"""The release of LMCache whose names these are."""
READ_ON = "2026-11-28"
"""When that release and its documentation were last read."""

CONNECTORS: dict[str, tuple[str, ...]] = {
    "LMCacheConnectorV1": (),
    "LMCacheConnectorV1Dynamic": (
        "lmcache.integration.vllm.lmcache_connector_v1",
        "lmcache.integration.vllm.lmcache_connector_v1_085",
    ),
    "LMCacheMPConnector": ("lmcache.integration.vllm.lmcache_mp_connector",),
}
"""Values of `kv_connector`, each with the values of `kv_connector_module_path` that are published with it."""
