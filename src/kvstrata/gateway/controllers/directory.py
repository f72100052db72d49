"""What a controller last told of instances: their engines, and the kinds of KV from which keys are derived.  No I/O.

What comes from a controller was checked only in its form.  Whatever is out of range here is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

from kvstrata.gateway.fleet import ServingEngine
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.model import LoadPath, Tier
from kvstrata.keys.chunking import ChunkHasher
from kvstrata.rpc.cluster_wire import (
    MAX_TOLD_ADAPTERS,
    GatewayHeard,
    KvKind,
    Served,
    tags_of,
)
from kvstrata.types import KEY_BYTES, RequestIdentity, identity_root, lora_of

MAX_TOKENS = 262_144
MAX_HELD_TAGS = 16_384
"""Of longer prompts only the beginning is looked up."""
MAX_CHUNK_TOKENS = 1 << 20
MAX_KINDS = 4
"""Kinds of KV for which one prompt is looked up."""


class Kind(NamedTuple):
    """A kind of KV whose keys can be derived here."""

    layout_model: str
    chunk_tokens: int
    n_slices: int
    told: KvKind
    slices: tuple[bytes, ...]
    """Those that a hit needs in each chunk; of windows and states nothing is asked."""

    def paths(self, served: Served) -> dict[Tier, LoadPath]:
        """How fast an instance fills its L1 with this kind of KV, and its engines load from L1, as far as it tells."""
        chunk_bytes = self.told.chunk_bytes
        if not chunk_bytes:
            return {}
        return {
            cast("Tier", rate.tier): LoadPath(
                latency_s=rate.latency_us / 1e6, tokens_s=rate.bytes_s * self.chunk_tokens / chunk_bytes
            )
            for rate in served.rates
        }

    def root(self, request: RequestIdentity) -> bytes:
        """The root of the identity of a request's chunks."""
        return identity_root(self.told.layout, request)

    def tags(self, prompt: Prompt, request: RequestIdentity) -> bytes:
        """The tags of the prompt's chunks, chunk by chunk; takes about 5 µs for a thousand tokens."""
        layout = self.told.layout
        hasher = ChunkHasher(self.root(request), self.chunk_tokens, lookahead_tokens=layout.lookahead)
        most = min(MAX_TOKENS, MAX_HELD_TAGS // self.n_slices * self.chunk_tokens + layout.lookahead)
        hasher.feed(prompt.tokens[:most])
        return tags_of(hasher.storage_keys(self.slices))


class Directory:
    """One answer to a heartbeat, by engines and instances."""

    def __init__(self, heard: GatewayHeard) -> None:
        self.kinds = [_kind(told) for told in heard.kinds]
        self.instances = {one.instance: one for one in heard.instances}
        self._adapters = heard.adapters[:MAX_TOLD_ADAPTERS]
        self._loras = [_lora_of(one) for one in self._adapters]
        self.of_url: dict[str, Served] = {}
        """By the URLs of their engines, as far as these tell."""
        for one in heard.instances:
            for url in one.engines:
                self.of_url.setdefault(url, one)

    def instance(self, engine: ServingEngine) -> Served | None:
        """The instance that an engine is attached to; None: not known."""
        place = engine.place
        if place.instance:
            return self.instances.get(place.instance)
        return self.of_url.get(place.url)

    def kind(self, served: Served, names: Sequence[str]) -> int | None:
        """The number of the kind of an instance's KV for a model that has these names; None: not known."""
        known = [number for number in served.kinds if 0 <= number < len(self.kinds) and self.kinds[number]]
        if len(known) > 1:
            bare = {name.rstrip("/").rpartition("/")[2] for name in names} | set(names)
            known = [
                number
                for number in known
                if (kind := self.kinds[number]) is not None and kind.layout_model in bare
            ]
        return known[0] if len(known) == 1 else None

    def adapter(self, served: Served, number: int, lora: str) -> str | None:
        """`RequestIdentity.adapter` of the newest requests for a LoRA adapter, empty: for the model itself.

        None: the instance's engines have had no such request, or the controller does not tell.
        """
        told = (
            served.adapters[served.kinds.index(number)] if len(served.adapters) == len(served.kinds) else []
        )
        for at in told:
            if 0 <= at < len(self._loras) and self._loras[at] == lora:
                return self._adapters[at]
        return None if lora else ""


_lora_of = functools.lru_cache(MAX_TOLD_ADAPTERS)(lora_of)


def _kind(told: KvKind) -> Kind | None:
    """What can be asked of a kind; None: nothing."""
    layout = told.layout
    spans = told.spans if len(told.spans) == len(told.slices) else [0] * len(told.slices)
    slices = tuple(one for one, span in zip(told.slices, spans, strict=True) if not span)
    fits = 1 <= layout.chunk_tokens <= MAX_CHUNK_TOKENS and 0 <= layout.lookahead <= MAX_CHUNK_TOKENS
    if not (fits and 1 <= len(slices) <= 4_096 and all(len(one) == KEY_BYTES for one in slices)):
        return None
    return Kind(layout.model, layout.chunk_tokens, len(slices), told, slices)
