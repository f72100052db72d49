"""The instances that this gateway follows, and what they hold of a prompt (cluster/follow.py, cluster/directory.py).

1. The followed instances are those that a controller named last; each is followed at its own control port, also while
   no controller answers.  One that no controller names any more is followed as long as it answers: a controller that
   has restarted names few at first.
2. What is known of an instance that has not answered for STALE_S counts no more, until it answers again.
3. Why answers ended is told to the instance in a question of its own, which asks for nothing (HINTS_S).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvstrata.cluster.directory import Directory
from kvstrata.cluster.follow import ANSWER_S, LISTS, Follower
from kvstrata.cluster.lookups import INLINE_TAGS, Held, Lookups
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.native.core import Registry
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.patience import patience
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import MAX_HINTS, TAG_BYTES, Changed, Changes, Condition, Hinted, Served
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import Links
from kvstrata.types import GB

MAX_BYTES = 4 * GB
"""Memory for placements, as a controller's `directory.max_gb` is by default; each takes about 11 bytes."""
MAX_GROUPS = 4_096
BEAT_S = 10.0
STALE_S = 30.0
HINTS_S = 0.1
"""Time for which hints are gathered; of more than MAX_HINTS the first are lost."""


class Holding(NamedTuple):
    """How much of a prompt one instance holds, from its start."""

    served: Served
    chunks: Held
    unconfirmed_ms: int = 0
    """0: the gateway is in step with it; otherwise for how long it has not been, and it may hold less by now."""


class _Followed:
    """One instance, and who hears of it."""

    def __init__(self, served: Served, group: int, now_s: Callable[[], float]) -> None:
        self.served, self.group = served, group
        self._now_s = now_s
        self.heard_s = self.confirmed_s = now_s()
        self.hints: deque[Hinted] = deque(maxlen=MAX_HINTS)
        self.follower: Follower | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def in_step(self) -> bool:
        return self.follower is not None and self.follower.confirmed

    def heard(self, _: Condition | None) -> None:
        self.heard_s = self._now_s()
        if self.in_step:
            self.confirmed_s = self.heard_s

    def listed(self, took_s: float) -> None:
        pass

    def lost(self, reason: str) -> None:
        pass


class Following(Numbers):
    """See the module. Belongs to the event loop."""

    followed = gauge(
        "Instances that this gateway follows.", lambda self: len(self._of), name="followed_instances"
    )
    in_step = gauge(
        "Of these, the instances of which the gateway knows exactly what they hold.",
        lambda self: sum(one.in_step for one in self._of.values()),
        name="followed_in_step",
    )
    placements = gauge(
        "Chunks of these instances that the gateway knows.", lambda self: self._registry.usage().placements
    )
    hints = counter("Ends of answers that instances were told of.", name="told_hints")

    def __init__(self, links: Links, supervisor: Supervisor, now_s: Callable[[], float]) -> None:
        self._links, self._supervisor, self._now_s = links, supervisor, now_s
        loop = asyncio.get_running_loop()
        self._log = EventLog("following")
        self._registry = Registry(max_bytes=MAX_BYTES)
        self._lookups = Lookups(loop, self._registry)
        self._directory = Directory(loop, self._registry, self._lookups, failed=self._full)
        self._sweeping = supervisor.spawn(self._directory.keep_swept(), "sweep")
        self._lists = asyncio.Semaphore(LISTS)
        self._of: dict[str, _Followed] = {}
        self._by_group: dict[int, _Followed] = {}
        self._next_group = 0

    def follow(self, instances: Iterable[Served], keys: ClusterKeys) -> None:
        """Follow these instances from now on, and no others that do not answer."""
        wanted = {one.instance: one for one in instances}
        now_s = self._now_s()
        for name, known in list(self._of.items()):
            if name in wanted:
                moved = _where(wanted[name]) != _where(known.served)
            else:
                moved = now_s - known.heard_s > patience(STALE_S)
            if moved:
                self._end(known)
        for name, served in wanted.items():
            if name in self._of:
                self._of[name].served = served
                self._lookups.set_shared(self._of[name].group, served.media)
            elif len(self._of) < MAX_GROUPS:
                self._begin(served, keys)

    def follow_none(self) -> None:
        """Follow nobody any more."""
        for known in list(self._of.values()):
            self._end(known)

    async def held(self, tags: bytes, n_slices: int) -> list[Holding]:
        """What instances hold of a prompt; its tags chunk by chunk."""
        if len(tags) <= INLINE_TAGS * TAG_BYTES:
            found = self._lookups.held(tags, n_slices)
        else:
            found = await self._lookups.held_on_thread(tags, n_slices)
        now_s, rows = self._now_s(), []
        for group, chunks in found.items():
            known = self._by_group.get(group)
            if known is not None and now_s - known.heard_s <= patience(STALE_S):
                doubt_ms = 0 if known.in_step else max(1, int((now_s - known.confirmed_s) * 1000))
                rows.append(Holding(known.served, chunks, doubt_ms))
        return rows

    def hint(self, instance: str, said: Hinted) -> None:
        """Tell an instance what comes after a request; it may never hear of it."""
        if (known := self._of.get(instance)) is not None:
            if not known.hints:
                asyncio.get_running_loop().call_later(HINTS_S, self._tell, known)
            known.hints.append(said)

    def _tell(self, known: _Followed) -> None:
        if self._of.get(known.served.instance) is known:
            said = Changes(0, -1, hints=list(known.hints))
            known.hints.clear()
            self._supervisor.spawn(self._told(known, said), f"hint-{known.served.instance}")

    async def _told(self, known: _Followed, said: Changes) -> None:
        assert known.follower is not None
        with contextlib.suppress(Unavailable, ClusterFailure):
            await known.follower.link.ask(said, Changed, patience(ANSWER_S))
            self.hints += len(said.hints)

    def page(self) -> list[dict[str, Any]]:
        """The followed instances, for operators."""
        now_s = self._now_s()
        keys: dict[int, dict[str, int]] = {}
        for place, count in self._lookups.keys().items():
            keys.setdefault(place.group, {})[place.tier] = count
        return [
            {
                "instance": name,
                "keys": keys.get(one.group, {}),
                "in_step": one.in_step,
                "heard_ago_s": round(now_s - one.heard_s, 3),
                "lists": one.follower.lists if one.follower is not None else 0,
                "changes": one.follower.changes if one.follower is not None else 0,
            }
            for name, one in sorted(self._of.items())
        ]

    async def close(self) -> None:
        """Follow nobody any more, and end the threads."""
        tasks = [one.task for one in self._of.values() if one.task is not None]
        self.follow_none()
        self._sweeping.cancel()
        await asyncio.gather(*tasks, self._sweeping, return_exceptions=True)
        self._directory.close()
        self._lookups.close()

    def _begin(self, served: Served, keys: ClusterKeys) -> None:
        def changed(up: bool) -> None:
            if not up:
                link.fail_sent()

        try:
            link = self._links.ask(served.control_endpoint, keys=keys.to(served.key), changed=changed)
        except Unavailable as error:
            self._log.repeated(
                30, served.instance, "not_followed", instance=served.instance, reason=error.message
            )
            return
        while self._next_group in self._by_group:
            self._next_group = (self._next_group + 1) % (2 * MAX_GROUPS)
        known = self._of[served.instance] = _Followed(served, self._next_group, self._now_s)
        self._next_group = (self._next_group + 1) % (2 * MAX_GROUPS)
        self._by_group[known.group] = known
        self._lookups.set_shared(known.group, served.media)
        known.follower = Follower(
            link, self._directory, known.group, known, self._lists, incarnation=served.incarnation,
            tiers=served.tiers, beat_s=BEAT_S,
        )  # fmt: skip
        known.task = self._supervisor.spawn(known.follower.run(), f"follow-{served.instance}")

    def _end(self, known: _Followed) -> None:
        assert known.follower is not None and known.task is not None
        known.task.cancel()
        known.follower.link.close()
        self._directory.forget(known.group)
        del self._of[known.served.instance], self._by_group[known.group]

    def _full(self, group: int, reason: str) -> None:
        self._log.repeated(30, "full", "directory_full", reason=reason)


def _where(served: Served) -> tuple[object, ...]:
    """What an instance is followed by."""
    return served.control_endpoint, served.key, served.incarnation, served.tiers
