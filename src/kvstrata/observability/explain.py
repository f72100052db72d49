"""Explains misses and hits: why a chunk was absent, what lookups found, and how much computing that saved.

Every part that stores, puts, loads or drops chunks reports to the Explainer, which itself calls no other part.  It
keeps three bounded records:

- *Notes*: the last event of a storage key that is not in L1 (evicted, corrupt, refused, put skipped, …, or looked up
  without success).  When a key is stored, its note is dropped.
- *Probes*: the identities under which a prompt with these first tokens was stored, per tenant.  A probe is a digest of
  tokens alone and is compared only within the caller's tenant, so no tenant learns which prompts another one has.
- *Lookups*: the last lookups, with the chunks that each tier had and the reason of the first miss.

1. A reason is given only if this instance knows it.  Once notes were dropped, a key without a note is `forgotten`, not
   `unknown_key`.
2. What a lookup finds saves the time that its engine would have taken to compute it, at the rate that the engine
   measures and reports (wire.Ping), without what the engine's own cache holds.  An engine that reports no rate saves
   nothing.

`ServerNumbers` are the metrics of requests and cluster that several parts of a server count.  `Trend` reports the
results of lookups in the last minute, the last hour and since the start: differences of samples of the numbers.  A
sample is taken every SAMPLE_S and kept for an hour: about 1 MB.  A window reaches back to the last sample that is old
enough, or to the start; `seconds` is its exact length.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.errors import BadRequest
from kvstrata.observability.numbers import (
    SHORT_BUCKETS,
    Numbers,
    counter,
    histogram,
    parts_by,
)
from kvstrata.types import LayoutIdentity, MissReason, PoolChange, RequestIdentity

MAX_NOTES = 32_768
"""Some 230 bytes each: even with this many notes, a server stays below 100 MB."""
MAX_PROBES = 8_192
"""Some 950 bytes each, if each probe has an identity of its own."""
MAX_IDENTITIES_PER_PROBE = 8
MAX_LOOKUPS = 4_096
MAX_LISTED_IDS = 8
"""Maximum number of matching request ids that an error lists."""
MAX_DETAIL_CHARS = 120
_TAG_BYTES = 8
"""Number of a key's first bytes that identify its note."""
_LEFT_BY: dict[int, str] = {
    PoolChange.CLEARED: "clear",
    PoolChange.REMOVED: "an evict command of the controller",
}
"""The words of explain for the reason why a chunk left L1, if that is not the eviction policy."""
_ADVICE = {
    "entries_full": "every entry of L1's index is in use; raise l1.entries",
    "quota": "quotas protect all that could be evicted for it; raise its tenant's in quotas_gb, or lower others",
    "too_large": "the record is larger than L1; raise l1.size_gb",
    "pool_pinned": "all of L1 is in use, or l1.eviction_policy is noop; raise l1.size_gb",
}


def with_advice(word: str) -> str:
    """A reason code, with advice if a setting is the cause."""
    return f"{word}: {_ADVICE[word]}" if word in _ADVICE else word


class TenantNumbers(Numbers):
    """The chunks that one tenant's lookups asked for, by where they were found."""

    asked = counter(
        "Chunks that a tenant's lookups asked for. Only for tenants named in the settings or the tenants file at the "
        "start.",
        name="tenant_lookup_chunks",
    )
    found = counter(
        "Chunks served to such a tenant, from L1 or after a load from L2.", "tier", name="tenant_hit_chunks"
    )

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant


class ServerNumbers(Numbers, prefix=""):
    """The metrics of a server's requests and cluster. Belongs to the event loop."""

    requests = counter("Requests by operation.", "op")
    request_seconds = histogram(
        "Time from a request's arrival to its reply, by operation; pings included.",
        "op",
        bounds=SHORT_BUCKETS,
    )
    errors = counter("Error replies by code.", "code")
    first_miss_reasons = counter("Lookups by the reason of their first miss.", "reason", name="first_misses")
    reserve_outcomes = counter("Chunks that reserves asked for, by outcome.", "outcome")
    put_skipped = counter("Chunks not put to L2, by reason.", "reason")
    peeked_misses = counter(
        "Lookups that engines answered themselves as misses, from the shared index. All counts of lookups, chunks "
        "and misses include them; `kvstrata_lookup_seconds` does not."
    )
    hinted_chunks = counter("Chunks in L1 that received a hint of their next use.")
    lookup_chunks = counter("Chunks that lookups asked for.")
    l1_hit_chunks = counter("Chunks served from L1.")
    l2_hit_chunks = counter("Chunks served after a load from L2.")
    revoked_leases = counter("Leases revoked before a copy began, because other requests needed the space.")
    committed_chunks = counter("Chunks that became visible.")
    of_tenants = parts_by(
        "tenant",
        TenantNumbers,
        lambda server: {one.tenant: one for one in server.tenants.values()},
        key="",
    )
    retrieved_bytes = counter("Bytes sent by retrieve.")
    lookup = histogram("Time from a lookup's arrival to its reply.", name="lookup_seconds")
    store = histogram(
        "Time from a reservation to the commit that ended it: the time of the engine's copy.",
        name="store_seconds",
    )
    prefetch = histogram("Time that a lookup took to load chunks from L2.", name="l2_prefetch_seconds")

    def __init__(self) -> None:
        self.tenants: dict[int, TenantNumbers] = {}
        """Tenants' numbers by tenant number; only tenants that the settings or the tenants file named at the start."""


class KeyNote(NamedTuple):
    """The last event of one absent key."""

    reason: MissReason
    detail: str
    unix_ms: int


class Choice(msgspec.Struct):
    """Whether a prompt's chunks in one adapter were loaded, or left to the engine to compute."""

    adapter: str
    chunks: int
    """Number of chunks from the adapter's first one to the last one in L1 or an adapter."""
    load_bytes: int
    load_s: float | None
    compute_s: float
    """Expected time of loading what it has of these chunks (None: not known yet), and of computing all of them."""
    loads: bool
    took_s: float | None = None
    """Measured time of the load; None: it still runs, or nothing is loaded."""


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
    ends: bytes = b""
    """Chain keys of its last chunk, and of the last one that was served."""
    slice: bytes = b""
    """Digest of the engine's last slice."""
    choices: Sequence[Choice] = ()


class EngineUse:
    """The chunks that one engine has asked for and stored; totals since it attached."""

    __slots__ = ("avoided_s", "hit_chunks", "lookup_chunks", "lookups", "stored_records")

    def __init__(self) -> None:
        self.lookups = self.lookup_chunks = self.hit_chunks = self.stored_records = 0
        self.avoided_s = 0.0


class Explainer:
    """Keeps the records that the module describes. Belongs to the event loop."""

    def __init__(self, counters: ServerNumbers, clock: Clock, policy: str) -> None:
        """`policy`: name of the eviction policy of L1."""
        self._counters = counters
        self._clock = clock
        self._policy = policy
        # Not plain dicts, which find their first item only by stepping over all items deleted before it.
        self.notes: OrderedDict[bytes, KeyNote] = OrderedDict()
        self._note_before = KeyNote(MissReason.UNKNOWN_KEY, "", 0)
        self._has_forgotten = False
        self._probes: OrderedDict[tuple[str, bytes], dict[bytes, tuple[LayoutIdentity, RequestIdentity]]] = (
            OrderedDict()
        )
        self.lookups: deque[Explained] = deque(maxlen=MAX_LOOKUPS)
        self._newest: OrderedDict[str, Explained] = OrderedDict()
        """Of about these, by the engine's id, and without what vLLM appends to the API's (see `explain`)."""
        self.avoided_s = 0.0
        """Seconds of computing that hits have saved."""

    # --- chunks, by storage key -----------------------------------------------------------------------------

    def note_of(self, key: bytes) -> KeyNote | None:
        """The last event of an absent key; None if there is no note."""
        return self.notes.get(key[:_TAG_BYTES])

    def committed(self, engine: EngineUse, keys: Sequence[bytes]) -> None:
        """An engine's chunks became visible."""
        self._stored(keys)
        self._counters.committed_chunks += len(keys)
        engine.stored_records += len(keys)

    def refused(self, key: bytes, word: str) -> None:
        """A reserve of this chunk was refused; `word` is the reason code."""
        self._note(key, MissReason.REFUSED, with_advice(word), self._clock.unix_ms())

    def put_skipped(self, key: bytes, reason: str) -> None:
        """Note that a tier did not get this chunk."""
        self._counters.put_skipped.add_foreign(reason)
        self._note(key, MissReason.PUT_SKIPPED, reason, self._clock.unix_ms())

    def dropped(self, tier: str, key: bytes) -> None:
        """Note that a tier dropped this chunk to stay below its cap."""
        self._note(key, MissReason.EVICTED, f"the cap of {tier}", self._clock.unix_ms())

    def left_l1(self, key: bytes, change: int, now_ms: int) -> None:
        """Note that this chunk left L1; `change`: a PoolChange."""
        known = self.note_of(key)
        # A chunk that was not put is missed for that reason: with the put it would be in L2.
        if known is None or known.reason is not MissReason.PUT_SKIPPED:
            self._note(key, MissReason.EVICTED, _LEFT_BY.get(change, self._policy), now_ms)

    def corrupt(self, key: bytes, now_ms: int) -> None:
        """Note that the checksum of this chunk is wrong."""
        self._note(key, MissReason.CORRUPT, "checksum differs", now_ms)

    def inserted(self, key: bytes) -> None:
        """Note that this chunk entered L1."""
        known = self.note_of(key)  # a put may have been skipped after the commit that this change reports
        if known is not None and known.reason is not MissReason.PUT_SKIPPED:
            self._stored([key])

    def changes_lost(self) -> None:
        """Note that changes of L1 were overwritten unread: from now on, a missing note proves nothing."""
        self._has_forgotten = True

    def _note(self, key: bytes, reason: MissReason, detail: str, unix_ms: int) -> None:
        """Note an event of this key, in place of an older note."""
        tag = key[:_TAG_BYTES]
        note = KeyNote(reason, detail[:MAX_DETAIL_CHARS], unix_ms)
        if note != self._note_before:
            self._note_before = note  # chunks that were evicted together share one note
        self.notes[tag] = self._note_before
        self.notes.move_to_end(tag)
        if len(self.notes) > MAX_NOTES:
            self.notes.popitem(last=False)
            self._has_forgotten = True

    def _stored(self, keys: Sequence[bytes]) -> None:
        if self.notes:
            for key in keys:
                self.notes.pop(key[:_TAG_BYTES], None)

    # --- identities -----------------------------------------------------------------------------------------

    def stored_under(
        self, probe: bytes, root: bytes, layout: LayoutIdentity, request: RequestIdentity
    ) -> None:
        """Note that a prompt with this probe was stored under this identity."""
        if not probe:
            return
        known = self._probes.setdefault((request.tenant, probe), {})
        known.pop(root, None)
        known[root] = (layout, request)
        if len(known) > MAX_IDENTITIES_PER_PROBE:
            del known[next(iter(known))]
        if len(self._probes) > MAX_PROBES:
            self._probes.popitem(last=False)

    def _difference(self, probe: bytes, root: bytes, layout: LayoutIdentity, request: RequestIdentity) -> str:
        """The first field in which the newest other identity with the same tokens differs, with that identity's value.

        A salt is secret, so its value is left out.  Empty if no prompt with these tokens was stored under another
        identity of this tenant.
        """
        known = self._probes.get((request.tenant, probe), {}) if probe else {}
        for other_root in reversed(known):
            if other_root != root:
                other_layout, other_request = known[other_root]
                for ours, theirs in ((layout, other_layout), (request, other_request)):
                    for name in ours.__struct_fields__:
                        if getattr(ours, name) != getattr(theirs, name):
                            shown = "" if name == "salt" else str(getattr(theirs, name))
                            return f"{name}: stored with {shown!r}" if shown else name
                return ""
        return ""

    # --- lookups --------------------------------------------------------------------------------------------

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
    ) -> tuple[MissReason, str]:
        """The reason why a chunk that a lookup named is absent, and a detail.

        `key`: the storage key of the chunk's first missing slice; `first`: the chunk is the prompt's first;
        `in_flight`: a process is writing or loading the chunk now.
        """
        note, has_forgotten = self.note_of(key), self._has_forgotten
        if note is None:
            self._note(key, MissReason.NEVER_STORED, "", self._clock.unix_ms())
        if in_flight:
            return MissReason.IN_FLIGHT, "being stored or loaded"
        unknown = note is None or note.reason is MissReason.NEVER_STORED
        if first and unknown and (difference := self._difference(probe, root, layout, request)):
            return MissReason.IDENTITY_DIFFERS, difference
        if note is None and has_forgotten:
            return MissReason.FORGOTTEN, "the list of absent keys has overflowed"
        if note is None:
            return MissReason.UNKNOWN_KEY, "this server has not seen this chunk's key before"
        if note.reason is MissReason.EVICTED:
            return MissReason.EVICTED, f"by {note.detail or self._policy} at {note.unix_ms} (unix ms)"
        if note.reason is MissReason.NEVER_STORED:
            return MissReason.NEVER_STORED, "looked up before, never stored since"
        return note.reason, note.detail

    def looked_up(self, engine: EngineUse, tenant: int, found: Explained, saved_s: float = 0.0) -> None:
        """Count and remember a lookup, which has saved its engine so many seconds of computing."""
        counters = self._counters
        counters.lookup_chunks += found.chunks
        counters.l1_hit_chunks += found.l1_chunks
        counters.l2_hit_chunks += found.l2_chunks
        if (of_tenant := counters.tenants.get(tenant)) is not None:
            of_tenant.asked += found.chunks
            of_tenant.found["l1"] += found.l1_chunks
            of_tenant.found["l2"] += found.l2_chunks
        if found.reason:
            counters.first_miss_reasons[found.reason] += 1
        self.lookups.append(found)
        numbered = found.request_id.rpartition("-")[0]
        for name in (found.request_id, numbered, numbered.rpartition("-")[0]):
            self._newest[name] = found
            self._newest.move_to_end(name)
        while len(self._newest) > 3 * MAX_LOOKUPS:
            self._newest.popitem(last=False)
        self.avoided_s += saved_s
        engine.avoided_s += saved_s
        engine.lookups += 1
        engine.lookup_chunks += found.chunks
        engine.hit_chunks += found.served_chunks

    def explain(self, request_id: str) -> dict[str, Any]:
        """The document of one request's lookups, oldest first.

        `request_id` is the engine's id of the request, or the id that the API's client saw. (vLLM appends `-RANDOM` to
        the latter, or `-NUMBER-RANDOM` for a completion.) Raises BadRequest if several of the engine's ids begin with
        it.
        """
        request_id = self._whole_id(request_id)
        found = [_document(lookup) for lookup in self.lookups if lookup.request_id == request_id]
        return {"request_id": request_id, "known": bool(found), "lookups": found}

    def newest(self, request_id: str) -> Explained | None:
        """The newest lookup of the requests with an id, the engine's or the API's; None if it is not known."""
        return self._newest.get(request_id)

    def _whole_id(self, request_id: str) -> str:
        """The engine's id of a request that is named by it or by the API's id. Raises BadRequest."""
        names = {lookup.request_id for lookup in self.lookups}
        if request_id not in names:
            longer = sorted(name for name in names if name.startswith(f"{request_id}-"))
            if len(longer) > 1:
                more = f" and {len(longer) - MAX_LISTED_IDS} more" if len(longer) > MAX_LISTED_IDS else ""
                raise BadRequest(
                    f"request_id: {len(longer)} recent requests begin with {request_id!r:.80}: "
                    f"{', '.join(longer[:MAX_LISTED_IDS])}{more}; give one of these ids",
                    field="request_id",
                )
            request_id = longer[0] if longer else request_id
        return request_id

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Documents of the newest lookups, newest first."""
        return [_document(lookup) for lookup in list(self.lookups)[::-1][:count]]


def _document(lookup: Explained) -> dict[str, Any]:
    first_miss = {
        "chunk": lookup.served_chunks,
        "reason": lookup.reason,
        "detail": lookup.detail,
        "storage_key": lookup.missing_key.hex(),
    }
    return {
        "request_id": lookup.request_id,
        "tenant": lookup.tenant,
        "identity": lookup.root.hex(),
        "unix_ms": lookup.unix_ms,
        "duration_ms": round(lookup.duration_ms, 3),
        "chunks": lookup.chunks,
        "hits": {"l1": lookup.l1_chunks, "l2": lookup.l2_chunks, "served": lookup.served_chunks},
        "first_miss": first_miss if lookup.reason else None,
        "choices": [msgspec.structs.asdict(choice) for choice in lookup.choices],
    }


SAMPLE_S = 5.0
MINUTE_S, HOUR_S = 60.0, 3_600.0


class Sample(NamedTuple):
    """Totals at one time."""

    totals: dict[str, float]
    """`seconds` is the time."""
    first_misses: Counter[str]


class Trend:
    """The samples of one instance. Belongs to the event loop."""

    def __init__(self, counters: ServerNumbers, explainer: Explainer, clock: Clock) -> None:
        self._counters = counters
        self._explainer = explainer
        self._clock = clock
        self._start = self._now()
        self._samples: deque[Sample] = deque([self._start], maxlen=int(HOUR_S / SAMPLE_S) + 1)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        """Take one sample."""
        self._samples.append(self._now())

    def section(self) -> dict[str, Any]:
        """The section `trend` of the status document."""
        now = self._now()
        return {
            "minute": _window(self._samples, now, MINUTE_S),
            "hour": _window(self._samples, now, HOUR_S),
            "start": _window([self._start], now, 0.0),
        }

    def _now(self) -> Sample:
        counters = self._counters
        totals = {
            "seconds": self._clock.monotonic_s(),
            "lookups": sum(counters.lookup.counts) + counters.peeked_misses,
            "lookup_chunks": counters.lookup_chunks,
            "l1_hit_chunks": counters.l1_hit_chunks,
            "l2_hit_chunks": counters.l2_hit_chunks,
            "lookup_s": counters.lookup.sum_s,
            "avoided_s": self._explainer.avoided_s,
        }
        return Sample(totals, Counter(counters.first_miss_reasons))


def _window(samples: Iterable[Sample], now: Sample, length_s: float) -> dict[str, Any]:
    """The changes since the newest sample that is at least `length_s` old, or since the oldest sample."""
    begin_s = now.totals["seconds"] - length_s
    before, *later = samples
    for sample in later:
        if sample.totals["seconds"] <= begin_s:
            before = sample
    return {
        **{name: round(total - before.totals[name], 3) for name, total in now.totals.items()},
        "first_misses": dict(sorted((now.first_misses - before.first_misses).items())),
    }
