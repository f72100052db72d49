"""The instances that this gateway follows, and the chunks of a prompt that they hold (cluster/followers.py).

1. The gateway follows the instances that a controller has listed last, each at its own control port, even while no
   controller answers.  An instance that is no longer listed is followed as long as it answers, since a restarted
   controller lists only few instances at first.
2. The chunks of an instance that has not answered for STALE_S do not count until it answers again.
3. Hints about ended answers are collected for HINTS_S and sent in a message that requests no changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from kvstrata.cluster.follow import ANSWER_S, Follower, Listener
from kvstrata.cluster.followers import Followers
from kvstrata.cluster.lookups import Held
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.patience import patience
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import (
    MAX_HINTS,
    NO_CONDITION,
    Changed,
    Changes,
    Condition,
    Hinted,
    Register,
    Served,
)
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.types import GB

MAX_BYTES = 4 * GB
"""Maximum memory for placements, like the default of a controller's `directory.max_gb`; each takes about 11 bytes."""
MAX_GROUPS = 4_096
BEAT_S = 10.0
STALE_S = 30.0
HINTS_S = 0.1
"""Time for which hints are collected; of more than MAX_HINTS the oldest are dropped."""


class Followed(Listener):
    """A followed instance, with its last reported condition."""

    follower: Follower

    def __init__(
        self, served: Served, group: int, now_s: Callable[[], float], news: Callable[[], None]
    ) -> None:
        self.served, self.group = served, group
        self._now_s, self._news = now_s, news
        self.heard_s = self.confirmed_s = now_s()
        self.hints: deque[Hinted] = deque(maxlen=MAX_HINTS)
        self.condition = NO_CONDITION

    @property
    def told(self) -> Register:
        """The instance's registration at the controller."""
        return self.served.told

    def heard(self, condition: Condition | None) -> None:
        """Record an answer of the instance; `condition`: its new condition, if the answer has one."""
        self.heard_s = self._now_s()
        if self.follower.confirmed:
            self.confirmed_s = self.heard_s
        if condition is not None:
            before, self.condition = self.condition, condition
            if _of_engines(before) != _of_engines(condition):
                self._news()


class Holding(NamedTuple):
    """The number of a prompt's leading chunks that one instance holds."""

    of: Followed
    chunks: Held
    unconfirmed_ms: int = 0
    """Time since the gateway last knew the instance's exact contents, which may have shrunk since; 0: it knows them."""


class Following(Numbers):
    """The followers of instances. Belongs to the event loop."""

    followed = gauge(
        "Instances that this gateway follows.", lambda self: len(self._of), name="followed_instances"
    )
    in_step = gauge(
        "Followed instances whose contents are known exactly.",
        lambda self: sum(one.follower.confirmed for one in self._of.values()),
        name="followed_in_step",
    )
    placements = gauge(
        "Chunks of followed instances that the gateway knows.",
        lambda self: self._followers.directory.usage().placements,
    )
    hints = counter("Ends of answers reported to instances as hints.", name="told_hints")

    def __init__(self, supervisor: Supervisor, now_s: Callable[[], float], news: Callable[[], None]) -> None:
        """`news()` is called when the set of followed instances or their reports of engines change."""
        self._supervisor, self._now_s, self._news = supervisor, now_s, news
        self._log = EventLog("following")
        self._followers = Followers(
            supervisor, max_bytes=MAX_BYTES, beat_s=BEAT_S, promises=False, failed=self._full
        )
        self.links = self._followers.links
        self._of: dict[str, Followed] = {}
        self._by_group: dict[int, Followed] = {}
        self._next_group = 0

    def __iter__(self) -> Iterator[Followed]:
        return iter(self._of.values())

    def get(self, instance: str) -> Followed | None:
        """The followed instance with this id; None: not followed."""
        return self._of.get(instance)

    def follow(self, instances: Iterable[Served], keys: ClusterKeys) -> None:
        """Follow these instances; others are followed only as long as they answer."""
        wanted = {one.told.instance: one for one in instances}
        now_s = self._now_s()
        for name, known in list(self._of.items()):
            if name in wanted:
                gone = _process(wanted[name]) != _process(known.served)
            else:
                gone = now_s - known.heard_s > patience(STALE_S)
            if gone:
                self._end(known)
        for name, served in wanted.items():
            if (before := self._of.get(name)) is not None:
                moved, before.served = served.told != before.told, served
                if moved:
                    self._begin(before, keys, before.follower)
            elif len(self._of) < MAX_GROUPS:
                while self._next_group in self._by_group:
                    self._next_group = (self._next_group + 1) % (2 * MAX_GROUPS)
                self._begin(Followed(served, self._next_group, self._now_s, self._news), keys)
                self._next_group = (self._next_group + 1) % (2 * MAX_GROUPS)
        self._news()

    def follow_none(self) -> None:
        """Stop following all instances."""
        for known in list(self._of.values()):
            self._end(known)

    async def held(self, tags: bytes, n_slices: int) -> list[Holding]:
        """Look up a prompt at all followed instances; `tags`: chunk by chunk, each with `n_slices` tags."""
        found = await self._followers.lookups.held(tags, n_slices)
        now_s, rows = self._now_s(), []
        for group, chunks in found.items():
            known = self._by_group.get(group)
            if known is not None and now_s - known.heard_s <= patience(STALE_S):
                doubt_ms = int((now_s - known.confirmed_s) * 1000)
                rows.append(Holding(known, chunks, 0 if known.follower.confirmed else max(1, doubt_ms)))
        return rows

    def hint(self, known: Followed, said: Hinted) -> None:
        """Queue a hint for an instance; it is sent once, without a retry."""
        if not known.hints:
            asyncio.get_running_loop().call_later(HINTS_S, self._tell, known)
        known.hints.append(said)

    def _tell(self, known: Followed) -> None:
        if self._of.get(known.told.instance) is known:
            said = Changes(0, -1, hints=list(known.hints))
            known.hints.clear()
            self._supervisor.spawn(self._told(known, said), f"hint-{known.told.instance}")

    async def _told(self, known: Followed, said: Changes) -> None:
        with contextlib.suppress(Unavailable, ClusterFailure):
            await known.follower.link.ask(said, Changed, patience(ANSWER_S))
            self.hints += len(said.hints)

    def page(self) -> list[dict[str, Any]]:
        """The followed instances, for the status page."""
        now_s = self._now_s()
        keys: dict[int, dict[str, int]] = {}
        for place, count in self._followers.lookups.keys().items():
            keys.setdefault(place.group, {})[place.tier] = count
        return [
            {
                "instance": name,
                "engines": one.condition.engines,
                "models": sorted({kind.layout.model for kind in one.condition.models}),
                "keys": keys.get(one.group, {}),
                "in_step": one.follower.confirmed,
                "heard_ago_s": round(now_s - one.heard_s, 3),
                "lists": one.follower.lists,
                "changes": one.follower.changes,
            }
            for name, one in sorted(self._of.items())
        ]

    async def close(self) -> None:
        """Stop following all instances, and end the threads."""
        await self._followers.close()

    def _begin(self, known: Followed, keys: ClusterKeys, before: Follower | None = None) -> None:
        """Follow an instance; `before`: its follower at an earlier address, whose contents are kept."""
        told = known.told
        try:
            link = self.links.ask(told.control_endpoint, keys=keys.to(known.served.key), few=True)
        except Unavailable as error:
            says = {"instance": told.instance, "reason": error.message}
            self._log.repeated(30, told.instance, "not_followed", **says)
            return
        known.follower = self._followers.follow(known.group, told, link, known, before=before)
        self._of[told.instance] = self._by_group[known.group] = known

    def _end(self, known: Followed) -> None:
        self._followers.forget(known.group, known.follower)
        del self._of[known.told.instance], self._by_group[known.group]

    def _full(self, group: int, reason: str) -> None:
        self._log.repeated(30, "full", "directory_full", reason=reason)


def _of_engines(told: Condition) -> tuple[object, ...]:
    """The parts of a condition that concern the instance's engines."""
    return told.models, told.engines, told.rates


def _process(served: Served) -> tuple[object, ...]:
    """The identity of an instance's process."""
    return served.told.control_endpoint, served.key, served.told.incarnation
