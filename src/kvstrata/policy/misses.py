"""Explains why a chunk was absent, from bounded memories of keys, of first chunks by identity, and of recent requests.

Three memories, each with its own bound:

- *Keys*: the last event of a storage key that is not in L1 (evicted, corrupt, refused, put skipped, …, or looked up
  without success).  When a key is stored, its note is dropped.
- *Probes*: the identities under which a prompt with these first tokens was stored, per tenant.  A probe is a digest of
  tokens alone and is compared only within the tenant of the caller, so nobody learns which prompts another tenant has.
- *Requests*: the last lookups by request id, with the chunks that each tier had and the reason of the first miss.

Invariant: a reason is given only if this instance knows it.  Once the key memory has overflowed, a key without a note
is `forgotten`, not `unknown_key`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvstrata.errors import BadRequest
from kvstrata.types import LayoutIdentity, MissReason, RequestIdentity

MAX_KEYS = 32_768
"""Some 230 bytes each: even with this many notes, a server stays below 100 MB."""
MAX_PROBES = 8_192
"""Some 950 bytes each, if each probe has an identity of its own."""
MAX_IDENTITIES_PER_PROBE = 8
MAX_REQUESTS = 1_024
MAX_LISTED_IDS = 8
"""Most request ids that an error lists where several match."""
MAX_DETAIL_CHARS = 120
_TAG_BYTES = 8


_ADVICE = {
    "entries_full": "every entry of L1's index is in use; raise l1.entries",
    "quota": "its tenant is at its quota; raise quotas_gb",
    "too_large": "the record is larger than L1; raise l1.size_gb",
    "pool_pinned": "all of L1 is in use, or l1.eviction_policy is noop; raise l1.size_gb",
}


def with_advice(word: str) -> str:
    """A short reason, with advice if a setting is the cause."""
    return f"{word}: {_ADVICE[word]}" if word in _ADVICE else word


class KeyNote(NamedTuple):
    """The last event of one absent key."""

    reason: MissReason
    detail: str
    unix_ms: int


class KeyMemory:
    """The notes of absent keys. It identifies keys by their first 8 bytes."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # Not a plain dict, which finds its first item only by stepping over all items deleted before it.
        self._notes: OrderedDict[bytes, KeyNote] = OrderedDict()
        self._last = KeyNote(MissReason.UNKNOWN_KEY, "", 0)
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, key: bytes, reason: MissReason, detail: str, unix_ms: int) -> None:
        """Note an event of this key, in place of an older note."""
        tag = key[:_TAG_BYTES]
        known = KeyNote(reason, detail[:MAX_DETAIL_CHARS], unix_ms)
        if known != self._last:
            self._last = known  # chunks that were evicted together share one note
        self._notes[tag] = self._last
        self._notes.move_to_end(tag)
        if len(self._notes) > self._max_keys:
            self._notes.popitem(last=False)
            self.overflowed = True

    def missed(self, key: bytes, unix_ms: int) -> None:
        """Note that this key was looked up without success, unless it has a note already."""
        if key[:_TAG_BYTES] not in self._notes:
            self.note(key, MissReason.NEVER_STORED, "", unix_ms)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Drop the notes of these keys, which are stored now."""
        notes = self._notes
        if notes:
            for key in keys:
                notes.pop(key[:_TAG_BYTES], None)

    def lost_events(self) -> None:
        """Note that some events were lost; from now on, a missing note proves nothing."""
        self.overflowed = True

    def get(self, key: bytes) -> KeyNote | None:
        """The note of a key; None if it has none."""
        return self._notes.get(key[:_TAG_BYTES])


class IdentityMemory:
    """The identities under which prompts that begin with the same tokens were stored, per tenant."""

    def __init__(self, max_probes: int = MAX_PROBES) -> None:
        self._max_probes = max_probes
        self._probes: OrderedDict[tuple[str, bytes], dict[bytes, tuple[LayoutIdentity, RequestIdentity]]] = (
            OrderedDict()
        )

    def stored(self, probe: bytes, root: bytes, layout: LayoutIdentity, request: RequestIdentity) -> None:
        """Note that a prompt with this probe was stored under this identity."""
        if not probe:
            return
        known = self._probes.setdefault((request.tenant, probe), {})
        known.pop(root, None)
        known[root] = (layout, request)
        if len(known) > MAX_IDENTITIES_PER_PROBE:
            del known[next(iter(known))]
        if len(self._probes) > self._max_probes:
            self._probes.popitem(last=False)

    def difference(
        self, probe: bytes, root: bytes, layout: LayoutIdentity, request: RequestIdentity
    ) -> tuple[str, str] | None:
        """The first field in which the newest other identity with the same tokens differs, and that identity's value.

        A salt is secret, so "" is returned in its place.  None when no prompt with these tokens was stored under
        another identity of this tenant.
        """
        known = self._probes.get((request.tenant, probe)) if probe else None
        if not known:
            return None
        for other_root in reversed(known):
            if other_root != root:
                other_layout, other_request = known[other_root]
                for ours, theirs in ((layout, other_layout), (request, other_request)):
                    for name in ours.__struct_fields__:
                        if getattr(ours, name) != getattr(theirs, name):
                            shown = "" if name == "salt" else str(getattr(theirs, name))
                            return name, shown
        return None


class Explained(NamedTuple):
    """One lookup, as `explain` shows it. Times are in milliseconds."""

    request_id: str
    tenant: str
    root: bytes
    unix_ms: int
    duration_ms: float
    chunks: int
    l1_chunks: int
    l2_chunks: int
    served_chunks: int
    reason: str
    detail: str
    missing_key: bytes


class RequestMemory:
    """The last lookups. A request may have several."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._ring: list[Explained | None] = [None] * max_requests
        self._next = 0

    def add(self, explained: Explained) -> None:
        """Remember a lookup; the oldest is forgotten."""
        self._ring[self._next] = explained
        self._next = (self._next + 1) % self._max_requests

    def listed(self) -> list[Explained]:
        """All remembered lookups, oldest first."""
        order = self._ring[self._next :] + self._ring[: self._next]
        return [entry for entry in order if entry is not None]

    def recent(self, count: int) -> list[Explained]:
        """The newest lookups, newest first."""
        return self.listed()[::-1][:count]


class Explainer:
    """The three memories, and the rule that chooses a reason."""

    def __init__(
        self,
        *,
        max_keys: int = MAX_KEYS,
        max_probes: int = MAX_PROBES,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self.keys = KeyMemory(max_keys)
        self.identities = IdentityMemory(max_probes)
        self.requests = RequestMemory(max_requests)

    def why(
        self,
        key: bytes,
        *,
        first: bool,
        probe: bytes,
        root: bytes,
        layout: LayoutIdentity,
        request: RequestIdentity,
        in_flight: bool,
        policy: str,
    ) -> tuple[MissReason, str]:
        """The reason why a chunk is absent, and a detail.

        `key`: the storage key of the chunk's first missing slice; `first`: the chunk is the prompt's first;
        `in_flight`: a process is writing or loading the chunk now; `policy`: the eviction policy's name.
        """
        note = self.keys.get(key)
        if first and not in_flight and (note is None or note.reason is MissReason.NEVER_STORED):
            difference = self.identities.difference(probe, root, layout, request)
            if difference is not None:
                name, shown = difference
                detail = f"{name}: stored with {shown!r}" if shown else name
                return MissReason.IDENTITY_DIFFERS, detail
        if in_flight:
            return MissReason.IN_FLIGHT, "being stored or loaded"
        if note is not None and note.reason is MissReason.EVICTED:
            return MissReason.EVICTED, f"by {note.detail or policy} at {note.unix_ms} (unix ms)"
        if note is not None and note.reason is not MissReason.NEVER_STORED:
            return note.reason, note.detail
        if note is not None:
            return MissReason.NEVER_STORED, "asked for before, never stored since"
        if self.keys.overflowed:
            return MissReason.FORGOTTEN, "the memory of absent keys has overflowed"
        return MissReason.UNKNOWN_KEY, "this server has not seen this chunk's key before"

    def explain(self, request_id: str) -> dict[str, Any]:
        """The document of one request's lookups.

        `request_id` is the engine's id of the request, or the id that the API's client saw. (vLLM appends `-RANDOM` to
        the latter, or `-NUMBER-RANDOM` for a completion.) Raises BadRequest if several of the engine's ids begin with
        it.
        """
        seen = self.requests.listed()
        names = {entry.request_id for entry in seen}
        if request_id not in names:
            longer = [name for name in names if name.startswith(f"{request_id}-")]
            if len(longer) > 1:
                raise BadRequest(_several(request_id, sorted(longer)), field="request_id")
            request_id = longer[0] if longer else request_id
        found = [_document(entry) for entry in seen if entry.request_id == request_id]
        return {"request_id": request_id, "known": bool(found), "lookups": found}

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Documents of the newest lookups, newest first."""
        return [_document(entry) for entry in self.requests.recent(count)]


def _several(request_id: str, longer: list[str]) -> str:
    more = f" and {len(longer) - MAX_LISTED_IDS} more" if len(longer) > MAX_LISTED_IDS else ""
    names = ", ".join(longer[:MAX_LISTED_IDS]) + more
    return f"request_id: {len(longer)} recent requests begin with {request_id!r:.80}: {names}; give one of these ids"


def _document(entry: Explained) -> dict[str, Any]:
    return {
        "request_id": entry.request_id,
        "tenant": entry.tenant,
        "identity": entry.root.hex(),
        "unix_ms": entry.unix_ms,
        "duration_ms": round(entry.duration_ms, 3),
        "chunks": entry.chunks,
        "hits": {"l1": entry.l1_chunks, "l2": entry.l2_chunks, "served": entry.served_chunks},
        "first_miss": None
        if not entry.reason
        else {
            "chunk": entry.served_chunks,
            "reason": entry.reason,
            "detail": entry.detail,
            "storage_key": entry.missing_key.hex(),
        },
    }
