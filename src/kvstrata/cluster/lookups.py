"""Lookups in the registry: the names of its slots (a slot is one tier of one group), and which L1s peers may read.

1. No lookup finds a slot without a name, even if the registry still holds placements of it.
2. Lookups never wait for changes.  More than `INLINE_TAGS` tags are looked up on a thread, with the names and the mask
   of readable slots as they were when the lookup was called.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from typing_extensions import Buffer

from kvstrata.keys.spans import longest, of_slices
from kvstrata.naming import name_thread
from kvstrata.native.core import Registry
from kvstrata.rpc.cluster_wire import PROMISED_TIER, TAG_BYTES, tags_of

T = TypeVar("T")
INLINE_TAGS = 512
"""Most tags that the loop itself looks up, or changes while no change waits; they take about 50 µs."""
MASK_BYTES = 8_192
MAX_HOLDERS = 64
"""Groups that `held` names in each way: those that have most."""
SPAN_CANDIDATES = 64
"""Groups whose windows and states are looked at for one prompt."""


class Place(NamedTuple):
    """A tier of a group, for which a slot stands."""

    group: int
    tier: str


class Held(NamedTuple):
    """How many leading chunks of a prompt one group has."""

    in_l1: int = 0
    anywhere: int = 0
    """In L1 and its L2 tiers together."""
    shared: int = 0
    """In its tiers whose media others share."""


class Found(NamedTuple):
    """One group that holds a prefix of the chunks."""

    group: int
    n_chunks: int


class Lookups:
    """Lookups of one process. Belongs to the loop's thread, and has two threads for long lookups."""

    def __init__(self, loop: asyncio.AbstractEventLoop, registry: Registry) -> None:
        self._loop = loop
        self._registry = registry
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="kv-lookup", initializer=name_thread)
        self._slots: dict[Place, int] = {}
        self._places: dict[int, Place] = {}
        self._promisers: dict[int, Place] = {}
        """Slots of what engines compute, which are in no other table and mask but `_slots` and `_promised`."""
        self._readable = bytearray(MASK_BYTES)
        self._named = bytearray(MASK_BYTES)
        self._l1 = bytearray(MASK_BYTES)
        self._shared = bytearray(MASK_BYTES)
        self._given = bytearray(MASK_BYTES)
        """Tiers that belong to readable groups alone, L1 included."""
        self._promised = bytearray(MASK_BYTES)
        """Slots of the chunks that engines of readable groups are computing."""
        self._media: dict[int, Mapping[str, str]] = {}
        """By group: the names of the media of its shared tiers."""
        self._readable_groups: set[int] = set()

    # --- names ----------------------------------------------------------------------------------------------

    def slot(self, group: int, tier: str) -> int | None:
        """The slot that stands for a tier of a group."""
        return self._slots.get(Place(group, tier))

    def tiers(self, group: int) -> list[str]:
        """The tiers of a group that have a slot."""
        return [place.tier for place in self._slots if place.group == group]

    def name(self, slot: int, group: int, tier: str) -> None:
        """Let a slot stand for a tier from now on, in place of the tier's previous slot."""
        place = Place(group, tier)
        before = self._slots.get(place)
        if before is not None:
            self._unmark(before)
        self._slots[place] = slot
        (self._promisers if tier == PROMISED_TIER else self._places)[slot] = place
        self._mark(slot, place)

    def unname(self, group: int, tier: str) -> int:
        """Take the name off the slot of a tier; returns the slot."""
        slot = self._slots.pop(Place(group, tier))
        self._unmark(slot)
        return slot

    def places(self) -> dict[int, Place]:
        """The names of all slots of tiers that hold chunks."""
        return dict(self._places)

    def set_readable(self, group: int, readable: bool) -> None:
        """Set whether peers may be sent to this group's L1."""
        (self._readable_groups.add if readable else self._readable_groups.discard)(group)
        self._mark_all(group)

    def set_shared(self, group: int, media: Mapping[str, str]) -> None:
        """Set which tiers of a group have media that other groups share, by a word for each; none if it has gone."""
        self._media.pop(group, None)
        if media:
            self._media[group] = dict(media)
        self._mark_all(group)

    def sharers(self, group: int, tier: str) -> list[Place]:
        """The known tiers of other groups that share the medium of this one."""
        medium = self._media.get(group, {}).get(tier)
        if medium is None:
            return []
        found = [
            Place(other, its)
            for other, media in self._media.items()
            if other != group
            for its, word in media.items()
            if word == medium
        ]
        return [place for place in found if place in self._slots]

    def _mark_all(self, group: int) -> None:
        for place, slot in self._slots.items():
            if place.group == group:
                self._mark(slot, place)

    def _mark(self, slot: int, place: Place) -> None:
        """Set the slot's bits as its place says."""
        group, tier = place
        readable, shared = group in self._readable_groups, tier in self._media.get(group, ())
        promised, l1 = tier == PROMISED_TIER, tier == "l1"
        _set(self._named, slot, not promised)
        _set(self._l1, slot, l1)
        _set(self._shared, slot, shared)
        _set(self._readable, slot, l1 and readable)
        _set(self._given, slot, readable and not shared and not promised)
        _set(self._promised, slot, promised and readable)

    def _unmark(self, slot: int) -> None:
        self._places.pop(slot, None)
        self._promisers.pop(slot, None)
        for mask in (self._readable, self._named, self._l1, self._shared, self._given, self._promised):
            _set(mask, slot, False)

    # --- lookups --------------------------------------------------------------------------------------------

    def keys(self) -> dict[Place, int]:
        """Number of placements by group and tier, without slots that a list still fills and retired ones."""
        return {
            place: found.keys
            for place, slot in self._slots.items()
            if slot in self._places and (found := self._registry.slot(slot)) is not None
        }

    @property
    def n_promised(self) -> int:
        """Number of the promises of instances' engines, those that begin with the same chunk counted once."""
        found = map(self._registry.slot, self._promisers)
        return sum(one.keys for one in found if one is not None)

    async def longest(
        self, tags: bytes, n_slices: int, except_group: int | None, best: int, *, on_disks: bool = False
    ) -> list[Found]:
        """At most `best` readable groups with the longest prefixes in L1 or all tiers of their own, longest first."""
        work = functools.partial(self._longest, tags, n_slices, except_group, best)
        return await self._look(tags, work, self._given if on_disks else self._readable)

    def _longest(
        self, tags: bytes, n_slices: int, except_group: int | None, best: int, allowed: Buffer
    ) -> list[Found]:
        found = self._registry.lookup_prefix(
            tags, n_slices=n_slices, allowed=allowed, except_group=except_group, best=best
        )
        return [Found(*one) for one in found]

    async def held(self, tags: bytes, n_slices: int) -> dict[int, Held]:
        """By group: its leading chunks of a prompt; for each kind of place, the MAX_HOLDERS groups with the most."""
        work = functools.partial(self._held, tags, n_slices)
        return await self._look(tags, work, self._l1, self._named, self._shared)

    def _held(self, tags: bytes, n_slices: int, l1: Buffer, named: Buffer, shared: Buffer) -> dict[int, Held]:
        found: dict[int, Held] = {}
        look = functools.partial(self._registry.lookup_prefix, tags, n_slices=n_slices, best=MAX_HOLDERS)
        for group, n in look(allowed=named):
            found[group] = Held(anywhere=n)
        for group, n in look(allowed=l1):
            found[group] = Held(n, max(n, found.get(group, Held()).anywhere))
        for group, n in look(allowed=shared) if self._media else ():
            found[group] = found.get(group, Held(anywhere=n))._replace(shared=n)
        return found

    async def _look(self, tags: bytes, work: Callable[..., T], *masks: bytearray) -> T:
        """`work(*masks)`: of few tags at once; of more on a thread, with the masks as they are now."""
        if len(tags) <= INLINE_TAGS * TAG_BYTES:
            return work(*masks)
        return await self._loop.run_in_executor(self._readers, work, *map(bytes, masks))

    async def hits(
        self, keys: bytes, spans: Sequence[int], except_group: int | None, best: int
    ) -> list[Found]:
        """As `longest`, of the hits that each group could serve with its windows and states in L1 too.

        `keys` are storage keys, `spans` as in keys/spans.py.  Only the SPAN_CANDIDATES groups with the longest prefixes
        in the slices without a span are looked at.
        """
        if not any(spans):
            return await self.longest(tags_of(keys), len(spans) or 1, except_group, best)
        allowed, places = bytes(self._readable), dict(self._places)
        work = functools.partial(self._hits, keys, spans, except_group, allowed, places)
        found = await self._loop.run_in_executor(self._readers, work)
        return heapq.nlargest(best, found, key=lambda one: one.n_chunks)

    def _hits(
        self,
        keys: bytes,
        spans: Sequence[int],
        except_group: int | None,
        allowed: bytes,
        places: Mapping[int, Place],
    ) -> list[Found]:
        n_slices = len(spans)
        whole = [number for number, span in enumerate(spans) if not span]
        windows = [number for number, span in enumerate(spans) if span]
        rows = self._registry.holders(tags_of(of_slices(keys, n_slices, windows)))
        at = [
            {places[slot].group for slot in row if slot in places and allowed[slot >> 3] >> (slot & 7) & 1}
            for row in rows
        ]
        if whole:
            tags = tags_of(of_slices(keys, n_slices, whole))
            prefixes = self._longest(tags, len(whole), except_group, SPAN_CANDIDATES, allowed)
        else:
            n_chunks = len(rows) // len(windows)
            prefixes = [Found(group, n_chunks) for group in set().union(*at) if group != except_group]
        place_of = {number: place for place, number in enumerate(windows)}

        def hit(group: int, n_chunks: int) -> int:
            def there(chunk: int, number: int) -> bool:
                return group in at[chunk * len(windows) + place_of[number]]

            return longest(n_chunks, spans, there)

        found = [Found(group, hit(group, n_chunks)) for group, n_chunks in prefixes]
        return [one for one in found if one.n_chunks]

    async def nearest(
        self, tags: bytes, except_group: int | None, best: int, *, promised: bool = False
    ) -> list[Found]:
        """At most `best` readable groups with the earliest of these tags in L1, or `promised`; the earliest first.

        `n_chunks` of each counts from its first tag to the end.
        """
        allowed = bytes(self._promised if promised else self._readable)
        places = self._promisers if promised else self._places
        rows = await self._loop.run_in_executor(self._readers, self._registry.holders, tags)
        first = {slot: at for at in reversed(range(len(rows))) for slot in rows[at]}
        found = [
            Found(place.group, len(rows) - at)
            for slot, at in first.items()
            if (place := places.get(slot)) is not None
            and place.group != except_group
            and allowed[slot >> 3] >> (slot & 7) & 1
        ]
        return heapq.nlargest(best, found, key=lambda one: one.n_chunks)

    async def holders(self, tags: bytes) -> list[list[Place]]:
        """The places that have each tag, in the order of the tags."""
        places = dict(self._places)
        slots = await self._loop.run_in_executor(self._readers, self._registry.holders, tags)
        return [[places[slot] for slot in row if slot in places] for row in slots]

    def close(self) -> None:
        """End the threads: wait for the running lookups, drop waiting ones."""
        self._readers.shutdown(wait=True, cancel_futures=True)


def _set(mask: bytearray, slot: int, on: bool) -> None:
    if on:
        mask[slot >> 3] |= 1 << (slot & 7)
    else:
        mask[slot >> 3] &= ~(1 << (slot & 7))
