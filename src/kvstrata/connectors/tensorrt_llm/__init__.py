"""Our connector pair for TensorRT-LLM: `KvstrataScheduler` and `KvstrataWorker`, for its `kv_connector_config`.

docs/engines.md has the whole configuration.  TensorRT-LLM is imported when a class is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.connectors.tensorrt_llm.connector import KvstrataScheduler, KvstrataWorker

__all__ = ["KvstrataScheduler", "KvstrataWorker"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvstrata.connectors.tensorrt_llm import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
