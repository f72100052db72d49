"""Staging memory of a codec: a fixed number of bytes outside L1.

Invariants
1. Blocks never overlap, and together never exceed the size; the blocks of puts together never exceed half of it.
2. A block is free again when nothing refers to it any more, in any thread.
3. Waiting callers are served in order, loads before puts.  Half of the staging is always left to loads, so that puts
   into a medium that keeps their bytes for long cannot block all loads.

Staging is not registered with any device, and no other process can see it.
"""

from __future__ import annotations

import asyncio
import collections
import mmap

from kvstrata.native.core import buffer_address

PAGE_BYTES = 4096
"""Blocks begin at multiples of this, as direct I/O requires."""
MAX_WAITING = 256
"""Maximum number of operations that wait for a block."""
MADV_DONTDUMP = 16


def pages(length: int) -> int:
    """A length rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


class Block:
    """A range of staging, which is free again when the object is deleted."""

    def __init__(self, staging: Staging, offset: int, room: int, for_put: bool) -> None:
        self.address = staging.address + offset
        self.offset, self.room, self.for_put = offset, room, for_put
        self.staging = staging

    def view(self, length: int) -> memoryview:
        """The first `length` bytes."""
        assert length <= self.room
        return memoryview(self.staging.memory)[self.offset : self.offset + length]

    def shrink(self, length: int) -> None:
        """Free all but the first `length` bytes."""
        room = pages(length)
        if room < self.room:
            self.staging.free(self.offset + room, self.room - room, self.for_put)
            self.room = room

    def __del__(self) -> None:
        self.staging.free(self.offset, self.room, self.for_put)


class StagingHold:
    """A reference to a block, with the interface of a hold on an extent."""

    offset = 0

    def __init__(self, block: Block, key: bytes, length: int) -> None:
        self.key, self.length, self.address = key, length, block.address
        self._block: Block | None = block

    def view(self) -> memoryview:
        """The bytes, writable."""
        block = self._block
        if block is None:
            raise ValueError("the hold was dropped")
        return block.view(self.length)

    def drop(self) -> None:
        """End the hold. Idempotent; thread-safe."""
        self._block = None


class Staging:
    """The staging of one codec. Everything but `free` belongs to one event loop."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        self.put_limit_bytes = self.size_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        # The kernel allocates memory only for pages that were written.
        self.memory = mmap.mmap(-1, self.size_bytes)
        if self.size_bytes:
            # The KV here is not encrypted yet, so core dumps must not contain it.
            self.memory.madvise(MADV_DONTDUMP)
        self.address = buffer_address(self.memory, writable=True)
        self._free = [(0, self.size_bytes)]
        """Free runs as (offset, length), by offset, never adjacent."""
        self._freed: collections.deque[tuple[int, int, bool]] = collections.deque()
        """Freed runs that are not in `_free` yet, and whether they belonged to puts."""
        self._put_bytes = self._used_bytes = 0
        self._waiting: dict[bool, collections.deque[tuple[int, asyncio.Future[Block]]]] = {
            False: collections.deque(),
            True: collections.deque(),
        }
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks now."""
        self._take_back()
        return self._used_bytes

    def fits(self, length: int, *, for_put: bool) -> bool:
        """Whether a block of this length could ever be allocated."""
        return pages(length) <= (self.put_limit_bytes if for_put else self.size_bytes)

    def take_now(self, length: int, *, for_put: bool) -> Block | None:
        """A block of at least `length` bytes if one is free and no caller waits."""
        if self._waiting[False] or (for_put and self._waiting[True]):
            return None
        return self._allocate(pages(length), for_put)

    async def take(self, length: int, *, for_put: bool) -> Block | None:
        """A block, when it is this caller's turn; None if too many wait. REQUIRES: `fits`.

        A cancelled wait takes nothing.
        """
        block = self.take_now(length, for_put=for_put)
        waiting = self._waiting[for_put]
        if block is not None or len(waiting) >= MAX_WAITING:
            return block
        self._loop = asyncio.get_running_loop()
        turn: asyncio.Future[Block] = self._loop.create_future()
        waiting.append((pages(length), turn))
        self._serve()  # bytes may have been freed before this caller began to wait
        try:
            return await turn
        except asyncio.CancelledError:
            self._loop.call_soon(self._serve)  # the next caller may have waited for this one's turn only
            raise

    def free(self, offset: int, length: int, for_put: bool) -> None:
        """Free a run, and have the waiting callers served on their loop. Any thread, also from a finalizer."""
        self._freed.append((offset, length, for_put))
        loop = self._loop
        if loop is not None and (self._waiting[False] or self._waiting[True]):
            try:
                loop.call_soon_threadsafe(self._serve)
            except RuntimeError:
                pass  # the loop is closed, so no caller waits on it any more

    def _allocate(self, room: int, for_put: bool) -> Block | None:
        self._take_back()
        if for_put and self._put_bytes + room > self.put_limit_bytes:
            return None
        # Puts take the lower end and loads the upper one, so that long-lived blocks leave no holes in the middle.
        for i in range(len(self._free)) if for_put else range(len(self._free) - 1, -1, -1):
            offset, length = self._free[i]
            if length < room:
                continue
            self._free[i : i + 1] = (
                [(offset + room if for_put else offset, length - room)] if length > room else []
            )
            self._used_bytes += room
            self._put_bytes += room if for_put else 0
            return Block(self, offset if for_put else offset + length - room, room, for_put)
        return None

    def _take_back(self) -> None:
        if not self._freed:
            return
        while self._freed:
            offset, length, for_put = self._freed.popleft()
            self._used_bytes -= length
            self._put_bytes -= length if for_put else 0
            self._free.append((offset, length))
        runs: list[tuple[int, int]] = []
        for offset, length in sorted(self._free):
            if runs and sum(runs[-1]) == offset:
                offset, length = runs[-1][0], runs.pop()[1] + length
            runs.append((offset, length))
        self._free = runs

    def _serve(self) -> None:
        for for_put in (False, True):
            waiting = self._waiting[for_put]
            while waiting:
                room, turn = waiting[0]
                if not turn.done():
                    block = self._allocate(room, for_put)
                    if block is None:
                        return  # puts stay behind, so that none takes the space that a load waits for
                    turn.set_result(block)
                waiting.popleft()
