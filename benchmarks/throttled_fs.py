"""The `fs` adapter on a medium that takes so many bytes a second and no more; loaded as `{"type": "plugin", ...}`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from kvstrata.storage.base import PutItem, PutOutcome
from kvstrata.storage.media.fs.adapter import FsAdapter, FsSettings


class ThrottledFs(FsAdapter):
    """Puts wait for their turn at `mb_per_s` with their holds kept, as at a slow network's end."""

    def __init__(self, base_path: str, mb_per_s: float, capacity_gb: float) -> None:
        super().__init__(FsSettings(base_path=base_path, capacity_bytes=int(capacity_gb * (1 << 30))))
        self._bytes_per_s = mb_per_s * 1e6
        self._free_s = 0.0
        """When the bytes taken so far have gone through."""

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As `fs`, but not sooner than the medium's speed allows."""
        size = sum(item.hold.length for item in items)
        self._free_s = max(self._free_s, time.monotonic()) + size / self._bytes_per_s
        await asyncio.sleep(self._free_s - time.monotonic())
        return await super().put(items)
