"""Value types shared by server, client and connectors.  No I/O, no state."""

from __future__ import annotations

import enum
import hashlib
import json
import struct
from typing import Any, NamedTuple

import msgspec

KEY_BYTES = 32
"""Length of a chain key, storage key, slice digest or identity root (SHA-256)."""

FORMAT_VERSION = 1
"""Version of key derivation and record format; part of every identity."""


def canonical_json(value: Any) -> bytes:
    """The one byte string that stands for `value` in a hash: JSON, keys sorted, no spaces, UTF-8."""
    return json.dumps(
        msgspec.to_builtins(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()


class LayoutIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides the meaning of KV bytes for every request of one engine (declared at attach)."""

    model: str
    revision: str = ""
    weights: str = ""
    tokenizer: str = ""
    kv_dtype: str
    kv_scales: str = ""
    fidelity: str = "lossless"
    chunk_tokens: int
    format_version: int = FORMAT_VERSION


class RequestIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides it per request; declared once by `identify`."""

    adapter: str = ""
    """LoRA name and content id, empty for none."""
    tenant: str = ""
    salt: str = ""


class Slice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a chunk's KV that one extent holds. Ranges are half-open. Never a rank number."""

    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    group: int = 0
    layout: str
    """Hex digest of the derived layout facts (payload bytes, section lengths, strides)."""

    def digest(self) -> bytes:
        """32 bytes that stand for this slice in storage keys."""
        return hashlib.sha256(canonical_json(self)).digest()


def identity_root(layout: LayoutIdentity, request: RequestIdentity) -> bytes:
    """The 32-byte root of the hash chain of one (layout, request) identity."""
    return hashlib.sha256(canonical_json({"layout": layout, "request": request})).digest()


def facts_digest(facts: dict[str, Any]) -> str:
    """Hex digest of derived layout facts, for `Slice.layout`."""
    return hashlib.sha256(canonical_json(facts)).hexdigest()


class Role(enum.StrEnum):
    """What an attached process does in its engine group."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    CLIENT = "client"
    """Both sides in one process (load generators, tests, other engines)."""


class Extent(NamedTuple):
    """Where one record lies in the extents file. `offset_bytes` from the file's start."""

    offset_bytes: int
    length_bytes: int
    entry: int
    generation: int


EXTENT = struct.Struct("<QIIII")
"""Packed extent in replies: offset, length, entry, generation, zero (24 bytes)."""


def unpack_extents(packed: bytes) -> list[Extent]:
    """Extents of a reply, in order."""
    return [Extent(o, n, e, g) for o, n, e, g, _ in EXTENT.iter_unpack(packed)]


class LeaseName(NamedTuple):
    """Names a lease for its whole group: the scheduler session that looked up, and its request number."""

    session: bytes
    seq: int
    epoch: int


class MissReason(enum.StrEnum):
    """Why a chunk was not served (closed list, promise P11)."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    IN_FLIGHT = "in_flight"
    CORRUPT = "corrupt"
    DEADLINE = "deadline"
    REFUSED = "refused"
    PUT_SKIPPED = "put_skipped"
    BREAKER_OPEN = "breaker_open"
    IDENTITY_DIFFERS = "identity_differs"
    UNKNOWN_KEY = "unknown_key"
    FORGOTTEN = "forgotten"
