"""Chunks that were read from peers and are not to stay in L1 (`p2p.keep` off): dropped once nobody uses them.

Even such a chunk passes through L1, since engines load only from there.  For LINGER_S it stays, so that the lookup for
which it was read can lease it; after that it is dropped as soon as nobody has a lease on it, children before their
parents.  If there are more than `max_keys`, the oldest are forgotten here and leave L1 by eviction like other chunks.

Chunks that an admin has asked for (`keeping`) are not borrowed, whichever request reads them from a peer.
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
    from kvstrata.process.lane import PoolLane

LINGER_S = 2.0
AT_A_TIME = 1024
"""Maximum number of chunks that one `drop_due` looks at."""


class Borrowed:
    """See the module. Belongs to the event loop."""

    def __init__(self, pool: Pool, lane: PoolLane, clock: Clock, *, max_keys: int = 65_536) -> None:
        self._pool = pool
        self._lane = lane
        self._clock = clock
        self._max_keys = max_keys
        self._due_s: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        """When each key is to be dropped, in the order of these times."""
        self._dropping: asyncio.Future[int] | None = None
        """The removal that the pool is carrying out, if any."""
        self._kept: collections.Counter[bytes] = collections.Counter()
        """Key → number of `keeping` calls in progress that name it."""

    def __len__(self) -> int:
        return len(self._due_s)

    def read(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks were read from a peer just now."""
        due_s = self._clock.monotonic_s() + LINGER_S
        for key in keys:
            if key not in self._kept:
                self._due_s[key] = due_s
                self._due_s.move_to_end(key)
        while len(self._due_s) > self._max_keys:
            self._due_s.popitem(last=False)

    @contextlib.asynccontextmanager
    async def keeping(self, keys: Iterable[bytes]) -> AsyncIterator[None]:
        """Inside the `async with`, none of these chunks becomes borrowed; borrowed ones become ordinary for good.

        Waits first for a drop that is under way, so that no chunk that the caller finds in L1 is about to be dropped.
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
        """Drop the due chunks that nobody uses; returns how many were dropped. Due chunks in use get LINGER_S more.

        If the call is cancelled, the pool still finishes its removal.
        """
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
