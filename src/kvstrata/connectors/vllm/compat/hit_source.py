"""The tier under which vLLM counts the hits that we serve: it asks for one from 0.32 on."""

from __future__ import annotations

from typing import Any

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    HOST: Any = None
    """For `_cache_hit_source` of the connector's class; earlier versions do not read it."""
else:
    HOST = CacheHitSource.HOST
