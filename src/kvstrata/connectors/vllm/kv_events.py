"""vLLM's events about chunks in L1, for routers that listen to an engine.

An event names chunks by their chain keys.  With several KV cache groups in the engine it is about the first of them
that has full attention, and names it as vLLM's own events do: windows and states of the chunks may be missing, so a
router must not take them for a hit of all groups.  Models without full attention have no events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored

from kvstrata.connectors.vllm.groups import CacheGroup, Rule


class EventMaker:
    """Makes the events of an engine. Immutable."""

    def __init__(self, groups: Sequence[CacheGroup], specs: Sequence[Any]) -> None:
        """`specs` are vLLM's KV cache specs of the groups."""
        self._chunk_tokens = groups[0].chunk_tokens
        self._of_stored: dict[str, Any] = {}
        self._of_removed: dict[str, Any] = {}
        told = next((group.number for group in groups if group.rule is Rule.PREFIX), None)
        if len(groups) == 1 or told is None:
            return
        self._of_removed = {"group_idx": told}
        self._of_stored = {"group_idx": told, "kv_cache_spec_kind": _kind(specs[told])}

    def stored(self, tokens: Sequence[int], parent: bytes, keys: Sequence[bytes], lora: Any) -> BlockStored:
        """These chunks, which hold `tokens` and follow `parent` (empty: none), are in L1 in all slices."""
        return BlockStored(
            block_hashes=list(keys),
            parent_block_hash=parent or None,
            token_ids=list(tokens),
            block_size=self._chunk_tokens,
            lora_id=lora.lora_int_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.lora_name if lora is not None else None,
            **self._of_stored,
        )

    def removed(self, keys: Sequence[bytes]) -> BlockRemoved:
        """These chunks have left L1."""
        return BlockRemoved(block_hashes=list(keys), medium=MEDIUM_CPU, **self._of_removed)


def _kind(spec: Any) -> str:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return str(get_kv_cache_spec_kind(spec).value)
