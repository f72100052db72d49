"""The kinds of KV that instances report, from which the keys of a prompt's chunks are derived.  No I/O.

Messages of instances were checked only for their form, so this module ignores values that are out of range.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.model import LoadPath, Tier
from kvstrata.keys.chunking import ChunkHasher
from kvstrata.rpc.cluster_wire import KvKind, TierRate, tags_of
from kvstrata.types import KEY_BYTES, LayoutIdentity, RequestIdentity, identity_root, lora_of

MAX_TOKENS = 262_144
MAX_HELD_TAGS = 16_384
"""Maximum number of tags in a lookup; of a longer prompt only the beginning is looked up."""
MAX_CHUNK_TOKENS = 1 << 20
MAX_LORAS = 4_096


class Kind(NamedTuple):
    """A kind of KV whose chunk keys can be derived here."""

    layout: LayoutIdentity
    slices: tuple[bytes, ...]
    """Slices that a hit needs in each chunk; slices of windows and states are not looked up."""

    def root(self, request: RequestIdentity) -> bytes:
        """The root of the identity of a request's chunks."""
        return identity_root(self.layout, request)

    def tags(self, prompt: Prompt, request: RequestIdentity) -> bytes:
        """The tags of the prompt's chunks, chunk by chunk; takes about 5 µs per thousand tokens."""
        chunk_tokens, lookahead = self.layout.chunk_tokens, self.layout.lookahead
        hasher = ChunkHasher(self.root(request), chunk_tokens, lookahead_tokens=lookahead)
        most = min(MAX_TOKENS, MAX_HELD_TAGS // len(self.slices) * chunk_tokens + lookahead)
        hasher.feed(prompt.tokens[:most])
        return tags_of(hasher.storage_keys(self.slices))


def kind_of(told: KvKind) -> Kind | None:
    """The kind in an instance's report; None: its values are out of range."""
    layout = told.layout
    spans = told.spans if len(told.spans) == len(told.slices) else [0] * len(told.slices)
    slices = tuple(one for one, span in zip(told.slices, spans, strict=True) if not span)
    fits = 1 <= layout.chunk_tokens <= MAX_CHUNK_TOKENS and 0 <= layout.lookahead <= MAX_CHUNK_TOKENS
    fits = fits and 1 <= len(slices) <= 4_096 and all(len(one) == KEY_BYTES for one in slices)
    return Kind(layout, slices) if fits else None


def served_as(models: Iterable[KvKind], names: Sequence[str]) -> tuple[Kind, KvKind] | None:
    """The kind of an instance's KV for a model with these names, and its report; None: no kind, or several."""
    known = [(kind, told) for told in models if (kind := kind_of(told)) is not None]
    if len(known) > 1:
        bare = {name.rstrip("/").rpartition("/")[2] for name in names} | set(names)
        known = [one for one in known if one[0].layout.model in bare]
    return known[0] if len(known) == 1 else None


def adapter_of(told: KvKind, lora: str) -> str | None:
    """`RequestIdentity.adapter` of the newest requests for a LoRA adapter; empty `lora`: the model itself.

    None: the instance's engines have had no request for this adapter.
    """
    return next((one for one in told.adapters if _lora_of(one) == lora), None if lora else "")


def paths(told: KvKind, rates: Iterable[TierRate]) -> dict[Tier, LoadPath]:
    """The reported speeds of this kind of KV by tier: engines' loads from L1, and the instance's loads into L1."""
    tokens = told.layout.chunk_tokens / told.chunk_bytes if told.chunk_bytes else 0.0
    return {
        cast("Tier", rate.tier): LoadPath(latency_s=rate.latency_us / 1e6, tokens_s=rate.bytes_s * tokens)
        for rate in (rates if tokens else ())
    }


_lora_of = functools.lru_cache(MAX_LORAS)(lora_of)
