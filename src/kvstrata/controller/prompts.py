"""The storage keys of chunks that an admin names by the tokens of a prompt, or by their keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvstrata.controller.member import MemberState
from kvstrata.controller.members import Members
from kvstrata.errors import BadRequest
from kvstrata.keys.chunking import ChunkHasher
from kvstrata.process.operations import keys_of
from kvstrata.types import KEY_BYTES, LayoutIdentity, RequestIdentity, adapter_of, identity_root


class Kind(NamedTuple):
    """One kind of KV in the cluster: a layout, and the slices of one engine."""

    layout: LayoutIdentity
    slices: tuple[bytes, ...]
    instances: tuple[str, ...]
    spans: tuple[int, ...] = ()
    """For each slice how many of a hit's last chunks it needs, 0: all; () if every slice needs all."""
    record_bytes: tuple[int, ...] = ()
    """For each slice the length of a whole chunk's record; () if unknown."""
    adapters: tuple[list[str], ...] = ()
    """For each of `instances` the adapters of its requests, see KvKind."""


class Named(NamedTuple):
    """The chunks that a request names."""

    keys: bytes
    """Concatenated storage keys, chunk by chunk."""
    n_slices: int
    root: bytes
    """Root of their identity; empty if the request named keys."""
    tenant: str
    chunk_tokens: int
    spans: tuple[int, ...] = ()
    record_bytes: tuple[int, ...] = ()
    """See Kind."""

    @property
    def n_chunks(self) -> int:
        """Number of whole chunks."""
        return len(self.keys) // KEY_BYTES // self.n_slices


def kinds(members: Members) -> list[Kind]:
    """The kinds of KV that engines at live instances have, in a stable order."""
    found: dict[tuple[LayoutIdentity, tuple[bytes, ...], tuple[int, ...]], dict[str, list[str]]] = {}
    record_bytes: dict[tuple[LayoutIdentity, tuple[bytes, ...], tuple[int, ...]], tuple[int, ...]] = {}
    for member in members:
        if member.state is MemberState.LIVE:
            for model in member.condition.models:
                spans = tuple(model.spans) if len(model.spans) == len(model.slices) else ()
                key = model.layout, tuple(model.slices), spans
                found.setdefault(key, {})[member.id] = model.adapters
                known = tuple(model.record_bytes) if len(model.record_bytes) == len(model.slices) else ()
                record_bytes[key] = known or record_bytes.get(key, ())
    rows = [
        Kind(*key[:2], tuple(of), key[2], record_bytes[key], tuple(of.values())) for key, of in found.items()
    ]
    return sorted(rows, key=lambda kind: (kind.layout.model, repr(kind.layout), kind.slices, kind.spans))


def choose(all_kinds: Sequence[Kind], model: str, number: int | None) -> Kind:
    """The kind with this number, or the only kind of this model (empty: of any model). Raises BadRequest."""
    if number is not None:
        if not 0 <= number < len(all_kinds):
            raise BadRequest(
                f"kind: must be one of the {len(all_kinds)} kinds of /v1/models, found {number}", field="kind"
            )
        return all_kinds[number]
    of_model = [kind for kind in all_kinds if not model or kind.layout.model == model]
    if not of_model:
        there = ", ".join(sorted({kind.layout.model for kind in all_kinds})) or "none, no engine is attached"
        raise BadRequest(
            f"model: no engine has {model or 'any model'!r:.80}; known models: {there}", field="model"
        )
    if len(of_model) > 1:
        raise BadRequest(
            f"kind: {len(of_model)} kinds of KV match; give the number of one in /v1/models", field="kind"
        )
    return of_model[0]


def from_tokens(kind: Kind, request: RequestIdentity, tokens: Sequence[int]) -> Named:
    """The full chunks of a prompt; takes 1 ms per thousand tokens, so run it on a thread. Raises BadRequest.

    `request.adapter` may be the name of a LoRA adapter, or empty for the model itself, see `types.adapter_of`.
    """
    if not kind.slices:
        raise BadRequest(
            "model: its engines have not all attached yet, so their slices are not known; try again",
            field="model",
        )
    known = itertools.chain.from_iterable(kind.adapters)
    request = msgspec.structs.replace(request, adapter=adapter_of(request.adapter, known))
    root = identity_root(kind.layout, request)
    hasher = ChunkHasher(root, kind.layout.chunk_tokens, lookahead_tokens=kind.layout.lookahead)
    hasher.feed(tokens)
    keys = hasher.storage_keys(kind.slices)
    n_slices, chunk_tokens = len(kind.slices), kind.layout.chunk_tokens
    return Named(keys, n_slices, root, request.tenant, chunk_tokens, kind.spans, kind.record_bytes)


def from_keys(texts: Sequence[str], tenant: str) -> Named:
    """Storage keys of a tenant in hexadecimal digits, which need not be of one chain. Raises BadRequest."""
    return Named(keys_of(texts), 1, b"", tenant, 0)
