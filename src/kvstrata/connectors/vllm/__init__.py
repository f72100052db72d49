"""Our connector for vLLM: `{"kv_connector": "LMCacheConnectorV1", "kv_connector_module_path": this module, …}`.

The module exports the connector under each name that LMCache gives its connectors.  vLLM is imported when the class is
first accessed, so settings, decisions and layouts can be used without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstrata.config.lmcache import CONNECTORS

if TYPE_CHECKING:
    from kvstrata.connectors.vllm.connector import LMCacheConnectorV1

__all__ = ["LMCacheConnectorV1"]


def __getattr__(name: str) -> Any:
    if name in CONNECTORS:
        from kvstrata.connectors.vllm.connector import LMCacheConnectorV1

        return LMCacheConnectorV1
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
