"""An engine's paged KV cache and its layout identity, for tests."""

from __future__ import annotations

from kvstrata.measure.blocks import PagedBlocks
from kvstrata.types import LayoutIdentity

__all__ = ["PagedBlocks", "layout_identity"]


def layout_identity(chunk_tokens: int = 16, model: str = "test-model") -> LayoutIdentity:
    return LayoutIdentity(model=model, kv_dtype="bf16", chunk_tokens=chunk_tokens)
