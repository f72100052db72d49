"""Bounds how many fetches load from one tier at a time, and how many bytes they load; first come, first served.

A fetch enters the gate before it reserves room in L1, so that no fetch waits while it holds a reservation.  A fetch
past its deadline gives up its place to any other fetch.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvstrata.observability.numbers import Numbers, gauge
from kvstrata.tiers.tier import Tier

MAX_WAITING = 1024
"""Fetches that may wait at one gate; more are refused."""
TIER_PATIENCE_S = 0.5


class PrefetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one instance's loads."""

    in_flight_bytes: int
    """Bytes that one tier may be loading at a time; a single batch may exceed it."""
    max_in_flight: int = 8
    """Fetches that load from one tier at a time."""
    batch_bytes: int = 64 << 20
    """Maximum number of bytes of a batch; never more than half of `in_flight_bytes`."""
    patience_share: float = 0.25
    """Share of the remaining time that a tier gets to answer `exists` if other tiers come after it."""
    patience_s: float = TIER_PATIENCE_S
    """Longest time that `patience_share` may give."""


class Waiter(Protocol):
    """A fetch, as a gate sees it."""

    expired: bool
    """The caller does not wait for the answer any more."""
    abandoned: bool
    """The caller does not want the chunks any more either."""


class Gate(Numbers):
    """The gate of one tier. Belongs to the event loop."""

    loading_bytes = gauge("Bytes being loaded from this adapter.")
    waiting = gauge(
        "Fetches that wait for their turn on this adapter.",
        lambda gate: len(gate._waiters),
        name="waiting_fetches",
    )

    def __init__(self, slots: int, limit_bytes: int) -> None:
        self._slots = slots
        self._limit_bytes = limit_bytes
        self._inside: set[Waiter] = set()
        self._waiters: collections.deque[tuple[Waiter, int, asyncio.Future[bool]]] = collections.deque()

    async def enter(self, fetch: Waiter, need_bytes: int) -> bool:
        """Wait for a place. False if the fetch's time is over first or too many fetches wait."""
        if not fetch.expired:
            self._give_up(lambda waiter: waiter.expired)
        if not self._waiters and self._try(fetch, need_bytes):
            return True
        if len(self._waiters) >= MAX_WAITING or (fetch.expired and self._waiters):
            return False
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append((fetch, need_bytes, place))
        return await place

    def expire(self, fetch: Waiter) -> None:
        """Free the slot of a fetch whose caller has gone, and its place in the queue if others wait there."""
        if fetch.abandoned or any(not waiter.expired for waiter, _, _ in self._waiters):
            self._give_up(lambda waiter: waiter is fetch)
        self.leave(fetch)

    def leave(self, fetch: Waiter) -> None:
        """Free the fetch's slot."""
        self._inside.discard(fetch)
        self._admit()

    def ended(self, freed_bytes: int) -> None:
        """Free the bytes of a batch that was loaded or failed."""
        self.loading_bytes -= freed_bytes
        self._admit()

    def _try(self, fetch: Waiter, need_bytes: int) -> bool:
        if fetch not in self._inside and len(self._inside) >= self._slots:
            return False
        if self.loading_bytes and self.loading_bytes + need_bytes > self._limit_bytes:
            return False
        if not fetch.expired:
            self._inside.add(fetch)
        self.loading_bytes += need_bytes
        return True

    def _give_up(self, which: Callable[[Waiter], bool]) -> None:
        for waiter, _, place in self._waiters:
            if which(waiter) and not place.done():
                place.set_result(False)
        self._waiters = collections.deque(entry for entry in self._waiters if not entry[2].done())

    def _admit(self) -> None:
        while self._waiters:
            fetch, need_bytes, place = self._waiters[0]
            if not place.done():
                if not self._try(fetch, need_bytes):
                    return
                place.set_result(True)
            self._waiters.popleft()


class Loader:
    """One tier as fetches use it."""

    def __init__(self, tier: Tier, gate: Gate) -> None:
        self.tier = tier
        self.name = tier.name
        self.gate = gate
