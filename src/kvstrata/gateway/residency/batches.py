"""KV events as engines publish them, decoded and bounded.

vLLM encodes a batch as a msgpack array [time, events, rank] and each event as a tagged map.  Fields that nothing here
needs are left out; fields of newer versions are ignored.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_BLOCK_TOKENS = 8_192
MAX_EVENTS = 65_536

NOTHING = b"\xc0"
"""msgpack's null."""

MAX_HASH_BYTES = 64
Hash = Annotated[bytes, Meta(max_length=MAX_HASH_BYTES)] | int
"""The engine's own name of a block, which only the engine can compute."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks that requests can now find. They form one chain below `parent_block_hash`."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[msgspec.Raw] | None = None
    """For each block, what decides its KV besides tokens: an array, or NOTHING."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    again: bool = False
    """Told before, by our connector, for those who listen late: one more copy of a block that is known is none."""


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks that are gone."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The whole cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """What one step of an engine changed."""

    ts: float
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)]


_decode = msgspec.msgpack.Decoder(Batch).decode


def decoded(payload: bytes) -> Batch:
    """A batch. Raises ValueError for anything else."""
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no batch of KV events: {error}") from None
