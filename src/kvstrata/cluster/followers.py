"""The instances that one process (a controller or a gateway) follows, and the directory of the chunks that they hold.

Its owner decides which instances to follow, and when an instance is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstrata.cluster.directory import Directory
from kvstrata.cluster.follow import LISTS, Follower, Listener
from kvstrata.cluster.lookups import Lookups
from kvstrata.native.core import Registry
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import Register
from kvstrata.rpc.zmq_link import AskLink, Links


class Followers:
    """The followers of one process. Belongs to the event loop."""

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        max_bytes: int,
        beat_s: float,
        promises: bool,
        failed: Callable[[int, str], None],
    ) -> None:
        """`max_bytes`: of placements. The others: as of Follower and Directory."""
        loop, registry = asyncio.get_running_loop(), Registry(max_bytes=max_bytes)
        self.links = Links(loop)
        self.lookups = Lookups(loop, registry)
        self.directory = Directory(loop, registry, self.lookups, failed=failed)
        self._supervisor, self._beat_s, self._promises = supervisor, beat_s, promises
        self._lists = asyncio.Semaphore(LISTS)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By group: the task that follows it."""
        self._sweeping = supervisor.spawn(self.directory.keep_swept(), "sweep")

    def follow(
        self,
        group: int,
        told: Register,
        link: AskLink,
        listener: Listener,
        *,
        before: Follower | None = None,
        cursor: int | None = None,
    ) -> Follower:
        """Follow an instance over this link from now on.

        `before`: has followed the same process until now.  `cursor`: the directory is restored up to it.
        """
        if before is not None:
            before.link.close()
            self._tasks.pop(group).cancel()
            if before.told_tiers == told.tiers:
                cursor = before.cursor
        self.lookups.set_shared(group, told.media)
        follower = Follower(
            link, self.directory, group, listener, self._lists, incarnation=told.incarnation, tiers=told.tiers,
            promises=self._promises, beat_s=self._beat_s, cursor=cursor,
        )  # fmt: skip
        self._tasks[group] = self._supervisor.spawn(follower.run(), f"follow-{told.instance}")
        return follower

    def forget(self, group: int, follower: Follower | None) -> None:
        """Follow a group no more, and drop its placements."""
        if follower is not None:
            follower.link.close()
            self._tasks.pop(group).cancel()
        self.directory.forget(group)

    async def close(self) -> None:
        """End the tasks, the links and the threads."""
        tasks = [*self._tasks.values(), self._sweeping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.links.close()
        self.directory.close()
        self.lookups.close()
