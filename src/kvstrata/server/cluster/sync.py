"""Full sync: the instance tells one controller all chunks that the instance holds.

    SyncBegin(S) ─▶ parts: all that is READY in L1, then each L2 tier ─▶ SyncEnd ─▶ events from S + 1 on

1. A full sync reads L1 in slices while chunks come and go.  The events that arose since its start are sent after
   the parts, so the controller ends with the last state of each chunk.
2. If events overflow during a full sync, the next one *freezes* stores: reserves are refused with `frozen` until that
   full sync ends, for at most FREEZE_S, and only while the controller answers heartbeats.
3. A full sync that fails is tried again.  A tier that could not be listed is asked again until it can be; then another
   full sync follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from kvstrata.errors import BadSync, ClusterFailure, Unavailable
from kvstrata.native.core import crc32c
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.rpc.cluster_wire import TAG_BYTES, Done, SyncBegin, SyncEnd, SyncPart
from kvstrata.rpc.zmq_link import AskLink
from kvstrata.server.cluster.events import L1_TIER, TierNews
from kvstrata.server.cluster.told_tiers import NotListed, ToldTiers

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

ANSWER_S = 5.0
"""Timeout of a registration, and of each step of a full sync."""
AGAIN_S = 0.2
"""Pause between a failed full sync and the next one."""
SCAN_ENTRIES = 8_192
"""Entries of the index that are read in one turn of the loop (about 0.1 ms)."""
PART_TAGS = 65_536
PARTS_OPEN = 4
PART_ATTEMPTS = 20
FREEZE_S = 5.0
LIST_AGAIN_S, LIST_AGAIN_MAX_S = 1.0, 60.0
"""Wait before a tier that could not be listed is asked again, doubling."""


class FullSync(Numbers):
    """The full syncs of one link. Belongs to the event loop."""

    frozen = gauge(
        "1 while stores are refused during a full sync, else 0.", lambda self: self._unfreeze is not None
    )
    syncs = counter("Full syncs that succeeded.")
    syncs_failed = counter("Full syncs that failed.", name="failed_syncs")
    freezes = counter("Full syncs during which stores were refused.")
    freezes_cut = counter(
        "Freezes ended early because heartbeats were no longer answered.", name="cut_freezes"
    )
    overflows = counter("How often more changes piled up than could be kept for the controller.")

    def __init__(self, reply: AskLink, url: str, parts: Parts, news: TierNews, told: ToldTiers) -> None:
        """`url`: of the controller, the name under which it freezes stores."""
        self._reply, self._url, self._news, self._told = reply, url, news, told
        self._me = parts.facts.instance_id, parts.facts.epoch
        self._pool, self._frozen_by, self._supervisor = parts.pool, parts.frozen_by, parts.supervisor
        self._seconds = parts.counters.sync
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._unlisted: list[str] = []
        """Tiers that can list their keys but did not in the last full sync."""
        self._listing_again: asyncio.Task[None] | None = None
        self._freeze_next_s = 0.0
        self._unfreeze: asyncio.TimerHandle | None = None
        self._synced = asyncio.Event()
        self._log = EventLog("cluster")

    @property
    def running(self) -> bool:
        """Whether a full sync is under way, including the pause after a failed one."""
        return self._task is not None and not self._task.done()

    def begin_if_wanted(self) -> None:
        """Begin a full sync if one is wanted and none is under way."""
        if self._news.sync_wanted and not self.running:
            self._task = self._supervisor.spawn(self._sync(), "cluster-sync")

    def note_overflow(self) -> None:
        """Want a full sync if events were dropped."""
        if self._news.overflowed and not self.running:
            self.overflows += 1
            self._news.want_sync("overflow")

    async def resync(self, freeze_ms: int) -> None:
        """Carry out a RESYNC: a full sync that freezes stores for `freeze_ms` at most.

        Returns when a full sync has succeeded.  A cancelled call leaves the full sync wanted.
        """
        self._freeze_next_s = max(self._freeze_next_s, min(freeze_ms / 1000, FREEZE_S))
        self._news.want_sync("asked")
        self._synced.clear()
        await self._synced.wait()

    def unanswered(self) -> None:
        """Thaw stores, because the controller does not answer a heartbeat."""
        self.freezes_cut += self.frozen
        self.thaw()

    def thaw(self) -> None:
        """Let stores be taken again. Idempotent."""
        if self._unfreeze is not None:
            self._unfreeze.cancel()
            self._unfreeze = None
        self._frozen_by.discard(self._url)

    def cancel(self) -> None:
        """Cancel the tasks; the supervisor waits for them."""
        for task in (self._task, self._listing_again):
            if task is not None:
                task.cancel()

    # --- one attempt ---------------------------------------------------------------------------------------

    async def _sync(self) -> None:
        if self._listing_again is not None:
            self._listing_again.cancel()
            await asyncio.gather(self._listing_again, return_exceptions=True)
            self._listing_again = None
        news = self._news
        news.begin_telling()
        if self._freeze_next_s:
            self._freeze(self._freeze_next_s)
            self._freeze_next_s = 0.0
        self._number += 1
        begun_s = self._loop.time()
        try:
            await self._tell_everything(self._number)
        except (Unavailable, ClusterFailure) as error:
            self.syncs_failed += 1
            news.telling = False
            self._log.warning("sync_failed", reason=str(error))
            await asyncio.sleep(AGAIN_S)
            news.want_sync("failed")
            return
        finally:
            self._seconds.add(self._loop.time() - begun_s)
            self.thaw()
        if news.overflowed:
            self.overflows += 1
            self._freeze_next_s = FREEZE_S
            news.want_sync("overflow")
            return
        self.syncs += 1
        self._synced.set()
        news.wake.set()
        if self._unlisted:
            self._log.info("tiers_not_listed", tiers=self._unlisted)
            self._listing_again = self._supervisor.job(self._list_again(), "cluster-listing")

    async def _list_again(self) -> None:
        """Want another full sync once one of the tiers that were left out can be listed."""
        again_s = LIST_AGAIN_S
        while True:
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, LIST_AGAIN_MAX_S)
            if any([await self._told.can_list(tier) for tier in self._unlisted]):
                self._news.want_sync("listed")
                return

    async def _tell_everything(self, number: int) -> None:
        me = (*self._me, number)
        tiers = self._news.tiers  # a registration may name others meanwhile, and then another sync follows
        counts = dict.fromkeys(tiers, 0)
        open_parts: set[asyncio.Task[None]] = set()
        n_parts = 0
        await self._reply.ask(SyncBegin(0, *me, self._news.seq), Done, ANSWER_S)
        try:
            async for tier, tags in self._everything(tiers):
                if len(open_parts) >= PARTS_OPEN:
                    done, open_parts = await asyncio.wait(open_parts, return_when=asyncio.FIRST_COMPLETED)
                    for part in done:
                        part.result()
                request = SyncPart(0, *me, n_parts, tier, tags, crc32c(tags))
                open_parts.add(asyncio.create_task(self._part(request), name="cluster-sync-part"))
                n_parts += 1
                counts[tier] += len(tags) // TAG_BYTES
            await asyncio.gather(*open_parts)
        finally:
            for part in open_parts:
                part.cancel()
            await asyncio.gather(*open_parts, return_exceptions=True)
        await self._reply.ask(SyncEnd(0, *me, n_parts, counts), Done, ANSWER_S)

    async def _everything(self, tiers: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """All tags that the instance holds in these tiers, in parts: (tier, tags)."""
        collected = bytearray()
        entry = 0
        while True:
            tags, entry = self._pool.ready_tags(entry, SCAN_ENTRIES)
            collected += tags
            if len(collected) >= PART_TAGS * TAG_BYTES:
                yield L1_TIER, bytes(collected)
                collected.clear()
            await asyncio.sleep(0)
            if not entry:
                break
        if collected:
            yield L1_TIER, bytes(collected)
        self._unlisted.clear()
        for tier in tiers[1:]:
            if not self._told.lists(tier):
                tags = self._news.tags.of(tier)
                for at in range(0, len(tags), PART_TAGS * TAG_BYTES):
                    yield tier, tags[at : at + PART_TAGS * TAG_BYTES]
                continue
            try:
                async for part in self._told.parts(tier, PART_TAGS):
                    yield tier, part
            except NotListed:
                self._unlisted.append(tier)

    async def _part(self, part: SyncPart) -> None:
        """Send a part until the controller takes it. A repeat changes nothing. Raises Unavailable or ClusterFailure."""
        for attempt in range(PART_ATTEMPTS):
            try:
                await self._reply.ask(part, Done, ANSWER_S)
            except ClusterFailure as refused:
                if not refused.retryable or refused.code == BadSync.code or attempt == PART_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(max(AGAIN_S, min(refused.retry_after_ms / 1000, ANSWER_S)))
            else:
                return

    def _freeze(self, seconds: float) -> None:
        self.thaw()
        self._frozen_by.add(self._url)
        self.freezes += 1
        self._unfreeze = self._loop.call_later(seconds, self.thaw)
        self._log.info("frozen", at_most_s=seconds)
