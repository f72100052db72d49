"""LMCache's commands, and the connectors of its vLLM integration."""

from __future__ import annotations

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
