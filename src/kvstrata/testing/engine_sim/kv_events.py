"""KV events as vLLM 0.32 encodes them: tagged maps in a batch that is an array; defaults are left out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MEDIUM = "GPU"
MEDIUM_HOST = "CPU"
KIND = "full_attention"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that requests can now find. They form one chain below `parent_block_hash`."""

    block_hashes: Sequence[int | bytes]
    """Of the engine's blocks numbers, of chunks that a connector has stored keys of 32 bytes."""
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each block, what its hash contains besides tokens: the adapter's name, and the salt in the first block."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Copies of blocks that are gone. A hash that was stored twice is removed twice."""

    block_hashes: Sequence[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The whole cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step changed."""

    ts: float
    """Seconds since 1970."""
    events: list[Event]
    data_parallel_rank: int | None = None
