"""Applies changes of chunk placements, from followers and from a restored snapshot.  lookups.py reads the result.

1. One thread applies all changes of placements, in the order in which the loop decided them, each to the slot that was
   decided with it.  So a change after the end of a list applies to the slots that the list filled.
2. Retiring a slot is such a change too, so no earlier change reaches the slot once it stands for something else.  The
   placements of a retired slot are hidden at once, since the slot loses its name and is not readable.
3. Waiting changes are bounded: a follower awaits each page of a list, and `idle` while `busy`.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from kvstrata.cluster.lookups import INLINE_TAGS, Lookups
from kvstrata.naming import name_thread
from kvstrata.native.core import Registry, RegistryError, RegistryUsage
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.rpc.cluster_wire import TAG_BYTES, Change, Run

BUSY_BYTES = 16 << 20
SWEEP_CELLS = 1 << 20


def _yield_to_loop() -> None:
    """Give lookups precedence over changes when cores are scarce.

    The registry also yields after each turn, since a scheduler may let a running thread continue for milliseconds.
    """
    name_thread()
    os.nice(10)  # of the calling thread only, on Linux


class SlotsExhausted(Exception):
    """No slot is free now; retired slots become free when they are swept."""


class Fill(NamedTuple):
    """The slots that a list fills, by tier; lookups find them once it is published."""

    group: int
    slots: dict[str, int]


class Directory(Numbers):
    """The placements of one process. Belongs to the loop's thread; has one thread for changes, one for sweeping."""

    admitted_keys = counter("Placements that changes added.")
    evicted_keys = counter("Placements that changes removed.")
    listed_keys = counter("Placements that lists added.")
    refused_keys = counter("Placements refused because the directory is full.")
    waiting_bytes = gauge("Bytes of changes waiting for the directory.")
    promised = gauge(
        "Known promises of instances' engines; those with the same first chunk count once.",
        lambda self: self._lookups.n_promised,
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        registry: Registry,
        lookups: Lookups,
        *,
        failed: Callable[[int, str], None],
    ) -> None:
        """`failed(group, reason)` is called after a change failed: the group's placements are inexact then."""
        self._loop = loop
        self._failed = failed
        self._lookups = lookups
        self.registry = registry
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-directory", initializer=_yield_to_loop)
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="kv-sweep", initializer=_yield_to_loop)
        self._pending = 0
        self._retired = asyncio.Event()

    # --- state ----------------------------------------------------------------------------------------------

    def usage(self) -> RegistryUsage:
        """Usage of the whole registry."""
        return self.registry.usage()

    @property
    def busy(self) -> bool:
        """Whether more than BUSY_BYTES of changes wait, so that followers must wait too."""
        return self.waiting_bytes > BUSY_BYTES

    # --- changes --------------------------------------------------------------------------------------------

    def apply(self, group: int, tiers: list[str], runs: list[Run], *, shared: bool = False) -> None:
        """Apply changes to these tiers, ignoring others. Raises SlotsExhausted; then some may be applied.

        A chunk that one group no longer finds in a shared medium is removed for all groups of that medium; `shared`:
        these changes are such removals.
        """
        work: list[tuple[Change, int, bytes]] = []
        for run in runs:
            if run.tier not in tiers:
                continue
            if run.change is not Change.ADMIT and not shared:
                for other in self._lookups.sharers(group, run.tier):
                    self.apply(
                        other.group, [other.tier], [Run(run.change, other.tier, run.tags)], shared=True
                    )
            if run.change is Change.CLEAR:
                self._clear(group, run.tier)
                continue
            slot = self._lookups.slot(group, run.tier)
            if slot is None:
                slot = self._open(group)
                self.registry.publish(slot)
                self._lookups.name(slot, group, run.tier)
            work.append((run.change, slot, run.tags))
        if not work:
            return
        n_bytes = sum(len(tags) for _, _, tags in work)
        if not self._pending and n_bytes <= INLINE_TAGS * TAG_BYTES:
            self._worked(group, self._work(work))
        else:
            self._submit(n_bytes, lambda: self._work(work), lambda outcome: self._worked(group, outcome))

    def begin(self, group: int, tiers: Iterable[str]) -> Fill:
        """Open slots that no lookup finds yet, for a list. Raises SlotsExhausted."""
        fill = Fill(group, {})
        try:
            for tier in tiers:
                fill.slots[tier] = self._open(group)
        except SlotsExhausted:
            self.abandon(fill)
            raise
        return fill

    def fill(self, fill: Fill, tier: str, tags: bytes) -> asyncio.Future[str]:
        """Add a page of a list. The awaited result is the reason of a failure, empty for none."""
        slot = fill.slots[tier]

        def done(wrong: str) -> None:
            if not wrong:
                self.listed_keys += len(tags) // TAG_BYTES

        return self._submit(len(tags), lambda: self._work([(Change.ADMIT, slot, tags)])[3], done)

    def publish(self, fill: Fill) -> asyncio.Future[str]:
        """Make lookups find the slots of a list. The awaited result is the reason of a failure, empty for none."""
        old = {tier: self._lookups.slot(fill.group, tier) for tier in fill.slots}
        for tier, slot in fill.slots.items():
            self._lookups.name(slot, fill.group, tier)

        def work() -> str:
            try:
                for tier, slot in fill.slots.items():
                    self.registry.publish(slot, retire=old[tier])
            except RegistryError as error:
                return error.reason
            return ""

        return self._submit(0, work, lambda _: self._retired.set())

    def abandon(self, fill: Fill) -> None:
        """Retire the slots of a list that failed."""
        for slot in fill.slots.values():
            self._retire(slot)
        fill.slots.clear()

    def forget(self, group: int) -> None:
        """Drop all placements of a group; no lookup finds one of them from now on."""
        self._lookups.set_readable(group, False)
        self._lookups.set_shared(group, {})
        self.forget_tiers_but(group, ())

    def forget_tiers_but(self, group: int, tiers: Collection[str]) -> None:
        """Drop the placements of a group in tiers other than these; the group no longer has those tiers."""
        for tier in self._lookups.tiers(group):
            if tier not in tiers:
                self._retire(self._lookups.unname(group, tier))

    def open_left_out(self) -> int:
        """Open a slot for all placements of a snapshot that belong to none of its members. Raises SlotsExhausted.

        Call it before `restore_slots`, since the members may need all other slots.
        """
        return self._open(0)

    def restore_slots(self, group: int, tiers: Iterable[str]) -> dict[str, int]:
        """Open slots for a group of a snapshot, which `restore` fills. Raises SlotsExhausted."""
        fill = self.begin(group, tiers)
        for tier, slot in fill.slots.items():
            self._lookups.name(slot, group, tier)
        return fill.slots

    def restore(
        self, load: Callable[[array[int]], Future[int]], slot_of: Mapping[int, int], left_out: int
    ) -> asyncio.Future[tuple[int, str]]:
        """Fill slots from a snapshot, by their numbers there. Lookups find them, and other changes begin, after that.

        `load` begins `Registry.restore` into the given slots.  The awaited result: the number of placements, and the
        reason of a failure, empty for none; after a failure the slots are retired.
        """
        slots = array("H", [left_out]) * 65_536
        for number, slot in slot_of.items():
            slots[number] = slot
        loading = load(slots)

        def work() -> tuple[int, str]:
            try:
                added = loading.result()
                for slot in slot_of.values():
                    self.registry.publish(slot)
            except RegistryError as error:
                return 0, str(error)
            finally:
                self.registry.retire(left_out)
            return added, ""

        def done(outcome: tuple[int, str]) -> None:
            places = self._lookups.places()
            for slot in slot_of.values() if outcome[1] else ():
                if slot in places:
                    self._retire(self._lookups.unname(*places[slot]))
            if (rest := self.registry.slot(left_out)) is not None and rest.keys:
                self._retired.set()

        return self._submit(0, work, done)

    async def keep_swept(self) -> None:
        """Free retired slots, until cancelled."""
        while True:
            await self._retired.wait()
            self._retired.clear()
            while self.registry.usage().retired:
                step = self._loop.run_in_executor(self._sweeper, self.registry.sweep, SWEEP_CELLS)
                await asyncio.shield(step)

    async def idle(self) -> None:
        """Wait until every change decided so far has been carried out."""
        await self._submit(0, lambda: "")

    def close(self) -> None:
        """End the threads: wait for the running change, drop waiting ones."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._sweeper.shutdown(wait=True, cancel_futures=True)

    # --- inside ---------------------------------------------------------------------------------------------

    def _open(self, group: int) -> int:
        if (slot := self.registry.open_slot(group)) is None:
            raise SlotsExhausted
        return slot

    def _retire(self, slot: int) -> None:
        """Retire a slot, in the order of the changes."""
        if self._pending:
            self._submit(0, lambda: self.registry.retire(slot), lambda _: self._retired.set())
        else:
            self.registry.retire(slot)
            self._retired.set()

    def _clear(self, group: int, tier: str) -> None:
        """Empty a tier: give it a new slot, and retire the old one, in the order of the changes."""
        if self._lookups.slot(group, tier) is None:
            return
        fill = self.begin(group, [tier])

        def done(future: asyncio.Future[str]) -> None:
            if not future.cancelled() and future.exception() is None and (wrong := future.result()):
                self._failed(group, wrong)

        self.publish(fill).add_done_callback(done)

    def _work(self, work: list[tuple[Change, int, bytes]]) -> tuple[int, int, int, str]:
        """Change placements; returns (admitted, evicted, refused, reason of a failure). Runs on any thread."""
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
                if error.reason != "bad_slot":  # a slot that was retired meanwhile needs no changes
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
        """Queue a change. `done` is called on the loop, before a caller that awaits the change continues."""
        self._pending += 1
        self.waiting_bytes += n_bytes
        future = self._loop.run_in_executor(self._writer, work)

        def ended(future: asyncio.Future[Any]) -> None:
            self._pending -= 1
            self.waiting_bytes -= n_bytes
            if done is not None and not future.cancelled() and future.exception() is None:
                done(future.result())

        future.add_done_callback(ended)
        return future
