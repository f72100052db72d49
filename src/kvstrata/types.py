"""Value types shared by server, client and connectors.  No I/O, no state."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

GB = 1 << 30
"""Bytes of one unit in settings and fields named `…_gb`."""

MAX_QUOTAS = 1_024
"""Tenants that a pool has quotas for: `native.core.MAX_QUOTAS`, for modules that do not load native code."""

NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")
"""Characters that the name of an instance or a controller may not have."""

KEY_BYTES = 32
"""Length of a chain key, storage key, slice digest or identity root (SHA-256)."""

MAX_L2_ADAPTERS = 15
SERVER_ROW = 0
"""Row of the pool that owns the server's own reservations and leases."""
"""Most L2 adapters of one server, including those added while it runs; controllers see each as a tier beside L1."""

SPAN_FACT = "needed_chunks"
"""Name of the layout fact that says how many of a hit's last chunks are needed in a slice; without it, all are."""

MAX_SPAN_CHUNKS = 1 << 16
"""Largest value of SPAN_FACT."""

FORMAT_VERSION = 2
"""Version of key derivation and record format; part of every identity."""


def canonical_json(value: Any) -> bytes:
    """The one byte string that stands for `value` in a hash: JSON, keys sorted, no spaces, UTF-8."""
    return json.dumps(
        msgspec.to_builtins(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()


class LayoutIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts that decide the meaning of KV bytes for all requests of one engine, declared when it attaches."""

    model: str
    revision: str = ""
    weights: str = ""
    """Digest of the weights, or of facts that tell them apart; covers their quantisation."""
    tokenizer: str = ""
    kv_dtype: str
    kv_scales: str = ""
    fidelity: str = "lossless"
    """`lossless`, or the name of the lossy codec."""
    chunk_tokens: int
    lookahead_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """The keys of a record cover so many tokens behind its own, because the KV of draft layers depends on them.

    Unset stands for 0, so the identities of engines without draft layers have no such field.
    """
    format_version: int = FORMAT_VERSION

    @property
    def lookahead(self) -> int:
        """`lookahead_tokens`, 0 if it is unset."""
        return self.lookahead_tokens or 0


class RequestIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The further facts that decide the meaning of KV bytes for one request, beside its engine's LayoutIdentity."""

    adapter: str = ""
    """LoRA name and content id; empty without LoRA."""
    tenant: str = ""
    salt: str = ""
    """Requests with different salts share no chunks."""


def lora_of(adapter: str) -> str | None:
    """The name of the LoRA adapter in a `RequestIdentity.adapter`, empty: none; None: not known.

    vLLM's connector makes `[name, content]`, and `["weights", mark, adapter]` where the layout identity does not name
    the weights.
    """
    if not adapter:
        return ""
    try:
        return _lora(adapter)[0]
    except msgspec.DecodeError:
        pass
    try:
        _, _, within = _marked(adapter)
    except msgspec.DecodeError:
        return None
    return lora_of(within) if len(within) < len(adapter) else None


def adapter_of(lora: str, newest_first: Iterable[str]) -> str:
    """The first `RequestIdentity.adapter` for the LoRA adapter `lora` (empty: for the model itself), else `lora`.

    So users need not know what names the weights.  `lora` may be a whole `RequestIdentity.adapter` too.
    """
    return next((adapter for adapter in newest_first if lora in (adapter, lora_of(adapter))), lora)


_lora = msgspec.json.Decoder(tuple[str, str]).decode
_marked = msgspec.json.Decoder(tuple[Literal["weights"], str, str]).decode


class Slice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a chunk's KV that one extent holds, in half-open ranges; it never names a rank."""

    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    group: int = 0
    layout: str
    """Hex digest of the layout facts (SHA-256 of their canonical JSON)."""

    def digest(self) -> bytes:
        """32 bytes that stand for this slice in storage keys."""
        return hashlib.sha256(canonical_json(self)).digest()


def shown_name(name: bytes) -> str:
    """A digest that people see in place of a session's or a group's name; it cannot be used as the name."""
    return hashlib.sha256(b"shown " + name).hexdigest()[:32]


def identity_root(layout: LayoutIdentity, request: RequestIdentity) -> bytes:
    """The 32-byte root of the hash chain of one (layout, request) identity."""
    return hashlib.sha256(canonical_json({"layout": layout, "request": request})).digest()


def facts_digest(facts: dict[str, Any]) -> str:
    """Hex digest of derived layout facts, for `Slice.layout`."""
    return hashlib.sha256(canonical_json(facts)).hexdigest()


class Role(enum.StrEnum):
    """The work of an attached process in its engine group."""

    SCHEDULER = "scheduler"
    """Looks chunks up."""
    WORKER = "worker"
    """Reads and writes one slice of each chunk."""
    CLIENT = "client"
    """Does both in one process (load generators, tests, other engines)."""


class Extent(NamedTuple):
    """Where one record lies in the extents file; `offset_bytes` counts from the file's start."""

    offset_bytes: int
    length_bytes: int
    entry: int
    generation: int


EXTENT = struct.Struct("<QIIII")
"""Packed extent in replies: offset, length, entry, generation, zero (24 bytes)."""


def unpack_extents(packed: bytes) -> list[Extent]:
    """The extents of a reply, in order."""
    return [Extent(o, n, e, g) for o, n, e, g, _ in EXTENT.iter_unpack(packed)]


class LeaseName(NamedTuple):
    """Names a lease for its whole group: the session of the scheduler that made the lookup, and the lookup's number."""

    session: bytes
    seq: int
    epoch: int


class PoolChange(enum.IntEnum):
    """What became of a chunk in L1, as `Pool.l1_changes` tells it."""

    CAME = 0
    """It was stored or loaded, or it was adopted from an earlier server and has been verified."""
    EVICTED = 1
    CLEARED = 3
    REMOVED = 4
    """`Pool.remove` removed the chunk, or it was cleared with its identity."""
    CORRUPT = 5


class Next(enum.IntEnum):
    """What is said to come after a request (a hint). The pool learns what each is worth, and trusts nobody."""

    NOTHING_SAID = 0
    END = 1
    """No request will use these chunks again."""
    TOOL = 2
    """The answer ended with a call of tools."""
    TURN = 3
    """The answer ended a turn."""
    SOON = 4
    """The next request is expected within 4 s; the numbers after this one: within 16, 64, 256, 1,024 s, later."""


LATEST = Next.SOON + 5
_SAID = {
    **dict.fromkeys(("end",), Next.END),
    **dict.fromkeys(("tool_calls", "tool_use", "function_call"), Next.TOOL),
    **dict.fromkeys(("stop", "end_turn", "stop_sequence"), Next.TURN),
    **dict.fromkeys(("length", "max_tokens", "content_filter", "refusal"), Next.NOTHING_SAID),
}


def next_of(said: object) -> int:
    """The number of `end`, of an API's reason why an answer ended, or of the seconds until the next request.

    Raises ValueError saying what is expected.
    """
    if isinstance(said, str) and said in _SAID:
        return _SAID[said]
    if isinstance(said, int | float | str) and not isinstance(said, bool):
        with contextlib.suppress(ValueError, OverflowError):
            if 0 <= float(said) < math.inf:
                return int(Next.SOON) + sum(1 for octave in range(1, 6) if float(said) > 4**octave)
    words = ", ".join(map(repr, _SAID))
    raise ValueError(
        f"must be the expected seconds until the next request, or one of {words}; got {said!r:.80}"
    )


class MissReason(enum.StrEnum):
    """Why a chunk was not served. The list is closed."""

    NEVER_STORED = "never_stored"
    """It was asked for before, and nobody has stored it since."""
    EVICTED = "evicted"
    """It was cached; `explain` says when it left and by which policy or cap."""
    IN_FLIGHT = "in_flight"
    """Some process is writing it now."""
    CORRUPT = "corrupt"
    """Its checksum was wrong; it was dropped."""
    DEADLINE = "deadline"
    """L2, or in an engine the server, did not answer in time."""
    REFUSED = "refused"
    """L1 had no room for it, or a limit was reached."""
    PUT_SKIPPED = "put_skipped"
    """It left L1 without having been put to L2; `explain` says why."""
    BREAKER_OPEN = "breaker_open"
    """The adapter (in a client: the server) was not asked, because it has failed lately, its process is down, its
    directory is gone, or it is paused or closed."""
    L2_FAILED = "l2_failed"
    """An L2 adapter failed to look it up or to load it; `explain` says how."""
    RECOMPUTE = "recompute"
    """L2 has it, and computing it was expected to be faster than loading it; `explain` shows both times."""
    PROMISED = "promised"
    """Another engine computes it now; waiting for it would have taken longer than computing it."""
    PROMISE_BROKEN = "promise_broken"
    """The lookup waited for another engine that computed it, and that engine ended without storing it."""
    IDENTITY_DIFFERS = "identity_differs"
    """The same tokens are cached under another identity of the tenant; `explain` names the field that differs."""
    NOT_IN_L1 = "not_in_l1"
    """It is not in L1, and the server has no L2. The engine has seen that by itself and did not ask the server, so only
    the engine counts it, and `explain` does not know the request."""
    UNKNOWN_KEY = "unknown_key"
    """No request to this server has named this chunk before."""
    FORGOTTEN = "forgotten"
    """The memory of absent chunks has overflowed, so the reason is no longer known; or an engine does not know the word
    that a newer server gave as the reason."""
