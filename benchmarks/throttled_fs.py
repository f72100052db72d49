"""The `fs` adapter on a medium with a limited rate; loaded as `{"type": "plugin", ...}`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from kvstrata.tiers.base import Item
from kvstrata.tiers.media.fs import FsAdapter


class ThrottledFs(FsAdapter):
    """An `fs` adapter that delays puts to a rate of `mb_per_s` and keeps their holds meanwhile, like a slow network."""

    def __init__(self, base_path: str, mb_per_s: float, capacity_gb: float) -> None:
        super().__init__(base_path=base_path, capacity_bytes=int(capacity_gb * (1 << 30)))
        self._bytes_per_s = mb_per_s * 1e6
        self._free_s = 0.0
        """Time at which the medium has taken all bytes put so far."""

    async def put(self, items: Sequence[Item]) -> None:
        """Put as `fs` does, when the medium's rate allows it."""
        size = sum(item.hold.length for item in items)
        self._free_s = max(self._free_s, time.monotonic()) + size / self._bytes_per_s
        await asyncio.sleep(self._free_s - time.monotonic())
        await super().put(items)
