"""Names that users of LMCache have in their deployments, and what becomes of each here.

flags.py has the flags of its commands, keys.py its files, variables and connector settings, this file its commands and
connectors; docs/coming-from-lmcache.md is generated from them.  A name of ours in another meaning is in
no table.  Only names, defaults and meanings are LMCache's.
"""

VERSION = "0.5.7"
"""The release of LMCache whose names these are."""
READ_ON = "2026-11-28"
"""When that release and its documentation were last read."""
COMMANDS: dict[str, str] = {
    "lmcache server": "lmcache-server",
    "lmcache_controller": "lmcache-controller",
    "lmcache coordinator": "lmcache-controller, which takes other flags",
    "lmcache ping": "kvstrata ctl ready",
    "lmcache describe": "kvstrata ctl status",
    "lmcache query": "kvstrata ctl explain",
    "lmcache kvcache": "kvstrata ctl clear",
    "lmcache quota": "kvstrata ctl quota",
    "lmcache bench": "kvstrata bench",
    "lmcache memory": "kvstrata ctl status",
    "lmcache trace": "",
    "lmcache tool": "",
    "lmcache mock": "",
    "lmcache_server": "an L2 adapter such as resp (--l2-adapter), or a cluster",
}
"""Commands of LMCache's distributions, each with ours; empty: there is none. `kvstrata names install` installs them."""

CONNECTORS: dict[str, tuple[str, ...]] = {
    "LMCacheConnectorV1": (),
    "LMCacheConnectorV1Dynamic": (
        "lmcache.integration.vllm.lmcache_connector_v1",
        "lmcache.integration.vllm.lmcache_connector_v1_085",
    ),
    "LMCacheMPConnector": ("lmcache.integration.vllm.lmcache_mp_connector",),
}
"""Values of `kv_connector`, each with the values of `kv_connector_module_path` that are published with it."""
