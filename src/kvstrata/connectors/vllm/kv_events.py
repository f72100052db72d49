"""vLLM's events about chunks in L1 and about blocks of its own cache, for routers that listen to an engine.

An event names chunks by their chain keys.  If the engine has several KV cache groups, events describe the first group
with full attention and name that group as vLLM's own events do: the chunks' windows and states may be missing, so a
router must not count them as a hit of all groups.  Models without full attention have no events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from kvstrata.connectors.vllm.groups import CacheGroup, Rule
from kvstrata.connectors.vllm.own_cache import AnnouncedBlocks


class BlockStoredAgain(BlockStored, tag="BlockStored"):  # type: ignore[call-arg, misc]
    """Blocks that vLLM has announced before. Subscribers that count how often a block was stored must not count it."""

    again: bool = False
    """Always True; the default is False, since vLLM does not encode defaults."""


class EventMaker:
    """Makes the events of an engine. Immutable."""

    def __init__(self, groups: Sequence[CacheGroup], specs: Sequence[Any]) -> None:
        """`specs` are vLLM's KV cache specs of the groups."""
        self._chunk_tokens = groups[0].chunk_tokens
        self._of_stored: dict[str, Any] = {}
        self._of_removed: dict[str, Any] = {}
        announced = announced_group(groups)
        if len(groups) == 1 or announced is None:
            return
        self._of_removed = {"group_idx": announced}
        self._of_stored = {"group_idx": announced, "kv_cache_spec_kind": _kind(specs[announced])}

    def stored(
        self, tokens: Sequence[int], parent: bytes, keys: Sequence[bytes], request: Any, first_token: int
    ) -> BlockStored:
        """The event that these chunks of a request are in L1 in all slices; `parent`: the key before them, or empty."""
        lora = request.lora_request
        return BlockStored(
            block_hashes=list(keys),
            parent_block_hash=parent or None,
            token_ids=list(tokens),
            block_size=self._chunk_tokens,
            lora_id=lora.lora_int_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.lora_name if lora is not None else None,
            extra_keys=extra_keys_of(request, first_token, len(keys), self._chunk_tokens),
            **self._of_stored,
        )

    def again(self, announced: AnnouncedBlocks, block_tokens: int) -> BlockStoredAgain:
        """The event that these blocks are in vLLM's own cache."""
        number, name = announced.adapter or (None, None)
        parent = announced.parent
        return BlockStoredAgain(
            block_hashes=[kv_cache_utils.maybe_convert_block_hash(one) for one in announced.hashes],
            parent_block_hash=None if parent is None else kv_cache_utils.maybe_convert_block_hash(parent),
            token_ids=announced.tokens,
            block_size=block_tokens,
            lora_id=number,
            medium=MEDIUM_GPU,
            lora_name=name,
            extra_keys=announced.extra_keys,
            again=True,
            **self._of_stored,
        )

    def removed(self, keys: Sequence[bytes]) -> BlockRemoved:
        """The event that these chunks have left L1."""
        return BlockRemoved(block_hashes=list(keys), medium=MEDIUM_CPU, **self._of_removed)


def announced_group(groups: Sequence[CacheGroup]) -> int | None:
    """The number of the group that events describe; None: no events are sent."""
    return next((group.number for group in groups if group.rule is Rule.PREFIX), None)


def extra_keys_of(
    request: Any, first_token: int, n_chunks: int, chunk_tokens: int
) -> list[tuple[Any, ...] | None]:
    """The extra keys of chunks or blocks as in vLLM's events, which decide KV besides tokens: adapter, media, salt, …

    Without them a router would mistake equal tokens with another image or salt for the same KV.
    """
    starts = range(first_token, first_token + n_chunks * chunk_tokens, chunk_tokens)
    found = [
        kv_cache_utils.generate_block_hash_extra_keys(request, start, start + chunk_tokens, 0)[0]
        for start in starts
    ]
    # Newer versions tag the keys for the hash, and publish them without tags.
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return list(untagged(found)) if untagged is not None else found


def _kind(spec: Any) -> str:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return str(get_kv_cache_spec_kind(spec).value)
