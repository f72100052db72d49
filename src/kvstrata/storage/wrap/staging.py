"""Staging memory of the codec wrapper: a fixed number of bytes outside L1.

Invariants
1. Blocks never overlap, and together never exceed the size; the blocks of puts together never exceed half of it.
2. A block is free again when all its holders have let go of it, in any thread.
3. Waiting callers are served in order, loads before puts.  Half of the staging is always left to loads, so that puts
   into a medium that keeps their bytes for long cannot block all loads.

Staging is not registered with any device, and no other process can see it.
"""

from __future__ import annotations

import asyncio
import collections
import mmap
import threading

from kvstrata.native.core import buffer_address

PAGE_BYTES = 4096
"""Blocks begin at multiples of this, as direct I/O requires."""
MAX_WAITING = 256
"""Most operations that may wait for room."""


def pages(length: int) -> int:
    """A length rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


class StagingHold:
    """A hold on a block of staging, with the interface of a hold on an extent.

    It ends by `drop`, or with the object.
    """

    offset = 0
    generation = 0

    def __init__(self, block: Block, key: bytes, length: int) -> None:
        self.key = key
        self.length = length
        self.address = block.address
        self._block: Block | None = block

    def view(self) -> memoryview:
        """The bytes, writable."""
        block = self._block
        if block is None:
            raise ValueError("the hold was dropped")
        return block.view(self.length)

    def drop(self) -> None:
        """End the hold. Idempotent; thread-safe."""
        block, self._block = self._block, None
        if block is not None:
            block.let_go()

    def __del__(self) -> None:
        self.drop()


class Block:
    """Some bytes of staging. The caller of `take` holds it, and so does each StagingHold made from it."""

    def __init__(self, staging: Staging, offset: int, room: int, for_put: bool) -> None:
        self.address = staging.address + offset
        self.offset = offset
        self.room = room
        self.for_put = for_put
        self._staging = staging
        self._holders = 1

    def view(self, length: int) -> memoryview:
        """The first `length` bytes."""
        assert length <= self.room
        return memoryview(self._staging.memory)[self.offset : self.offset + length]

    def hold(self, key: bytes, length: int) -> StagingHold:
        """One more hold on the block, for an adapter."""
        self._staging.share(self)
        return StagingHold(self, key, length)

    def shrink(self, length: int) -> None:
        """Free all but the first `length` bytes. Only before `hold`."""
        self._staging.shrink(self, pages(length))

    def let_go(self) -> None:
        """One holder has finished with the block."""
        self._staging.let_go(self)


MADV_DONTDUMP = 16


class _Waiter:
    def __init__(self, room: int, future: asyncio.Future[Block]) -> None:
        self.room = room
        self.future = future


class Staging:
    """See the module. `take` belongs to one event loop."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        self.put_limit_bytes = self.size_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        # The kernel gives memory only to pages that were written.
        self.memory = mmap.mmap(-1, self.size_bytes)
        if self.size_bytes:
            # The KV here is not encrypted yet, so core dumps must not contain it.
            self.memory.madvise(MADV_DONTDUMP)
        self.address = buffer_address(self.memory, writable=True)
        self._lock = threading.Lock()
        self._free = [(0, self.size_bytes)]
        """Free runs as (offset, length), by offset, never adjacent."""
        self._put_bytes = 0
        self._used_bytes = 0
        self._waiting: dict[bool, collections.deque[_Waiter]] = {
            False: collections.deque(),
            True: collections.deque(),
        }
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks now."""
        return self._used_bytes

    def fits(self, length: int, *, for_put: bool) -> bool:
        """Whether a block of this length could ever be given."""
        return pages(length) <= (self.put_limit_bytes if for_put else self.size_bytes)

    def take_now(self, length: int, *, for_put: bool) -> Block | None:
        """A block of at least `length` bytes if there is room and nobody waits for room."""
        if self._waiting[False] or (for_put and self._waiting[True]):
            return None
        return self._allocate(pages(length), for_put)

    async def take(self, length: int, *, for_put: bool) -> Block | None:
        """A block, as soon as it is this caller's turn; None when too many wait. REQUIRES: `fits`.

        A cancelled wait takes nothing.
        """
        block = self.take_now(length, for_put=for_put)
        if block is not None:
            return block
        waiting = self._waiting[for_put]
        if len(waiting) >= MAX_WAITING:
            return None
        self._loop = asyncio.get_running_loop()
        waiter = _Waiter(pages(length), self._loop.create_future())
        waiting.append(waiter)
        self._serve()  # bytes may have been freed before this caller began to wait
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.result().let_go()
            else:
                if waiter in waiting:  # `_serve` may have passed over it already
                    waiting.remove(waiter)
                self._serve()
            raise

    def share(self, block: Block) -> None:
        """Count one more holder of the block."""
        with self._lock:
            block._holders += 1

    def shrink(self, block: Block, room: int) -> None:
        """See Block."""
        if room < block.room:
            with self._lock:
                self._give_back(block.offset + room, block.room - room, block.for_put)
                block.room = room
            self._tell()

    def let_go(self, block: Block) -> None:
        """See Block."""
        with self._lock:
            block._holders -= 1
            assert block._holders >= 0
            if block._holders:
                return
            self._give_back(block.offset, block.room, block.for_put)
        self._tell()

    def _allocate(self, room: int, for_put: bool) -> Block | None:
        with self._lock:
            if for_put and self._put_bytes + room > self.put_limit_bytes:
                return None
            # Puts take the lower end and loads the upper one, so that long-lived blocks leave no holes in the middle.
            places = range(len(self._free)) if for_put else range(len(self._free) - 1, -1, -1)
            for i in places:
                offset, length = self._free[i]
                if length >= room:
                    if for_put:
                        self._free[i] = (offset + room, length - room)
                    else:
                        self._free[i] = (offset, length - room)
                        offset += length - room
                    if length == room:
                        del self._free[i]
                    self._used_bytes += room
                    self._put_bytes += room if for_put else 0
                    return Block(self, offset, room, for_put)
        return None

    def _give_back(self, offset: int, length: int, for_put: bool) -> None:
        self._used_bytes -= length
        self._put_bytes -= length if for_put else 0
        at = 0
        while at < len(self._free) and self._free[at][0] < offset:
            at += 1
        if at < len(self._free) and offset + length == self._free[at][0]:
            length += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            offset, length = self._free[at - 1][0], self._free[at - 1][1] + length
            at -= 1
            del self._free[at]
        self._free.insert(at, (offset, length))

    def _tell(self) -> None:
        """Have the waiting callers served on their loop. Thread-safe."""
        loop = self._loop
        if loop is not None and (self._waiting[False] or self._waiting[True]):
            try:
                loop.call_soon_threadsafe(self._serve)
            except RuntimeError:
                pass  # the loop is closed, so nobody waits on it any more

    def _serve(self) -> None:
        for for_put in (False, True):
            waiting = self._waiting[for_put]
            while waiting:
                if waiting[0].future.done():
                    waiting.popleft()
                    continue
                block = self._allocate(waiting[0].room, for_put)
                if block is None:
                    return  # puts stay behind, so that none takes the room that a load waits for
                waiting.popleft().future.set_result(block)
