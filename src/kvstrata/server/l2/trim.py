"""Makes room within a tenant's quota: older records of the tenant are deleted until a newer one fits.

    a put over its tenant's quota ─▶ make_room ─▶ delete the records used longest ago ─▶ `resume`: put, or skipped

A chunk that waits here holds nothing, so it may have left L1 when its turn comes.  Only records that the tenant's
ledger knows (policy/quotas.py) are counted and deleted.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence

from kvstrata.policy.quotas import TenantLedger
from kvstrata.policy.store import PutPlanner
from kvstrata.server.l2.news import News
from kvstrata.server.l2.tiers import Tier
from kvstrata.storage.base import Presence, log_broken_contract

TRIM_KEYS = 64
"""Records of a tenant deleted at a time."""
MAKING_ROOM_KEYS = 1024
"""Maximum number of chunks per tier that may wait for room."""


class Trimmer:
    """Makes room in one tier. Belongs to the event loop."""

    def __init__(
        self,
        tier: Tier,
        ledger: TenantLedger,
        planner: PutPlanner,
        news: News,
        *,
        trimmed: Callable[[str, Sequence[bytes]], None],
        resume: Callable[[bytes], None],
        idle: Callable[[], None],
    ) -> None:
        """`trimmed(tier, keys)` is called with deleted records, `resume(key)` when as much room as possible was
        made for a chunk, `idle()` when no chunk waits any more."""
        self._tier = tier
        self._ledger = ledger
        self._planner = planner
        self._news = news
        self._trimmed = trimmed
        self._resume = resume
        self._idle = idle
        self._waiting: collections.OrderedDict[bytes, tuple[int, int]] = collections.OrderedDict()
        """Key → (tenant, length) of the chunks that wait for room."""
        self._task: asyncio.Task[None] | None = None
        self.n_trimmed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def make_room(self, key: bytes, tenant: int, length_bytes: int) -> bool:
        """Begin to delete the records that the tenant used longest ago. False if that cannot make enough room."""
        if not self._tier.adapter.capabilities.can_delete or len(self._waiting) >= MAKING_ROOM_KEYS:
            return False
        if not self._ledger.to_leave(tenant, length_bytes, 1):
            return False
        self._waiting[key] = (tenant, length_bytes)
        if self._task is None:
            self._task = asyncio.create_task(self._trim(), name=f"trim-{self._tier.name}")
        return True

    def give_up(self, tenant: int | None = None) -> list[bytes]:
        """Forget all waiting chunks (of one tenant). Returns their keys."""
        waited = [key for key, (whose, _) in self._waiting.items() if tenant in (None, whose)]
        for key in waited:
            del self._waiting[key]
        return waited

    async def delete(self, keys: list[bytes]) -> set[bytes]:
        """Delete records. Returns the keys that the tier no longer has; empty if the adapter raised."""
        tier = self._tier
        try:
            await tier.adapter.delete(keys)
            found = await tier.adapter.exists(keys)
        except Exception as error:  # the plugin boundary: an adapter that raises broke its contract
            log_broken_contract(tier.name, "delete", error)
            return set()
        gone = [key for key, one in zip(keys, found, strict=True) if one.presence is Presence.ABSENT]
        self._planner.gone(gone)
        self._ledger.gone(gone)
        self._news.tier_lost(tier.name, gone)
        return set(gone)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel the deletion under way. Returns its task, for the caller to await."""
        tasks = [] if self._task is None else [self._task]
        for task in tasks:
            task.cancel()
        return tasks

    async def _trim(self) -> None:
        """Make room for each waiting chunk in turn, then let it be put, or skipped if the room does not suffice."""
        try:
            while self._waiting:
                key, (tenant, length_bytes) = next(iter(self._waiting.items()))
                while leaving := self._ledger.to_leave(tenant, length_bytes, TRIM_KEYS):
                    gone = await self.delete(leaving)
                    if not gone:
                        break
                    self.n_trimmed += len(gone)
                    self._trimmed(self._tier.name, [key for key in leaving if key in gone])
                if self._waiting.pop(key, None) is not None:  # else `give_up` has removed it
                    self._resume(key)
        finally:
            self._task = None
            self._idle()
