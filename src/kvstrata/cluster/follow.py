"""Keeps the directory in step with one instance, by polling the instance's control port.

    cursor := now ─▶ list every tier ─▶ publish ─▶ changes since the cursor ─▶ changes since then ─▶ …

1. The list is read while chunks come and go.  All changes since its start are applied after it, so the directory ends
   with the last state of each chunk.
2. If the instance no longer has the changes since the cursor (`too_old`), the follower lists again.  Meanwhile
   `confirmed` is false, and lookups find the placements from before.
3. The instance keeps no state for a follower.  If a reply is lost, the follower asks again with the same cursor;
   applying a change twice has no effect.
4. An unanswered poll is reported as silence; the owner of the follower decides what silence means.
5. At most one page of a list is under way, and LISTS followers of a process list at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from kvstrata.cluster.directory import Directory, Fill, SlotsExhausted
from kvstrata.errors import ClusterFailure, TooOld, Unavailable
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience
from kvstrata.rpc.cluster_wire import (
    MAX_CHANGES,
    MAX_WAIT_MS,
    PROMISED_TIER,
    TAG_BYTES,
    Change,
    Changed,
    Changes,
    ClusterReply,
    ClusterRequest,
    Condition,
    List,
    Listed,
)
from kvstrata.rpc.zmq_link import AskLink

ANSWER_S = 2.0
"""Time limit of an answer, beyond the time for which the instance may wait for changes."""
PAGE_S = 10.0
AGAIN_S = 0.2
"""Pause after a failure."""
LISTS = 32
MAX_PAGES = 1 << 22
"""A list with more pages counts as broken: its cursor does not advance."""
LIST_AGAIN_S, LIST_AGAIN_MAX_S = 1.0, 60.0
"""Shortest and longest pause before a tier that could not be listed is listed again; it doubles."""

R = TypeVar("R", bound=ClusterReply)


class Listener:
    """Callbacks about the progress of following; a subclass implements them."""

    def heard(self, condition: Condition | None) -> None:
        """The instance has answered; from time to time with its condition."""

    def listed(self, took_s: float) -> None:
        """The directory has all chunks that the instance held when the list began."""

    def lost(self, reason: str) -> None:
        """The directory is no longer in step with the instance, which is listed again."""


class _Lost(Exception):
    """The follower must list again."""


class Follower:
    """Follows one run of an instance's process, for one group of the directory. Belongs to the event loop."""

    def __init__(
        self,
        link: AskLink,
        directory: Directory,
        group: int,
        listener: Listener,
        lists: asyncio.Semaphore,
        *,
        incarnation: int,
        tiers: Sequence[str],
        promises: bool = False,
        beat_s: float,
        cursor: int | None = None,
    ) -> None:
        """`lists` bounds the lists of all followers.  `promises`: follow what the instance's engines compute, too.
        `beat_s`: the instance is heard that often at least.

        With a `cursor` the directory knows all changes before it, from a snapshot.
        """
        self.link = link
        self.cursor = cursor
        """The number of the first change that was not applied; None: the instance is to be listed."""
        self.confirmed = False
        """The directory knows what the instance held at its last answer."""
        self.listing = False
        self.reason = "" if cursor is not None else "registered"
        """Why the instance is listed, or is to be listed."""
        self.changes = 0
        """Changes that were applied."""
        self.lists = 0
        self.list_took_s = 0.0
        self.listed_s: float | None = None
        """When the last list ended."""
        self.told_tiers = list(tiers)
        self.tiers = [*tiers, PROMISED_TIER] if promises else self.told_tiers
        self._directory, self._group, self._listener, self._gate = directory, group, listener, lists
        self._incarnation = incarnation
        self._wait_s = min(beat_s / 2, MAX_WAIT_MS / 1000)
        self._loop = asyncio.get_running_loop()
        self._condition_s = float("-inf")
        """When the condition was last asked for."""
        self._unlisted = ""
        """A tier that could not be listed in the last list."""
        self._list_again_s = LIST_AGAIN_S
        self._asked_again_s = 0.0
        self._log = EventLog("follow")

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._directory.idle()  # after a snapshot's placements, which changes follow
        while True:
            try:
                if self.cursor is None:
                    async with self._gate:
                        await self._list()
                await self._poll()
                if self._unlisted:
                    await self._look_for_unlisted()
            except _Lost as lost:
                self.list_anew(str(lost))
            except ClusterFailure as refused:
                if refused.code == TooOld.code:
                    self.list_anew(TooOld.code)
                else:
                    self._log.repeated(
                        30, f"refused {refused.code}", "following_refused", endpoint=self.link.endpoint,
                        code=refused.code, reason=refused.message,
                    )  # fmt: skip
                    await asyncio.sleep(AGAIN_S)
            except Unavailable:
                await asyncio.sleep(AGAIN_S)

    def list_anew(self, reason: str) -> None:
        """List the instance again, for this reason."""
        self.confirmed, self.cursor, self.reason = False, None, reason
        self._listener.lost(reason)

    async def _poll(self) -> None:
        """Apply the changes since the cursor; waits for some if the directory was up to date."""
        cursor, now_s = self.cursor, self._loop.time()
        assert cursor is not None
        wants_condition = now_s - self._condition_s >= self._wait_s
        wait_s = min(self._wait_s, LIST_AGAIN_S) if self._unlisted else self._wait_s
        wait_s *= self.confirmed
        request = Changes(0, cursor, round(1000 * wait_s), wants_condition)
        changed = await self._ask(request, Changed, wait_s + patience(ANSWER_S))
        if wants_condition:
            self._condition_s = now_s
        self._check(changed)
        if self.cursor != cursor:  # somebody wants a list meanwhile
            return
        try:
            self._directory.apply(self._group, self.tiers, changed.runs)
        except SlotsExhausted:
            raise _Lost("no_slots") from None
        self.cursor = changed.next
        self.changes += changed.next - cursor
        if changed.next - cursor < MAX_CHANGES:
            self.confirmed = True
        self._listener.heard(changed.condition)
        if self._directory.busy:
            await self._directory.idle()

    async def _list(self) -> None:
        began_s = self._loop.time()
        start = (await self._ask(Changes(0, -1), Changed, patience(ANSWER_S))).next
        try:
            fill = self._directory.begin(self._group, self.tiers)
        except SlotsExhausted:
            await asyncio.sleep(AGAIN_S)
            raise _Lost("no_slots") from None
        self.listing, self._unlisted = True, ""
        try:
            for tier in self.tiers:
                await self._list_tier(fill, tier)
        except BaseException:
            self._directory.abandon(fill)
            raise
        finally:
            self.listing = False
        if wrong := await asyncio.shield(self._directory.publish(fill)):
            raise _Lost(wrong)
        self._directory.forget_tiers_but(self._group, self.tiers)
        self.cursor, self.lists = start, self.lists + 1
        self.listed_s = self._loop.time()
        self.list_took_s = self.listed_s - began_s
        self._asked_again_s = self.listed_s
        if not self._unlisted:
            self._list_again_s = LIST_AGAIN_S
        self._listener.listed(self.list_took_s)

    async def _list_tier(self, fill: Fill, tier: str) -> None:
        cursor = 0
        for _ in range(MAX_PAGES):
            page = await self._ask(List(0, tier, cursor), Listed, patience(PAGE_S))
            if len(page.tags) % TAG_BYTES:
                raise _Lost("bad_list")
            if page.tags and (wrong := await self._directory.fill(fill, tier, page.tags)):
                await asyncio.sleep(self._wait_s)  # the directory is full
                raise _Lost(wrong)
            self._listener.heard(None)
            if not page.complete:
                self._unlisted = tier
            if not page.complete or not page.next:
                return
            cursor = page.next
        raise _Lost("endless_list")

    async def _look_for_unlisted(self) -> None:
        """List everything again once the tier that could not be listed can be."""
        if self._loop.time() - self._asked_again_s < self._list_again_s:
            return
        self._asked_again_s = self._loop.time()
        self._list_again_s = min(2 * self._list_again_s, LIST_AGAIN_MAX_S)
        if (await self._ask(List(0, self._unlisted, 0), Listed, patience(PAGE_S))).complete:
            raise _Lost("listed")

    async def _ask(self, request: ClusterRequest, answer: type[R], timeout_s: float) -> R:
        reply = await self.link.ask(request, answer, timeout_s)
        if reply.epoch != self._incarnation:
            raise Unavailable(f"another process now answers at {self.link.endpoint}")
        return reply

    def _check(self, changed: Changed) -> None:
        """Raise _Lost unless the answer makes sense."""
        wrong = any(
            len(run.tags) % TAG_BYTES or (run.change is Change.CLEAR and run.tags) for run in changed.runs
        )
        if wrong or (self.cursor is not None and changed.next < self.cursor):
            raise _Lost("bad_changes")
