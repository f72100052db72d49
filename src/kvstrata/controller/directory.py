"""Which chunk is where: the registry, the slots of members' tiers, their full syncs, and lookups.

1. All changes of placements go through one thread, in the order in which they were decided on the loop; which slot a
   change is for is decided with it.  So what comes after the end of a sync meets the slots that the sync filled.
2. Retiring a slot is such a change too, so that no change that was decided for it meets what it stands for later.  That
   its placements are not found any more holds at once: no name leads to it, and it is not readable.
3. Looking up never waits for changes.  More than `INLINE_TAGS` tags are looked up on a thread.
4. Changes that wait are bounded in bytes: `busy` tells the caller to read no more, `full` to refuse.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from typing_extensions import Buffer

from kvstrata.native.registry import Registry, RegistryError, RegistryUsage
from kvstrata.rpc.cluster_wire import TAG_BYTES, Change, Run

INLINE_TAGS = 512
"""So many tags are looked up, or changed while nothing waits, on the loop: about 50 µs."""
BUSY_BYTES = 16 << 20
FULL_BYTES = 64 << 20
SWEEP_CELLS = 1 << 20
MASK_BYTES = 8_192


def _yield_to_loop() -> None:
    """Where cores are scarce, whoever asks for a lookup goes before whoever changes placements.

    The registry gives way after each turn besides: a scheduler lets what runs go on for milliseconds.
    """
    os.nice(10)  # of the calling thread only, on Linux


class SlotsExhausted(Exception):
    """No slot is free now; retired ones become free in a while."""


class Place(NamedTuple):
    """What a slot stands for."""

    group: int
    tier: str


class Found(NamedTuple):
    """One group that holds a beginning of the chunks."""

    group: int
    n_chunks: int


class Fill:
    """Slots that a full sync fills, not found by anybody yet."""

    def __init__(self, group: int, tiers: list[str]) -> None:
        self.group = group
        self.tiers = tiers
        self.slots: dict[str, int] = {}


class Directory:
    """Everything runs on `loop`'s thread, except for what it hands to its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, max_bytes: int, failed: Callable[[int, str], None]
    ) -> None:
        """`failed(group, reason)`: a change of these placements could not be made; what is known is not exact."""
        self._loop = loop
        self._failed = failed
        self.registry = Registry(max_bytes=max_bytes)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-directory", initializer=_yield_to_loop)
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="kv-sweep", initializer=_yield_to_loop)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="kv-lookup")
        self._slots: dict[tuple[int, str], int] = {}
        self._places: dict[int, Place] = {}
        self._readable = bytearray(MASK_BYTES)
        self._readable_groups: set[int] = set()
        self._pending = 0
        self._retired = asyncio.Event()
        self.waiting_bytes = 0
        self.drained: Callable[[], None] = lambda: None
        """Called when `busy` has become false."""
        self.admitted_keys = 0
        self.evicted_keys = 0
        self.refused_keys = 0

    # --- what is known --------------------------------------------------------------------------------------

    def usage(self) -> RegistryUsage:
        """Of the whole registry."""
        return self.registry.usage()

    def keys(self) -> dict[Place, int]:
        """Placements by group and tier; what fills and what is retired left out."""
        return {
            place: found.keys
            for place, slot in ((Place(*name), slot) for name, slot in self._slots.items())
            if (found := self.registry.slot(slot)) is not None
        }

    def has(self, group: int) -> bool:
        """Whether anything was ever said of this group's chunks."""
        return any(name[0] == group for name in self._slots)

    @property
    def busy(self) -> bool:
        """More waits than is taken at a time."""
        return self.waiting_bytes > BUSY_BYTES

    @property
    def full(self) -> bool:
        """No more may wait."""
        return self.waiting_bytes > FULL_BYTES

    def set_readable(self, group: int, readable: bool) -> None:
        """Whether peers may be sent to this group's L1."""
        (self._readable_groups.add if readable else self._readable_groups.discard)(group)
        slot = self._slots.get((group, "l1"))
        if slot is not None:
            self._mark(slot, readable)

    def longest(
        self, tags: bytes, n_slices: int, except_group: int | None, best: int, allowed: Buffer | None = None
    ) -> list[Found]:
        """The readable groups that hold the longest beginnings in L1, the longest first.

        On another thread (see `longest_on_thread`) with the mask as it was when that was asked.
        """
        found = self.registry.lookup_prefix(
            tags,
            n_slices=n_slices,
            allowed=self._readable if allowed is None else allowed,
            except_group=except_group,
            best=best,
        )
        return [Found(candidate.group, candidate.chunks) for candidate in found]

    async def longest_on_thread(
        self, tags: bytes, n_slices: int, except_group: int | None, best: int
    ) -> list[Found]:
        """The same for more tags than the loop has time for."""
        allowed = bytes(self._readable)
        return await self._loop.run_in_executor(
            self._readers, self.longest, tags, n_slices, except_group, best, allowed
        )

    async def holders(self, tags: bytes) -> list[list[Place]]:
        """For each tag: who has it, and in which tier."""
        places = dict(self._places)
        slots = await self._loop.run_in_executor(self._readers, self.registry.holders, tags)
        return [[places[slot] for slot in row if slot in places] for row in slots]

    # --- changes --------------------------------------------------------------------------------------------

    def apply(self, group: int, tiers: list[str], runs: list[Run]) -> None:
        """A batch of events. Raises SlotsExhausted, then nothing or the first runs were applied."""
        work: list[tuple[Change, int, bytes]] = []
        for run in runs:
            if run.change is Change.CLEAR:
                self._clear(group, tiers, run.tier)
                continue
            slot = self._slots.get((group, run.tier))
            if slot is None:
                slot = self._open(group, tiers, run.tier)
                self.registry.publish(slot)
                self._name(slot, group, run.tier)
            work.append((run.change, slot, run.tags))
        if not work:
            return
        n_bytes = sum(len(tags) for _, _, tags in work)
        if not self._pending and n_bytes <= INLINE_TAGS * TAG_BYTES:
            self._worked(group, self._work(work))
        else:
            self._submit(n_bytes, lambda: self._work(work), lambda outcome: self._worked(group, outcome))

    def begin(self, group: int, tiers: list[str]) -> Fill:
        """Begin to fill hidden slots. Raises SlotsExhausted."""
        fill = Fill(group, tiers)
        try:
            for tier in tiers:
                fill.slots[tier] = self._open(group, tiers, tier)
        except SlotsExhausted:
            self.abandon(fill)
            raise
        return fill

    def fill(self, fill: Fill, tier: str, tags: bytes) -> Awaitable[str]:
        """Add a part; awaits what went wrong, empty for nothing."""
        slot = fill.slots[tier]
        return self._submit(len(tags), lambda: self._work([(Change.ADMIT, slot, tags)])[3])

    def publish(self, fill: Fill) -> Awaitable[str]:
        """What fills it is what is known from now on; awaits what went wrong, empty for nothing."""
        old = {tier: self._slots.get((fill.group, tier)) for tier in fill.tiers}
        for tier, slot in fill.slots.items():
            self._name(slot, fill.group, tier)

        def work() -> str:
            try:
                for tier, slot in fill.slots.items():
                    self.registry.publish(slot, retire=old[tier])
            except RegistryError as error:
                return error.reason
            return ""

        for before in old.values():
            if before is not None:
                self._unname(before)
        return self._submit(0, work, lambda _: self._retired.set())

    def abandon(self, fill: Fill) -> None:
        """What fills it is not wanted."""
        for slot in fill.slots.values():
            self._retire(slot)
        fill.slots.clear()

    def forget(self, group: int) -> None:
        """All placements of a group; no lookup finds one of them from now on."""
        self._readable_groups.discard(group)
        self.forget_tiers_but(group, ())

    def forget_tiers_but(self, group: int, tiers: Collection[str]) -> None:
        """All placements of a group in other tiers than these: it has them no more."""
        for name in [name for name in self._slots if name[0] == group and name[1] not in tiers]:
            slot = self._slots.pop(name)
            self._unname(slot)
            self._retire(slot)

    def restore_slots(self, group: int, tiers: list[str]) -> dict[str, int]:
        """Visible slots for what a snapshot tells of a group. Raises SlotsExhausted."""
        fill = self.begin(group, tiers)
        for tier, slot in fill.slots.items():
            self.registry.publish(slot)
            self._name(slot, group, tier)
        return fill.slots

    def restore(self, tags: array[int], slots: array[int], slot_of: array[int]) -> Awaitable[str]:
        """Placements of a snapshot; awaits what went wrong, empty for nothing."""

        def work() -> str:
            try:
                self.registry.restore(tags, slots, slot_of)
            except RegistryError as error:
                return error.reason
            return ""

        return self._submit(TAG_BYTES * len(tags), work)

    def places(self) -> dict[int, Place]:
        """What each visible slot stands for."""
        return dict(self._places)

    async def keep_swept(self) -> None:
        """Frees retired slots for as long as it runs."""
        while True:
            await self._retired.wait()
            self._retired.clear()
            while self.registry.usage().retired:
                step = self._loop.run_in_executor(self._sweeper, self.registry.sweep, SWEEP_CELLS)
                await asyncio.shield(step)

    async def idle(self) -> None:
        """Returns when every change decided so far has been carried out."""
        await self._submit(0, lambda: "")

    def close(self) -> None:
        """Wait for what runs; drop what waits."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._sweeper.shutdown(wait=True, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)

    # --- inside ---------------------------------------------------------------------------------------------

    def _open(self, group: int, tiers: list[str], tier: str) -> int:
        slot = self.registry.open_slot(group, rank=tiers.index(tier))
        if slot is None:
            raise SlotsExhausted
        return slot

    def _name(self, slot: int, group: int, tier: str) -> None:
        self._slots[group, tier] = slot
        self._places[slot] = Place(group, tier)
        if tier == "l1":
            self._mark(slot, group in self._readable_groups)

    def _unname(self, slot: int) -> None:
        self._mark(slot, False)
        self._places.pop(slot, None)

    def _mark(self, slot: int, readable: bool) -> None:
        if readable:
            self._readable[slot >> 3] |= 1 << (slot & 7)
        else:
            self._readable[slot >> 3] &= ~(1 << (slot & 7))

    def _retire(self, slot: int) -> None:
        """In the order of the changes."""
        if self._pending:
            self._submit(0, lambda: self.registry.retire(slot), lambda _: self._retired.set())
        else:
            self.registry.retire(slot)
            self._retired.set()

    def _clear(self, group: int, tiers: list[str], tier: str) -> None:
        """A tier is empty: another slot, in the order of the changes."""
        if (group, tier) not in self._slots:
            return
        fill = Fill(group, [tier])
        fill.slots[tier] = self._open(group, tiers, tier)
        self.publish(fill)

    def _work(self, work: list[tuple[Change, int, bytes]]) -> tuple[int, int, int, str]:
        """(admitted, evicted, refused, what went wrong); any thread."""
        admitted = evicted = refused = 0
        wrong = ""
        for change, slot, tags in work:
            try:
                if change is Change.ADMIT:
                    admitted += self.registry.admit(slot, tags)
                else:
                    evicted += self.registry.evict(slot, tags)
            except RegistryError as error:
                refused += len(tags) // TAG_BYTES
                if error.reason != "bad_slot":  # retired meanwhile: nobody wants it any more
                    wrong = error.reason
        return admitted, evicted, refused, wrong

    def _worked(self, group: int, outcome: tuple[int, int, int, str]) -> None:
        admitted, evicted, refused, wrong = outcome
        self.admitted_keys += admitted
        self.evicted_keys += evicted
        self.refused_keys += refused
        if wrong:
            self._failed(group, wrong)

    def _submit(
        self, n_bytes: int, work: Callable[[], Any], done: Callable[[Any], None] | None = None
    ) -> asyncio.Future[Any]:
        """Queue a change. `done` is called on the loop, before whoever awaits it goes on."""
        self._pending += 1
        self.waiting_bytes += n_bytes
        future = self._loop.run_in_executor(self._writer, work)

        def ended(future: asyncio.Future[Any]) -> None:
            was_busy = self.busy
            self._pending -= 1
            self.waiting_bytes -= n_bytes
            if done is not None and not future.cancelled() and future.exception() is None:
                done(future.result())
            if was_busy and not self.busy:
                self.drained()

        future.add_done_callback(ended)
        return future
