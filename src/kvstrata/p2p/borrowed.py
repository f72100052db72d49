"""Chunks that were read from peers and are not to stay (`p2p.keep` off): dropped once nobody uses them.

What an admin has asked for (`keeping`) is not borrowed, whoever reads it.

A chunk comes to L1 whatever happens, since engines load from there.  It gets LINGER_S, in which the lookup that it was
read for leases it; after that it goes as soon as nobody has a lease on it, children before their parents.  Of more
than `max_keys` the oldest are forgotten and leave as other chunks do, by eviction.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.clock import Clock
    from kvstrata.native.pool import Pool
    from kvstrata.process.supervisor import PoolLane

LINGER_S = 2.0
AT_A_TIME = 1024
"""Chunks that one `drop_due` looks at."""


class Borrowed:
    """See the module. Belongs to the event loop."""

    def __init__(self, pool: Pool, lane: PoolLane, clock: Clock, *, max_keys: int = 65_536) -> None:
        self._pool = pool
        self._lane = lane
        self._clock = clock
        self._max_keys = max_keys
        self._due_s: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        """By key, in the order of these times."""
        self._dropping: asyncio.Future[int] | None = None
        """The removal that runs."""
        self._kept: collections.Counter[bytes] = collections.Counter()

    def __len__(self) -> int:
        return len(self._due_s)

    def read(self, keys: Iterable[bytes]) -> None:
        """These chunks were read from a peer just now."""
        self._later(key for key in keys if key not in self._kept)
        while len(self._due_s) > self._max_keys:
            self._due_s.popitem(last=False)

    @contextlib.asynccontextmanager
    async def keeping(self, keys: Iterable[bytes]) -> AsyncIterator[None]:
        """What is read of these within the block stays, and so does what was read before.

        A drop that had begun has ended when the block begins: what is in L1 then is not about to be dropped.
        """
        keys = list(keys)
        self._kept.update(keys)
        for key in keys:
            self._due_s.pop(key, None)
        try:
            if self._dropping is not None:
                await asyncio.wait({self._dropping})
            yield
        finally:
            self._kept.subtract(keys)
            for key in keys:
                if not self._kept[key]:
                    del self._kept[key]

    async def drop_due(self) -> int:
        """Drop what has had its time and is not in use; returns how many went. The others get the time again."""
        now_s = self._clock.monotonic_s()
        first = itertools.islice(self._due_s.items(), AT_A_TIME)
        due = [key for key, due_s in first if due_s <= now_s]
        if not due:
            return 0
        self._dropping = self._lane.run(self._pool.remove, b"".join(reversed(due)), True)
        removed = await asyncio.shield(self._dropping)
        self._dropping = None
        for key in due:
            self._due_s.pop(key, None)
        self.read([key for key in due if self._pool.peek(key, 1)])
        return removed

    def _later(self, keys: Iterable[bytes]) -> None:
        due_s = self._clock.monotonic_s() + LINGER_S
        for key in keys:
            self._due_s[key] = due_s
            self._due_s.move_to_end(key)
