"""Why a chunk was not there: bounded memories of keys, of first chunks by identity, and of recent requests.

Three memories, each with its own bound:

- *Keys*: what last happened to a storage key that is not in L1 (evicted, corrupt, refused, put skipped, …) or
  that somebody asked for in vain.  A key that is stored is dropped from it.
- *Probes*: which identities stored a prompt with these first tokens, per tenant.  A probe is a digest of
  tokens alone, compared only within the tenant of the caller, so nobody learns what another tenant holds.
- *Requests*: the last lookups by request id, with what each tier had and the reason of the first miss.

Invariant: a reason is only given when this instance knows it; once the key memory dropped anything, a key
that it does not know is `forgotten`, not `unknown_key`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvstrata.types import KEY_BYTES, LayoutIdentity, MissReason, RequestIdentity

MAX_KEYS = 32_768
"""Some 230 bytes each: with all of them a server stays below 100 MB."""
MAX_PROBES = 8_192
"""Some 950 bytes each, where each names another identity."""
MAX_IDENTITIES_PER_PROBE = 8
MAX_REQUESTS = 1_024
MAX_DETAIL_CHARS = 120
_TAG_BYTES = 8


_ADVICE = {
    "entries_full": "every entry of L1's index is in use; raise l1.entries",
    "quota": "its tenant is at its quota; raise quotas_gb",
    "too_large": "the record is larger than L1; raise l1.size_gb",
    "pool_pinned": "all of L1 is in use; raise l1.size_gb",
}


def with_advice(word: str) -> str:
    """A short reason, and what to change where a setting is the cause."""
    return f"{word}: {_ADVICE[word]}" if word in _ADVICE else word


class KeyNote(NamedTuple):
    """What is known of one absent key."""

    reason: MissReason
    detail: str
    unix_ms: int


class KeyMemory:
    """What happened to keys that are not there. Keys are known by their first 8 bytes."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # Ordered, because a plain dict looks for its first item behind all that were deleted before it.
        self._notes: OrderedDict[bytes, KeyNote] = OrderedDict()
        self._last = KeyNote(MissReason.UNKNOWN_KEY, "", 0)
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, key: bytes, reason: MissReason, detail: str, unix_ms: int) -> None:
        """Something happened to this key; replaces what was known."""
        tag = key[:_TAG_BYTES]
        known = KeyNote(reason, detail[:MAX_DETAIL_CHARS], unix_ms)
        if known != self._last:
            self._last = known  # chunks evicted together share one note
        self._notes[tag] = self._last
        self._notes.move_to_end(tag)
        if len(self._notes) > self._max_keys:
            self._notes.popitem(last=False)
            self.overflowed = True

    def missed(self, key: bytes, unix_ms: int) -> None:
        """Somebody asked for this key in vain; says nothing where more is known."""
        if key[:_TAG_BYTES] not in self._notes:
            self.note(key, MissReason.NEVER_STORED, "", unix_ms)

    def stored(self, keys: Iterable[bytes]) -> None:
        """These keys are there now."""
        notes = self._notes
        if notes:
            for key in keys:
                notes.pop(key[:_TAG_BYTES], None)

    def lost_events(self) -> None:
        """Something happened to keys that this memory was not told."""
        self.overflowed = True

    def get(self, key: bytes) -> KeyNote | None:
        """What is known of a key."""
        return self._notes.get(key[:_TAG_BYTES])


class IdentityMemory:
    """Which identities stored prompts that begin with the same tokens, per tenant."""

    def __init__(self, max_probes: int = MAX_PROBES) -> None:
        self._max_probes = max_probes
        self._probes: OrderedDict[tuple[str, bytes], dict[bytes, tuple[LayoutIdentity, RequestIdentity]]] = (
            OrderedDict()
        )

    def stored(self, probe: bytes, root: bytes, layout: LayoutIdentity, request: RequestIdentity) -> None:
        """A prompt with this probe was stored under this identity."""
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
        """The (field, value there) in which the newest other identity with the same tokens differs.

        None when no other identity of this tenant stored such a prompt.
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
    """One lookup, as told by explain. Times in milliseconds."""

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
    """The last lookups; a request that looked up several times is told with all that are remembered."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._ring: list[Explained | None] = [None] * max_requests
        self._next = 0

    def add(self, explained: Explained) -> None:
        """Remember one lookup in place of the oldest."""
        self._ring[self._next] = explained
        self._next = (self._next + 1) % self._max_requests

    def find(self, request_id: str) -> list[Explained]:
        """All remembered lookups of a request, oldest first."""
        order = self._ring[self._next :] + self._ring[: self._next]
        return [entry for entry in order if entry is not None and entry.request_id == request_id]

    def recent(self, count: int) -> list[Explained]:
        """The newest lookups, newest first."""
        order = self._ring[self._next :] + self._ring[: self._next]
        return [entry for entry in reversed(order) if entry is not None][:count]


class Explainer:
    """The three memories and the rule by which a reason is chosen."""

    def __init__(self) -> None:
        self.keys = KeyMemory()
        self.identities = IdentityMemory()
        self.requests = RequestMemory()

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
        """Reason and detail for a chunk that is not there.

        `key`: storage key of its first missing slice; `first`: it is the prompt's first chunk;
        `in_flight`: somebody is writing or loading it now; `policy`: the eviction policy's name.
        """
        note = self.keys.get(key)
        if first and not in_flight and (note is None or note.reason is MissReason.NEVER_STORED):
            difference = self.identities.difference(probe, root, layout, request)
            if difference is not None:
                name, shown = difference
                detail = f"{name}: stored with {shown!r}" if shown else name
                return MissReason.IDENTITY_DIFFERS, detail
        return self.why_key(key, in_flight=in_flight, policy=policy)

    def why_key(self, key: bytes, *, in_flight: bool, policy: str) -> tuple[MissReason, str]:
        """The same as far as the key alone tells."""
        if in_flight:
            return MissReason.IN_FLIGHT, "being stored or loaded"
        note = self.keys.get(key)
        if note is not None and note.reason is MissReason.EVICTED:
            return MissReason.EVICTED, f"by {note.detail or policy} at {note.unix_ms} (unix ms)"
        if note is not None and note.reason is not MissReason.NEVER_STORED:
            return note.reason, note.detail
        if note is not None:
            return MissReason.NEVER_STORED, "asked for before, never stored since"
        if self.keys.overflowed:
            return MissReason.FORGOTTEN, "the memory of absent keys has overflowed"
        return MissReason.UNKNOWN_KEY, "nobody has named this chunk here before"

    def explain(self, request_id: str, tenants: frozenset[str] | None) -> dict[str, Any]:
        """The document for one request id, as far as the caller may see its tenant (None: any)."""
        found = [
            entry for entry in self.requests.find(request_id) if tenants is None or entry.tenant in tenants
        ]
        return {
            "request_id": request_id,
            "known": bool(found),
            "lookups": [_document(entry) for entry in found],
        }

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Documents of the newest lookups, newest first."""
        return [_document(entry) for entry in self.requests.recent(count)]


def split_keys(keys: bytes) -> list[bytes]:
    """Concatenated keys, one by one."""
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


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
