"""Seeded fault plans: which operation goes wrong, and how. Decides only; `storage.wrap.faults` acts."""

from __future__ import annotations

import enum
import random
from collections.abc import Collection


class Fault(enum.StrEnum):
    """One way in which an adapter operation goes wrong."""

    ERROR = "error"
    """Nothing is done; every item is answered FAILED (exists: UNKNOWN)."""
    RAISE = "raise"
    """The adapter breaks its contract and raises."""
    LOST_ACK = "lost_ack"
    """All is done, and answered as in ERROR."""
    SLOW = "slow"
    """Done, but later."""
    HANG = "hang"
    """Not begun before the plan is released; the items' holds stay."""
    TORN = "torn"
    """A put stores the first part of one record, and zeros instead of the rest."""
    FLIPPED = "flipped"
    """A put stores one record with one wrong bit."""
    THROTTLED = "throttled"
    """A put is answered THROTTLED; other operations as in ERROR."""


class FaultPlan:
    """Draws a fault for each operation, reproducibly: same seed and same order of operations, same faults.

    `rate` is the share of operations that go wrong; `only` restricts the faults.
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
        """The next operations get exactly these, before anything is drawn."""
        self._next.extend(faults)

    def draw(self) -> Fault | None:
        """The fault of the next operation, None for none."""
        if self._next:
            return self._next.pop(0)
        if not self.only or self._random.random() >= self.rate:
            return None
        return self._random.choice(self.only)

    def below(self, limit: int) -> int:
        """A number in 0..limit-1, for which item, byte or bit is hit."""
        return self._random.randrange(limit)

    def __repr__(self) -> str:
        return f"FaultPlan(seed={self.seed}, rate={self.rate}, only={[str(f) for f in self.only]})"
