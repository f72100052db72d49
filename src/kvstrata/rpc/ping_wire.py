"""What a process tells of itself with its pings (wire.py)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_LATENCY_US = 3_600_000_000
MAX_BYTES_S = 1 << 50
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
MAX_SHORT_TEXT = 512
ShortText = Annotated[str, Meta(max_length=MAX_SHORT_TEXT)]


class DeviceCopies(msgspec.Struct, array_like=True, frozen=True):
    """How a process whose blocks are on a device copies between them and L1; a list."""

    engine: Annotated[str, Meta(max_length=32)]
    """The way of copying: `dma` or `kernel`."""
    pinned_bytes: Count
    """Bytes of L1 that are registered with the device's driver."""
    pin_refusal: ShortText
    """The driver's reason for refusing to register more bytes; empty if it refused none."""


class LoadRate(msgspec.Struct, array_like=True, frozen=True):
    """How fast a process copies its slice of chunks from L1 into its blocks: latency, and rate beyond it; a list."""

    latency_us: Annotated[int, Meta(ge=0, le=MAX_LATENCY_US)]
    bytes_s: Annotated[int, Meta(ge=1, le=MAX_BYTES_S)]

    @classmethod
    def of(cls, latency_s: float, bytes_s: float) -> LoadRate:
        """The rate with these numbers, cut to the limits of the fields."""
        return cls(min(MAX_LATENCY_US, round(latency_s * 1e6)), max(1, min(MAX_BYTES_S, round(bytes_s))))

    def differs(self, other: LoadRate) -> bool:
        """Whether a number is more than a tenth of the other's away from it; latencies at least 100 µs."""
        latency_us = abs(self.latency_us - other.latency_us)
        rate = abs(self.bytes_s - other.bytes_s)
        return latency_us > max(100, other.latency_us // 10) or rate > other.bytes_s // 10
