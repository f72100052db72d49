"""vLLM's events about chunks in L1, for routers that listen to an engine.

An event names chunks by their chain keys.  With several KV cache groups in the engine it is about the first of them
that has full attention, and names it as vLLM's own events do: windows and states of the chunks may be missing, so a
router must not take them for a hit of all groups.  Models without full attention have no events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

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

    def stored(
        self, tokens: Sequence[int], parent: bytes, keys: Sequence[bytes], request: Any, first_token: int
    ) -> BlockStored:
        """These chunks of a request are in L1 in all slices; they hold `tokens` and follow `parent` (empty: none)."""
        lora = request.lora_request
        return BlockStored(
            block_hashes=list(keys),
            parent_block_hash=parent or None,
            token_ids=list(tokens),
            block_size=self._chunk_tokens,
            lora_id=lora.lora_int_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.lora_name if lora is not None else None,
            extra_keys=_extra_keys(request, first_token, len(keys), self._chunk_tokens),
            **self._of_stored,
        )

    def removed(self, keys: Sequence[bytes]) -> BlockRemoved:
        """These chunks have left L1."""
        return BlockRemoved(block_hashes=list(keys), medium=MEDIUM_CPU, **self._of_removed)


def _extra_keys(
    request: Any, first_token: int, n_chunks: int, chunk_tokens: int
) -> list[tuple[Any, ...] | None] | None:
    """What decides the chunks' KV besides tokens, as in vLLM's own events: adapter, media, salt, embeddings.

    Without it a router would take equal tokens with another image, or of another tenant's salt, for the same KV.
    """
    starts = range(first_token, first_token + n_chunks * chunk_tokens, chunk_tokens)
    found = [
        kv_cache_utils.generate_block_hash_extra_keys(request, start, start + chunk_tokens, 0)[0]
        for start in starts
    ]
    # Newer versions tag the keys for the hash, and publish them without tags.
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return untagged(found) if untagged is not None else found


def _kind(spec: Any) -> str:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return str(get_kv_cache_spec_kind(spec).value)
