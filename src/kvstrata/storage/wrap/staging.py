"""Staging memory of the codec wrapper: a fixed number of bytes, never of L1.

Invariants
1. Blocks never overlap, and all of them together never exceed the size; puts together never exceed half of it.
2. A block is free again when everybody who holds it has let go, in whatever thread that happens.
3. Whoever waits is served in order, loads before puts: since puts leave them half, no put, however long its
   medium keeps the bytes, keeps all loads waiting.

A block of staging is not registered with any device and no other process can see it.
"""

from __future__ import annotations

import asyncio
import collections
import mmap
import threading

from kvstrata.native.copying import buffer_address

PAGE_BYTES = 4096
"""Blocks begin at multiples of this, as direct I/O wants it."""
MAX_WAITING = 256
"""Operations that may wait for room."""


def pages(length: int) -> int:
    """Rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


class StagingHold:
    """A block of staging as an adapter sees it: looks like a hold on an extent.

    Let go of by `drop` or with the object.
    """

    offset = 0
    generation = 0

    def __init__(self, block: Block, key: bytes, length: int) -> None:
        self.key = key
        self.length = length
        self.address = block.address
        self._block: Block | None = block

    @property
    def is_held(self) -> bool:
        """Not dropped yet."""
        return self._block is not None

    def view(self) -> memoryview:
        """The bytes, writable."""
        block = self._block
        if block is None:
            raise ValueError("the hold was dropped")
        return block.view(self.length)

    def drop(self) -> None:
        """Idempotent; any thread."""
        block, self._block = self._block, None
        if block is not None:
            block.let_go()

    def __del__(self) -> None:
        self.drop()


class Block:
    """Some bytes of staging, held by whoever took them and by each hold made of them."""

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
        """What an adapter gets; the block stays until it and the others have let go."""
        self._staging.share(self)
        return StagingHold(self, key, length)

    def shrink(self, length: int) -> None:
        """Give back what lies behind the first `length` bytes. Only before `hold`."""
        self._staging.shrink(self, pages(length))

    def let_go(self) -> None:
        """One holder less."""
        self._staging.let_go(self)


class _Waiter:
    def __init__(self, room: int, future: asyncio.Future[Block]) -> None:
        self.room = room
        self.future = future


class Staging:
    """See the module. `take` belongs to one event loop."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        self.put_limit_bytes = self.size_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        self.memory = mmap.mmap(-1, self.size_bytes)  # takes memory only where it was written
        self.address = buffer_address(self.memory, writable=True)
        self._lock = threading.Lock()
        self._free = [(0, self.size_bytes)]
        """(offset, length), by offset, never adjacent."""
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
        """Whether so many bytes could ever be given at once."""
        return pages(length) <= (self.put_limit_bytes if for_put else self.size_bytes)

    def take_now(self, length: int, *, for_put: bool) -> Block | None:
        """A block of at least `length` bytes if there is room and nobody waits for it."""
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
        self._serve()  # what was freed since `take_now` looked has told nobody
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.result().let_go()
            else:
                waiting.remove(waiter)
                self._serve()
            raise

    def share(self, block: Block) -> None:
        """One holder more."""
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
            # Puts from the lower end, loads from the upper one: the lasting ones leave no holes in the middle.
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
        """Serve those who wait, on their loop."""
        loop = self._loop
        if loop is not None and (self._waiting[False] or self._waiting[True]):
            try:
                loop.call_soon_threadsafe(self._serve)
            except RuntimeError:
                pass  # the loop is closed: nobody waits on it any more

    def _serve(self) -> None:
        for for_put in (False, True):
            waiting = self._waiting[for_put]
            while waiting:
                if waiting[0].future.done():
                    waiting.popleft()
                    continue
                block = self._allocate(waiting[0].room, for_put)
                if block is None:
                    return  # and no put takes what a load waits for
                waiting.popleft().future.set_result(block)
