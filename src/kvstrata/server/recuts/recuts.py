"""Makes the chunks that a lookup misses from records that engines of another geometry have stored.

    a lookup's hit ends in L1 ──▶ which geometry's records go on longest? ──▶ recut chunk by chunk ──▶ lease again

Rules
1. A record is made only from complete, verified records of the same chunk and the same identity, with holds on all of
   them; without these, the lookup continues as if they did not exist.
2. All work is done on a lane of its own with one thread.  It ends at the lookup's deadline, or when the lookup is
   cancelled; records made by then stay in L1, and a later lookup finds them.
3. New records count for the tenant whose engine asks, and take space in L1 as chunks loaded from L2 do.  If a record
   cannot be made, even through a mistake of ours, there is no error but a shorter hit.

Geometries decide which records can be made from which.

The *geometry* of an engine is the set of its slices: it follows from its tensor- and pipeline-parallel sizes, its block
size and the order of axes in its blocks.  Engines with one LayoutIdentity have the same KV, whatever their geometries,
so a chunk that one of them stored can be recut for another one (keys/recut.py).

A geometry becomes known when all processes of one of its engines are attached at the same time, and stays known until
the server ends: the records stay in L1 and L2 when the engine ends.  Each server learns geometries by itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata import failpoints
from kvstrata.clock import Clock
from kvstrata.errors import Refused
from kvstrata.keys.batch import nth, part, split
from kvstrata.keys.recut import CannotRecut
from kvstrata.keys.spans import PromptKeys
from kvstrata.native.core import CopyOutcome, Hold, Pool, RecordSpec, storage_keys

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts
from collections import OrderedDict

from kvstrata.keys.recut import Part, Recut, plan_recut
from kvstrata.native import core
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.process.supervisor import PoolLane
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.server.processes import Process
from kvstrata.types import SERVER_ROW, LayoutIdentity, Slice


def record_length(sections: Sequence[int]) -> int:
    """The length of a record whose sections have these lengths."""
    return core.record_bytes(len(sections), sum(sections))


class Place(NamedTuple):
    """The memory and header fields of a target record. Its memory overlaps no source."""

    recut: Recut
    address: int
    length: int
    spec: RecordSpec


def recut_records(sources: Sequence[tuple[int, int, bytes]], targets: Sequence[Place]) -> CopyOutcome:
    """Write records of one chunk, and seal them with the CRCs of the written bytes.

    `sources` are (address, length, key) of the records, in the order in which `plan_recut` got their slices for each
    target.  The records that are used are verified first.  If one of them is damaged, its outcome is returned; if one
    has another shape, MISMATCH is returned; nothing is written then.  The caller owns all memory, which must stay
    mapped during the call.  Raises ValueError for an extent that is too small.  Bytes move without the GIL, but the
    call takes as long as the copy, so make it in a lane.
    """
    for recut, _, length, _ in targets:
        needed = record_length(recut.target_sections)
        if length < needed:
            raise ValueError(f"length: {length} bytes are too few for a record of {needed}")
    payloads = [(at, 0) for at, _, _ in sources]
    for used in sorted({copy.source for target in targets for copy in target.recut.copies}):
        at, source_length, key = sources[used]
        outcome = CopyOutcome(core.verify_record(at, source_length, key))
        if outcome is not CopyOutcome.OK:
            return outcome
        header = core.record_header(at, source_length)
        sections = tuple(n for _, n, _ in header.sections)
        if any(sections != target.recut.source_sections[used] for target in targets):
            return CopyOutcome.MISMATCH
        payloads[used] = (at + header.header_bytes, header.payload_bytes)
    for recut, address, length, spec in targets:
        payload_bytes = sum(recut.target_sections)
        header_bytes = record_length(recut.target_sections) - payload_bytes
        core.copy_strided(address + header_bytes, payload_bytes, payloads, recut.copies)
        core.seal_record(address, length, spec, recut.target_sections)
    return CopyOutcome.OK


MAX_LAYOUTS = 64
"""Maximum number of layout identities with known geometries; beyond it the one that attached longest ago is dropped."""
MAX_GEOMETRIES = 8
"""Maximum number of geometries of one layout identity; beyond it the oldest one is dropped."""

MAX_PARTS = 1_024
"""Maximum number of slices of one layout identity; beyond it the one declared longest ago is dropped."""


class Geometry(NamedTuple):
    """The slices of one engine with their facts, in the order of their digests."""

    slices: bytes
    """The digests of the slices, concatenated."""
    parts: tuple[Part, ...]


class Plan(NamedTuple):
    """How to make a chunk's records of one geometry from those of another."""

    source: Geometry
    recuts: tuple[Recut, ...]
    """For each slice of the target, with the numbers of the source's slices."""
    chunk_tokens: int


def plan(source: Geometry, target: Geometry) -> Plan:
    """Plan to make all records of a chunk. Any thread; takes up to tens of milliseconds. Raises CannotRecut."""
    recuts = tuple(plan_recut(source.parts, part) for part in target.parts)
    return Plan(source, recuts, int(target.parts[0].facts["chunk_tokens"]))


class Geometries:
    """The known geometries and their plans. Belongs to the event loop."""

    def __init__(self) -> None:
        self._layouts: OrderedDict[LayoutIdentity, OrderedDict[bytes, Geometry]] = OrderedDict()
        self._parts: dict[LayoutIdentity, dict[bytes, Part]] = {}
        """The slices that processes have declared: layout identity → digest → slice with its facts."""
        self._plans: dict[tuple[LayoutIdentity, bytes], dict[bytes, Plan | CannotRecut]] = {}
        """(Layout identity, target's slices) → source's slices → plan, or why there is none."""

    def declared(self, layout: LayoutIdentity, part: Slice, facts: Mapping[str, Any]) -> None:
        """Remember a slice of a process."""
        if layout not in self._layouts:
            self._layouts[layout] = OrderedDict()
            self._parts[layout] = {}
        self._layouts.move_to_end(layout)
        parts = self._parts[layout]
        parts.pop(part.digest(), None)
        parts[part.digest()] = Part(part, facts)
        if len(parts) > MAX_PARTS:
            del parts[next(iter(parts))]
        if len(self._layouts) > MAX_LAYOUTS:
            self._forget(next(iter(self._layouts)))

    def complete(self, layout: LayoutIdentity, slices: Sequence[bytes]) -> list[tuple[Geometry, Geometry]]:
        """Record the sorted digests of an engine's slices. Returns (source, target) of each plan to make now."""
        known, parts, packed = self._layouts.get(layout), self._parts.get(layout, {}), b"".join(slices)
        if known is None or packed in known or not all(digest in parts for digest in slices):
            return []
        geometry = Geometry(packed, tuple(parts[digest] for digest in slices))
        others = list(known.values())
        known[packed] = geometry
        if len(known) > MAX_GEOMETRIES:
            others = others[1:]
            self._forget_geometry(layout, next(iter(known)))
        return [pair for other in others for pair in ((other, geometry), (geometry, other))]

    def planned(
        self, layout: LayoutIdentity, source: Geometry, target: Geometry, made: Plan | CannotRecut
    ) -> None:
        """Record a plan, or the reason why there is none."""
        known = self._layouts.get(layout) or OrderedDict[bytes, Geometry]()
        if source.slices in known and target.slices in known:
            self._plans.setdefault((layout, target.slices), {})[source.slices] = made

    def plans(self, layout: LayoutIdentity, slices: bytes) -> list[Plan]:
        """The plans for an engine with these slices (sorted digests, concatenated)."""
        if not self._plans:
            return []
        of = self._plans.get((layout, slices), {})
        return [made for made in of.values() if isinstance(made, Plan)]

    def count(self) -> int:
        """Number of geometries that are known."""
        return sum(len(known) for known in self._layouts.values())

    def count_plans(self, kind: type[Plan | CannotRecut]) -> int:
        """Number of pairs of geometries with a plan, or without one."""
        return sum(isinstance(one, kind) for of in self._plans.values() for one in of.values())

    def _forget(self, layout: LayoutIdentity) -> None:
        for slices in list(self._layouts[layout]):
            self._forget_geometry(layout, slices)
        del self._layouts[layout], self._parts[layout]

    def _forget_geometry(self, layout: LayoutIdentity, slices: bytes) -> None:
        del self._layouts[layout][slices]
        self._plans.pop((layout, slices), None)
        for (other, _), of in self._plans.items():
            if other == layout:
                of.pop(slices, None)


class MissingChunks(NamedTuple):
    """The chunks that a lookup misses: those of `keys` from number `first` on."""

    keys: PromptKeys
    first: int
    tenant: int
    deadline_s: float


class Recuts(Numbers, prefix=""):
    """Recuts records for lookups, as the module describes. Belongs to the event loop."""

    geometries = gauge(
        "Known geometries of engines (parallel sizes, block size, order of axes).",
        lambda self: self._geometries.count(),
        name="recut_geometries",
    )
    possible = gauge(
        "Pairs of geometries where records of one can be recut into the other.",
        lambda self: self._geometries.count_plans(Plan),
        name="recut_plans",
        key="plans",
    )
    impossible = gauge(
        "Pairs of geometries that cannot be recut.",
        lambda self: self._geometries.count_plans(CannotRecut),
        name="recut_impossible_plans",
    )
    chunks = counter("Chunks recut for lookups from records of another geometry.", name="recut_chunks")
    n_bytes = counter("Bytes of these chunks.", name="recut_bytes", key="bytes")
    ended = counter(
        "Lookups for which not all missing chunks were recut, by reason.",
        "reason",
        name="recuts_ended",
    )

    def __init__(self, parts: Parts, lane: PoolLane) -> None:
        """`lane` is used for this work only."""
        self._geometries = Geometries()
        self._lane, self._clock, self._pool = lane, parts.clock, parts.pool
        self._tiers, self._prefetch = parts.tiers, parts.prefetch
        self._log = EventLog("recut")

    # -- geometries ----------------------------------------------------------------------------------------

    def attached(self, process: Process) -> None:
        """Record the slice that a process has declared; with an engine's last slice, plan the possible recuts."""
        part, facts, group = process.declared.slice, process.declared.facts, process.group
        if part is None or facts is None:
            return
        self._geometries.declared(group.layout, part, facts)
        if not group.complete:
            return
        for source, target in self._geometries.complete(group.layout, group.slices):
            try:
                made = self._lane.run(_plan, source, target)
            except Refused:
                self.ended["not_planned"] += 1
                continue
            made.add_done_callback(functools.partial(self._planned, group.layout, source, target))

    def _planned(
        self,
        layout: LayoutIdentity,
        source: Geometry,
        target: Geometry,
        done: asyncio.Future[Plan | CannotRecut],
    ) -> None:
        if done.cancelled():
            return
        made = done.result()
        self._geometries.planned(layout, source, target, made)
        sizes = {"model": layout.model, "slices": len(target.parts), "of_slices": len(source.parts)}
        if isinstance(made, CannotRecut):
            self._log.info("impossible", **sizes, reason=made.reason, why=str(made))
            return
        self._log.info("planned", **sizes, note="engines of this model use each other's records")
        self._tiers.recuts = True
        self._pool.set_has_l2(True)

    # -- lookups -------------------------------------------------------------------------------------------

    def plans(self, layout: LayoutIdentity, slices: bytes) -> list[Plan]:
        """The plans for an engine with these slices; empty: none of its chunks can be recut."""
        return self._geometries.plans(layout, slices)

    async def make(self, plans: Sequence[Plan], missing: MissingChunks, *, of_l2: bool = False) -> int:
        """Make the missing chunks that L1 has in another geometry. Returns the number of leading chunks made.

        `of_l2`: first load the records from L2 into L1, in the first geometry that L2 has.  Cancelling ends the work
        after the current chunk.
        """
        if of_l2 and not await self._loaded(plans, missing):
            return 0
        stop = threading.Event()
        try:
            future = self._lane.run(_make, self._pool, plans, missing, self._clock, stop)
        except Refused:
            self.ended["busy"] += 1
            return 0
        try:
            made = await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.set()
            future.add_done_callback(self._count)
            raise
        self._count(future)
        return made.n_chunks

    def _count(self, done: asyncio.Future[_Made]) -> None:
        if done.cancelled():
            return
        made = done.result()
        self.chunks += made.n_chunks
        self.n_bytes += made.n_bytes
        if made.ended:
            self.ended[made.ended] += 1
        if made.crashed:
            self._log.repeated(
                logging.ERROR, "crashed", "crashed", at=made.crashed, means="the hit is shorter"
            )

    async def _loaded(self, plans: Sequence[Plan], missing: MissingChunks) -> bool:
        """Load from L2 the missing chunks that it has in another geometry. Returns whether it has any."""
        keys, first = missing.keys, missing.first
        for one in plans:
            slices = one.source.slices
            try:
                rest = self._lane.run(storage_keys, keys.root, part(keys.chain, first, keys.n_chunks), slices)
            except Refused:
                self.ended["busy"] += 1
                return False
            fetched = await self._prefetch.fetch(
                await asyncio.shield(rest),
                len(one.source.parts),
                identity=keys.root,
                tenant=missing.tenant,
                parent=storage_keys(keys.root, nth(keys.chain, first - 1), slices) if first else b"",
                deadline_s=missing.deadline_s,
                limits=[record_length(sections) for sections in one.recuts[0].source_sections],
            )
            if fetched.n_chunks:
                return True
        return False


class _Made(NamedTuple):
    n_chunks: int
    n_bytes: int
    ended: str
    """Reason code why no more were made; "": all were made."""
    crashed: str = ""
    """Our mistake that stopped the work, and its place in the code."""


def _plan(source: Geometry, target: Geometry) -> Plan | CannotRecut:
    try:
        return plan(source, target)
    except CannotRecut as error:
        return error


def _longest(pool: Pool, plans: Sequence[Plan], missing: MissingChunks) -> tuple[int, Plan]:
    """The largest number of missing chunks that L1 has in any geometry, and that geometry's plan."""
    chain = part(missing.keys.chain, missing.first, missing.keys.n_chunks)
    found = []
    for one in plans:
        keys = storage_keys(missing.keys.root, chain, one.source.slices)
        found.append((pool.peek(keys, len(one.source.parts)), one))
    return max(found, key=lambda pair: pair[0])


def _make(
    pool: Pool, plans: Sequence[Plan], missing: MissingChunks, clock: Clock, stop: threading.Event
) -> _Made:
    """See `Recuts.make`; on a lane."""
    n_chunks, chosen = _longest(pool, plans, missing)
    made_bytes = 0
    for number in range(n_chunks):
        if stop.is_set() or clock.monotonic_s() >= missing.deadline_s:
            return _Made(number, made_bytes, "late")
        try:
            made, why = _make_chunk(pool, chosen, missing, missing.first + number)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return _Made(number, made_bytes, "crashed", f"{error!r}, {frame.name}:{frame.lineno}")
        if why:
            return _Made(number, made_bytes, why)
        made_bytes += made
    missed = missing.keys.n_chunks - missing.first
    return _Made(n_chunks, made_bytes, "" if n_chunks == missed else "absent")


def _make_chunk(pool: Pool, plan: Plan, missing: MissingChunks, number: int) -> tuple[int, str]:
    """Make all records of one chunk that L1 lacks. Returns their bytes, and a reason code if it failed, else ""."""
    keys = missing.keys
    sources: list[Hold] = []
    targets: list[_Target] = []
    made = False
    try:
        for key in split(storage_keys(keys.root, nth(keys.chain, number), plan.source.slices)):
            hold = pool.hold(key, identity=keys.root)
            if hold is None:
                return 0, "absent"
            sources.append(hold)
        if why := _reserve(pool, plan, missing, number, targets):
            return 0, why
        places = [(hold.address, hold.length, hold.key) for hold in sources]
        outcome = recut_records(places, [target.place for target in targets])
        failpoints.hit("recut.made")
        made = outcome is CopyOutcome.OK
        if not made:
            for hold in sources:
                pool.mark_bad(hold.key)  # checks the record, and drops it if it is damaged
            return 0, "corrupt"
    finally:
        for hold in (*sources, *(target.hold for target in targets)):
            hold.drop()
        if not made:
            for target in targets:
                pool.abort(target.ticket)
    outcomes = [pool.commit(target.ticket, [0])[0] for target in targets]
    if any(outcome != CommitOutcome.COMMITTED for outcome in outcomes):
        return 0, "refused"
    return sum(target.place.length for target in targets), ""


class _Target(NamedTuple):
    """A record that is being made, in a reservation of its own."""

    ticket: int
    hold: Hold
    place: Place


def _reserve(pool: Pool, plan: Plan, missing: MissingChunks, number: int, targets: list[_Target]) -> str:
    """Reserve the records of a chunk that L1 lacks, and add them to `targets`. Returns a reason code if it fails."""
    keys = missing.keys
    of_chunk = split(storage_keys(keys.root, nth(keys.chain, number), keys.slices))
    parents = [b""] * len(of_chunk)
    if number:
        parents = split(storage_keys(keys.root, nth(keys.chain, number - 1), keys.slices))
    digests = split(keys.slices)
    for key, parent, digest, recut in zip(of_chunk, parents, digests, plan.recuts, strict=True):
        length = record_length(recut.target_sections)
        ticket, (outcome,), _ = pool.reserve(key, parent, length, SERVER_ROW, keys.root, missing.tenant)
        if outcome == ReserveOutcome.PRESENT:
            continue
        if outcome != ReserveOutcome.RESERVED:
            return ReserveOutcome(outcome).name.lower()
        hold = pool.hold(None, ticket, 0)
        assert hold is not None, "an item just reserved has a hold"
        spec = RecordSpec(key, keys.root, digest, parent, plan.chunk_tokens)
        targets.append(_Target(ticket, hold, Place(recut, hold.address, hold.length, spec)))
    return ""
