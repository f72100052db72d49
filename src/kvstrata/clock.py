"""Injected time: code that makes decisions takes a Clock, and tests pass a clock of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for deadlines, wall-clock milliseconds for records."""

    def monotonic_s(self) -> float:
        """Seconds that never go back; only differences between them mean anything."""
        ...

    def unix_ms(self) -> int:
        """Milliseconds since 1970; they may jump in both directions."""
        ...


class SystemClock:
    """The machine's clocks."""

    monotonic_s = staticmethod(time.monotonic)
    """CLOCK_MONOTONIC."""

    def unix_ms(self) -> int:
        """CLOCK_REALTIME in milliseconds."""
        return time.time_ns() // 1_000_000
