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

MAX_L2_ADAPTERS = 15
"""Of one server: in its settings, added while it runs, and seen by its controllers as tiers beside L1."""

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
    """Digest of the weights or of what tells them apart, quantisation included."""
    tokenizer: str = ""
    kv_dtype: str
    kv_scales: str = ""
    fidelity: str = "lossless"
    """`lossless`, or the name of the lossy codec."""
    chunk_tokens: int
    format_version: int = FORMAT_VERSION


class RequestIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides it per request; declared once by `identify`."""

    adapter: str = ""
    """LoRA name and content id, empty for none."""
    tenant: str = ""
    salt: str = ""
    """Requests with other salts share nothing."""


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
    """Looks up."""
    WORKER = "worker"
    """Reads and writes one slice."""
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


class PoolEvent(enum.IntEnum):
    """Kinds of `Pool.events`."""

    EVICTED = 1
    CLEARED = 2
    CORRUPT = 3
    INSERTED = 4
    QUARANTINED = 5
    VERIFIED = 6
    """Adopted from another server, and READY from now on."""
    REMOVED = 7
    """By `Pool.remove`, or cleared with its identity."""
    RETURNED = 8
    """By `Pool.remove`: it was read from another instance and was not to stay."""


class MissReason(enum.StrEnum):
    """Why a chunk was not served. The list is closed."""

    NEVER_STORED = "never_stored"
    """It was asked for before and has never been stored since."""
    EVICTED = "evicted"
    """It was there; `explain` says when it left and by which policy or cap."""
    IN_FLIGHT = "in_flight"
    """Some process is writing it now."""
    CORRUPT = "corrupt"
    """Its checksum was wrong; it was dropped."""
    DEADLINE = "deadline"
    """L2 did not deliver it in time."""
    REFUSED = "refused"
    """There was no room for it in L1, or a limit was reached."""
    PUT_SKIPPED = "put_skipped"
    """It left L1 and had not been put to L2; `explain` says why not."""
    BREAKER_OPEN = "breaker_open"
    """The adapter (or, in a client, the server) that would know is not asked: it did not answer lately, its process is
    down, or it is being removed."""
    L2_FAILED = "l2_failed"
    """An L2 adapter failed when it was asked for it or loaded it; `explain` says how."""
    IDENTITY_DIFFERS = "identity_differs"
    """The same tokens are there under another identity of the tenant; `explain` names the field."""
    UNKNOWN_KEY = "unknown_key"
    """Nobody has named this chunk here before."""
    FORGOTTEN = "forgotten"
    """Older than the history that reasons are kept for."""
