"""Seeded fault plans: which operation goes wrong, and how. This module only decides; faulty_adapter.py acts."""

from __future__ import annotations

import enum
import random
from collections.abc import Collection


class Fault(enum.StrEnum):
    """One way in which an adapter operation goes wrong."""

    ERROR = "error"
    """Nothing is done, and the answer for every item is FAILED (exists: UNKNOWN)."""
    RAISE = "raise"
    """The adapter breaks its contract and raises."""
    LOST_ACK = "lost_ack"
    """The operation is done, but its answer is that of ERROR."""
    SLOW = "slow"
    """The operation is done after a pause of `FaultPlan.slow_s`."""
    HANG = "hang"
    """The operation does not begin before `FaultyAdapter.release` or `close`; the items' holds stay until then."""
    TORN = "torn"
    """A put stores one record with zeros in place of its last part."""
    FLIPPED = "flipped"
    """A put stores one record with one inverted bit."""
    THROTTLED = "throttled"
    """Nothing is done. The answer to a put is THROTTLED; other operations get that of ERROR."""


class FaultPlan:
    """Draws a fault for each operation; the same seed and order of operations give the same faults.

    `rate` is the share of operations that go wrong, 0 to 1; `only` are the faults that are drawn. Not thread-safe.
    """

    def __init__(
        self, seed: int, rate: float = 0.0, only: Collection[Fault] = tuple(Fault), slow_s: float = 0.05
    ) -> None:
        self.seed = seed
        self.rate = rate
        self.only = tuple(fault for fault in Fault if fault in only)
        self.slow_s = slow_s
        self._random = random.Random(seed)
        self._next: list[Fault] = []

    def schedule(self, *faults: Fault) -> None:
        """Give exactly these faults to the next operations, one each; operations after them get drawn faults again."""
        self._next.extend(faults)

    def draw(self) -> Fault | None:
        """Return the fault of the next operation; None: it does not go wrong."""
        if self._next:
            return self._next.pop(0)
        if not self.only or self._random.random() >= self.rate:
            return None
        return self._random.choice(self.only)

    def below(self, limit: int) -> int:
        """Return a number in [0, limit), to choose the item, byte or bit that is hit."""
        return self._random.randrange(limit)

    def __repr__(self) -> str:
        return f"FaultPlan(seed={self.seed}, rate={self.rate}, only={[str(f) for f in self.only]})"
