"""The chunks that this instance holds, tier by tier, for its followers: changes since a cursor, and complete lists.

The pool records the changes of L1 itself.  Tiers that accept puts record theirs here (`News` of tiers/puts.py).  A tier
is *own* if no other instance shares its medium.  If the adapter of an own tier can list its keys, it makes the list,
which includes records from before this start.  For all other tiers, the tags of the keys that were put or found since
the start are kept here; these include *shared* tiers, whose media may be large and are not listed by each instance.

Followers get only the first chunk of each promise of the instance's engines, at once if nothing was sent for GATHER_S.
An entry for each chunk would double what they have to read, and an asker learns from the instance itself how much of
its prompt is promised.  At most MAX_PROMISED promises are announced at a time, and PROMISES_S in a second, so that
promises push no other changes out of the ring; for promises beyond that, other instances compute.

No state is kept for a follower.  Changes are collected for GATHER_S, so that an answer has many of them, and all
waiting polls are answered together: in one turn of the loop, with one read of the changes for those at the same cursor.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvstrata.errors import BadRequest, TooOld
from kvstrata.native.core import Pool
from kvstrata.observability.numbers import Numbers, counter
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import MAX_CHANGES, PROMISED_TIER, TAG_BYTES, Change, Run, tags_of
from kvstrata.tiers.base import Usage
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import Tier, TierState

T = TypeVar("T")
L1_TIER = "l1"
GATHER_S = 0.015
INLINE_CHANGES = 1_024
"""Maximum number of changes that are summed up on the loop, in about 30 µs."""
SCAN_ENTRIES = 8_192
"""Number of index entries that are read in one turn of the loop (about 0.1 ms)."""
PAGE_TAGS = 65_536
PAGE_KEYS = 256
"""Number of keys that an adapter lists at a time: some 100 µs of its index, and of the loop."""
MAX_L2_TAGS = 262_144
"""Maximum number of tags kept for a tier that cannot list its keys, and so in one page; the oldest are dropped."""
MAX_PROMISED, PROMISES_S = 4_096, 500
MAX_NAME_CHARS = 32
COUNT_S = 5.0


def tier_name(adapter: str) -> str:
    """The name of an adapter's tier on the wire: the adapter's own, or one cut to 32 characters with a digest."""
    if len(adapter) <= MAX_NAME_CHARS:
        return adapter
    digest = hashlib.sha256(adapter.encode()).hexdigest()[:8]
    return f"{adapter[: MAX_NAME_CHARS - 9]}-{digest}"


class _Poll:
    """One unanswered poll of a follower."""

    __slots__ = ("answer", "cursor", "make", "timer")

    def __init__(
        self, cursor: int, make: Callable[[int, list[Run]], Any], answer: asyncio.Future[Any]
    ) -> None:
        self.cursor, self.make, self.answer = cursor, make, answer
        self.timer: asyncio.TimerHandle | None = None


class HeldChunks(Numbers):
    """Answers followers, as the module describes. Belongs to the event loop."""

    polls = counter("Answered polls of followers.")
    told_changes = counter("Changes of chunks since the cursors of these polls.")
    too_old = counter("Polls of followers that had fallen too far behind and must list everything again.")
    pages = counter("Pages of lists sent to followers.", name="listed_pages")

    def __init__(self, pool: Pool, tiers: TierSet, supervisor: Supervisor) -> None:
        """Raises PoolError if the pool gets no memory for changes."""
        self._pool = pool
        self._tiers = tiers
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._tags: dict[str, collections.OrderedDict[bytes, None]] = {}
        """Known tags of the tiers that cannot list their keys."""
        self._names = [L1_TIER]
        """Names of tiers, indexed by their number in the pool's changes."""
        self._promised: dict[bytes, int] = {}
        """Promises by the tag of their first chunk."""
        self._promises_in, self._promises_s, self._told_s = 0, 0.0, 0.0
        """Number of promises announced since `_promises_s`, within a second; and when polls were last answered."""
        self._usage: dict[str, Usage] = {}
        self._counting: asyncio.Task[None] | None = None
        self._waiting: list[_Poll] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._signal = pool.begin_changes()
        self._loop.add_reader(self._signal, self._signalled)

    def start(self) -> None:
        """Begin to read the tiers' usage every `COUNT_S`."""
        self._counting = self._supervisor.spawn(self._count(), "cluster-tiers")

    async def stop(self) -> None:
        """Stop reading the usage. Idempotent."""
        self._loop.remove_reader(self._signal)
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    # --- reports of tiers -----------------------------------------------------------------------------------

    def tier_got(self, adapter: str, keys: Sequence[bytes]) -> None:
        """Record that a tier has these chunks."""
        tier = tier_name(adapter)
        if not self.lists(tier):
            known = self._tags.setdefault(tier, collections.OrderedDict())
            known.update((key[:TAG_BYTES], None) for key in keys)
            while len(known) > MAX_L2_TAGS:
                known.popitem(last=False)
        self._note(tier, Change.ADMIT, keys)

    def tier_lost(self, adapter: str, keys: Sequence[bytes]) -> None:
        """Record that a tier does not have these chunks any more."""
        tier = tier_name(adapter)
        known = self._tags.get(tier)
        if known is not None:
            for key in keys:
                known.pop(key[:TAG_BYTES], None)
        self._note(tier, Change.EVICT, keys)

    def tier_emptied(self, adapter: str) -> None:
        """Record that a tier is empty."""
        tier = tier_name(adapter)
        self._tags.pop(tier, None)
        self._pool.note_changes(self._number(tier), Change.CLEAR, b"")

    def promised(self, first: bytes) -> bool:
        """Announce to followers that an engine computes the chunks from this key on; False: the limit is reached."""
        now_s, tag = self._loop.time(), first[:TAG_BYTES]
        if now_s >= self._promises_s + 1.0:
            self._promises_in, self._promises_s = 0, now_s
        if tag not in self._promised:
            if len(self._promised) >= MAX_PROMISED or self._promises_in >= PROMISES_S:
                return False
            self._promises_in += 1
            self._note(PROMISED_TIER, Change.ADMIT, [first])
            if self._waiting:
                self._gather(max(0.0, self._told_s + GATHER_S - now_s))
        self._promised[tag] = self._promised.get(tag, 0) + 1
        return True

    def promise_ended(self, first: bytes) -> None:
        """Handle the end of a promise that was announced to followers."""
        tag = first[:TAG_BYTES]
        self._promised[tag] -= 1
        if not self._promised[tag]:
            del self._promised[tag]
            self._note(PROMISED_TIER, Change.EVICT, [first])

    def _note(self, tier: str, change: Change, keys: Iterable[bytes]) -> None:
        if joined := b"".join(keys):
            self._pool.note_changes(self._number(tier), change, joined)

    def _number(self, tier: str) -> int:
        if tier not in self._names:
            self._names.append(tier)
        return self._names.index(tier)

    # --- polls and lists ------------------------------------------------------------------------------------

    def changes(self, cursor: int, wait_s: float, make: Callable[[int, list[Run]], T]) -> asyncio.Future[T]:
        """The result of `make(next cursor, changes since cursor)`; for cursor -1 only the current cursor, at once.

        Waits for a change, at most `wait_s`.  The future fails with TooOld.
        """
        poll = _Poll(cursor, make, self._loop.create_future())
        if cursor < 0:
            poll.answer.set_result(make(self._pool.next_change, []))
            return poll.answer
        if not self._pool.has_changes(cursor):
            poll.timer = self._loop.call_later(wait_s, self._tell, [poll])
            self._waiting.append(poll)
        elif 0 < self._pool.next_change - cursor < MAX_CHANGES:
            self._waiting.append(poll)
            self._gather()
        else:
            self._tell([poll])
        return poll.answer

    async def page(self, tier: str, cursor: int) -> tuple[int, bytes, bool]:
        """A page of a tier's tags: (next cursor, 0 at the end; tags; whether the tier can list its keys now).

        Raises BadRequest.
        """
        self.pages += 1
        if tier == L1_TIER:
            collected = bytearray()
            while True:
                tags, cursor = self._pool.ready_tags(cursor, SCAN_ENTRIES)
                collected += tags
                if not cursor or len(collected) >= PAGE_TAGS * TAG_BYTES:
                    return cursor, bytes(collected), True
                await asyncio.sleep(0)
        if tier == PROMISED_TIER:
            return 0, b"".join(self._promised), True
        if tier not in self._all():
            raise BadRequest(f"tier: {tier!r:.80} is not one of l1, {', '.join(self._all())}", field="tier")
        own = self._own().get(tier)
        if own is None or not own.capabilities.lists:
            return 0, b"".join(self._tags.get(tier, ())), True
        collected = bytearray()
        while len(collected) < PAGE_TAGS * TAG_BYTES:
            page = await own.list_keys(cursor, PAGE_KEYS)
            if page is None:
                return 0, bytes(collected), False
            collected += tags_of(b"".join(page.keys))
            if not page.cursor:
                return 0, bytes(collected), True
            cursor = page.cursor
        return cursor, bytes(collected), True

    def _signalled(self) -> None:
        self._pool.drain_changes()
        if self._waiting:
            self._gather()

    def _gather(self, gather_s: float = GATHER_S) -> None:
        """Answer the waiting polls `gather_s` after the first change that concerns one of them."""
        if self._gathering is None:
            self._gathering = self._loop.call_later(gather_s, self._end_gathering)

    def _end_gathering(self) -> None:
        """Answer each poll for which something has changed; polls at the same cursor share one read."""
        self._gathering, self._told_s = None, self._loop.time()
        at: dict[int, list[_Poll]] = {}
        for poll in self._waiting:
            at.setdefault(poll.cursor, []).append(poll)
        for cursor, polls in at.items():
            if self._pool.has_changes(cursor):
                self._tell(polls)

    def _tell(self, polls: list[_Poll]) -> None:
        """Answer these polls, which all have the same cursor, with the changes since then."""
        for poll in polls:
            if poll.timer is not None:
                poll.timer.cancel()
        self._waiting = [poll for poll in self._waiting if poll not in polls]
        cursor = polls[0].cursor
        if self._pool.next_change - cursor <= INLINE_CHANGES:
            self._told(polls, self._pool.changes(cursor, MAX_CHANGES))
            return
        reading = self._loop.run_in_executor(None, self._pool.changes, cursor, MAX_CHANGES)
        reading.add_done_callback(lambda found: self._told(polls, found.result()))

    def _told(self, polls: list[_Poll], found: tuple[int, list[Any]] | None) -> None:
        cursor, runs = polls[0].cursor, []
        for number, cleared, gone, came in found[1] if found is not None else ():
            name = self._names[number]
            if cleared:
                runs.append(Run(Change.CLEAR, name, b""))
            if gone:
                runs.append(Run(Change.EVICT, name, gone))
            if came:
                runs.append(Run(Change.ADMIT, name, came))
        for poll in polls:
            if poll.answer.done():  # its port was closed
                continue
            if found is None:
                self.too_old += 1
                why = "cursor: not all changes since then are known; list the chunks anew"
                poll.answer.set_exception(TooOld(why, field="cursor"))
                continue
            self.polls += 1
            self.told_changes += found[0] - cursor
            poll.answer.set_result(poll.make(found[0], runs))

    # --- the tiers ------------------------------------------------------------------------------------------

    def tiers(self) -> list[str]:
        """Names of all tiers, L1 first."""
        return [L1_TIER, *self._all()]

    def states(self) -> dict[str, str]:
        """The states of the tiers that are not active."""
        shown = {name: tier.shown_state for name, tier in self._all().items()}
        return {name: state for name, state in shown.items() if state != TierState.ACTIVE}

    def media(self) -> dict[str, str]:
        """The medium names of the shared tiers, by tier; tiers whose medium is unknown are omitted."""
        return {
            name: tier.capabilities.medium
            for name, tier in self._all().items()
            if tier.capabilities.shared and tier.capabilities.medium
        }

    def lists(self, tier: str) -> bool:
        """Whether the tier lists its keys: it is own, and its adapter supports lists."""
        own = self._own().get(tier)
        return own is not None and own.capabilities.lists

    def usage(self) -> dict[str, Usage]:
        """The usage of own tiers, at most `COUNT_S` old; tiers that could not report it are omitted."""
        return {tier: self._usage[tier] for tier in self._own() if tier in self._usage}

    def _all(self) -> dict[str, Tier]:
        """The open tiers that accept puts; the one that reads peers does not."""
        return {
            tier_name(tier.name): tier
            for tier in self._tiers
            if tier.state is not TierState.UNREACHABLE and tier.capabilities.takes_puts
        }

    def _own(self) -> dict[str, Tier]:
        return {name: tier for name, tier in self._all().items() if not tier.capabilities.shared}

    async def _count(self) -> None:
        while True:
            for tier, own in self._own().items():
                usage = await own.usage()
                if any(usage):
                    self._usage[tier] = usage
                else:  # empty and without a cap, or the adapter does not know
                    self._usage.pop(tier, None)
            await asyncio.sleep(COUNT_S)
