"""Rounds of puts, `exists` and loads of one storage adapter, verified, beside raw O_DIRECT I/O of the same records.

A pass puts records of random bytes under random keys, batch after batch, asks for them and for as many that nobody
has, loads them into wiped extents, compares every byte, and deletes them.  The bare disk writes and reads the same
bytes from and to the same extents, in turns with the adapter, batch by batch.

1. Keys are 32 random bytes: no record of anybody else is asked for, written or removed.
2. What was put is deleted by `Work.end`, whatever went wrong, once no put runs any more; with `keep` whole
   passes stay.
3. Extents are of a real pool, small and of this process alone, and the adapter has them by real holds.

It stops between two calls of the adapter, never in one: each ends at the adapter's deadline at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstrata.clock import SystemClock
from kvstrata.errors import InternalError, Refused, StorageError
from kvstrata.measure.raw_io import RawFiles, in_batches
from kvstrata.memory import linux
from kvstrata.native.copying import RecordSpec, record_bytes, seal_record
from kvstrata.native.pool import Hold, Pool
from kvstrata.rpc.wire import CommitOutcome
from kvstrata.storage.base import AdapterContext, Found, LoadItem, LoadStatus, Presence, PutItem, PutStatus
from kvstrata.storage.registry import ConfiguredAdapter
from kvstrata.types import KEY_BYTES, unpack_extents

EXISTS_CALLS = 10
"""Of each batch in a pass."""
DROP_S = 10.0
"""For holds to be dropped after their batch was answered; milliseconds at most, unless something is stuck."""
IDENTITY = bytes(KEY_BYTES)
WIPED = 0xA5


class Interrupted(Exception):
    """The run was asked to stop."""


class Pass(NamedTuple):
    """Seconds of each call of one pass, a call a batch; of raw I/O none where there is none."""

    put: list[float]
    raw_write: list[float]
    exists: list[float]
    load: list[float]
    raw_read: list[float]
    moved_bytes: int
    """Bytes that each of put, load and raw I/O moved."""


class Records:
    """`count` records of `payload_bytes` under fresh keys in each pass, and a pool with extents for a batch."""

    def __init__(self, payload_bytes: int, count: int, batch: int, seed: int) -> None:
        """Raises OSError where there is no memory."""
        self.count = count
        self.batch = min(batch, count)
        self.payload_bytes = payload_bytes
        self.record_bytes = record_bytes(1, payload_bytes)
        self._memory = mmap.mmap(-1, count * self.record_bytes)
        self._anchor = (ctypes.c_char * 1).from_buffer(self._memory)
        self._address = ctypes.addressof(self._anchor)
        source = random.Random(seed)
        for number in range(count):
            end = (number + 1) * self.record_bytes
            self._memory[end - payload_bytes : end] = source.randbytes(payload_bytes)
        self.keys: list[bytes] = []
        self._fds = [linux.create_memfd(f"kvstrata-bench-{name}") for name in ("index", "extents")]
        self.pool = Pool.create(
            *self._fds,
            extents_bytes=-(-self.record_bytes // mmap.PAGESIZE) * mmap.PAGESIZE * self.batch,
            entry_capacity=max(64, 2 * self.batch),
            policy="noop",
            max_session_share=1,
        )
        self.pool.prefault_start(1)
        self._row = self.pool.claim_row(secrets.token_bytes(16), secrets.token_bytes(16), os.getpid())
        self._libc = ctypes.CDLL(None)
        self._libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def context(self, record_evicted: Callable[[bytes], None]) -> AdapterContext:
        """What the adapter is lent."""
        return AdapterContext(
            "kvstrata-bench", SystemClock(), self.pool.extents_address, self.pool.extents_bytes, record_evicted,
            self._fds[1],
        )  # fmt: skip

    def seal(self) -> None:
        """Give every record a fresh key."""
        self.keys = [secrets.token_bytes(KEY_BYTES) for _ in range(self.count)]
        for number, key in enumerate(self.keys):
            spec = RecordSpec(key, IDENTITY, bytes(KEY_BYTES), bytes(KEY_BYTES), 256)
            seal_record(self._at(number), self.record_bytes, spec, [self.payload_bytes])

    def committed(self, numbers: Sequence[int]) -> list[Hold]:
        """The records in the pool, as the server has what it puts. They leave by `forget`."""
        held = []
        for number in numbers:
            ticket, address = self._reserve(number)
            ctypes.memmove(address, self._at(number), self.record_bytes)
            if self.pool.commit(ticket, [0]) != bytes([CommitOutcome.COMMITTED]):
                raise InternalError("the pool refused a record of this benchmark")
            hold = self.pool.hold(self.keys[number])
            assert hold is not None
            held.append(hold)
        return held

    async def forget(self, numbers: Sequence[int]) -> None:
        """Remove them from the pool, once nobody holds them. Raises StorageError where that does not happen."""
        left = [self.keys[number] for number in numbers]
        ends_s = time.monotonic() + DROP_S
        while left:
            left = [key for key in left if not self.pool.remove(key)]
            if left and time.monotonic() > ends_s:
                raise StorageError(
                    f"the adapter still holds {len(left)} extents after their batch was answered"
                )
            await asyncio.sleep(0.001 if left else 0)

    @contextlib.contextmanager
    def reserved(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Reservations of wiped extents for these records, as the server has for what it loads."""
        tickets = []
        try:
            for number in numbers:
                ticket, address = self._reserve(number)
                ctypes.memset(address, WIPED, self.record_bytes)
                tickets.append(ticket)
            yield tickets
        finally:
            for ticket in tickets:
                self.pool.abort(ticket)

    def hold(self, ticket: int) -> Hold:
        """A hold on a reserved extent."""
        hold = self.pool.hold(reserved_ticket=ticket, index=0)
        assert hold is not None
        return hold

    def check(self, numbers: Sequence[int], tickets: Sequence[int], what: str) -> None:
        """Compare every byte of what was read, and wipe it. Raises InternalError for one that differs."""
        for number, ticket in zip(numbers, tickets, strict=True):
            with self.hold(ticket) as hold:
                if self._libc.memcmp(hold.address, self._at(number), self.record_bytes):
                    raise InternalError(f"{what} gave other bytes than were stored")
                ctypes.memset(hold.address, WIPED, self.record_bytes)

    def close(self) -> None:
        """Free everything; what is still held stays mapped until it is dropped."""
        self.pool.close()
        for fd in self._fds:
            os.close(fd)
        del self._anchor
        self._memory.close()

    def _at(self, number: int) -> int:
        return self._address + number * self.record_bytes

    def _reserve(self, number: int) -> tuple[int, int]:
        ticket, _, packed = self.pool.reserve(self.keys[number], b"", self.record_bytes, self._row, IDENTITY)
        if not ticket:
            raise StorageError("the adapter still holds extents of an earlier batch")
        return ticket, self.pool.extents_address + unpack_extents(packed)[0].offset_bytes


class Work:
    """What is done with one open adapter: stops at the next call after `stop`, and `end` deletes what it stored."""

    def __init__(self, built: ConfiguredAdapter, records: Records, batch: int) -> None:
        self._built = built
        self._adapter = built.adapter
        self._records = records
        self._batch = batch
        self._stored: list[bytes] = []
        self._stopping = False

    def stop(self) -> None:
        """Raise Interrupted before the next call."""
        self._stopping = True

    async def end(self) -> int:
        """Delete what is there of unfinished work; how many records may still be stored."""
        if self._built.guard.running:  # a put that outlives its deadline may still store
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._built.guard.ended(), DROP_S)
        return await self._delete(self._stored)

    async def _delete(self, keys: Sequence[bytes]) -> int:
        """Delete these of what is stored; how many of them may be left."""
        for at in range(0, len(keys), self._batch):
            await self._adapter.delete(keys[at : at + self._batch])
        found = await self._adapter.exists(keys) if keys else []
        gone = {key for key, f in zip(keys, found, strict=True) if f.presence is Presence.ABSENT}
        self._stored = [key for key in self._stored if key not in gone]
        return len(keys) - len(gone)

    def _check_found(self, found: Sequence[Found]) -> None:
        """Of keys of which every second one is stored, the first one among them."""
        there, absent = found[::2], found[1::2]
        length = self._records.record_bytes
        if wrong := [f for f in there if (f.presence, f.record_bytes) != (Presence.PRESENT, length)]:
            raise StorageError(
                f"{self._adapter.name}: exists: {len(wrong)} of {len(there)} records that were stored are "
                f"{wrong[0].presence.name.lower()} {wrong[0].reason} with {wrong[0].record_bytes} bytes"
            )
        if any(f.presence is Presence.PRESENT for f in absent):
            raise InternalError(f"{self._adapter.name}: exists: keys that nobody stored are present")

    def _all(self, operation: str, outcomes: Sequence[tuple[bool, str, str]]) -> None:
        wrong = [(name.lower(), reason) for fine, name, reason in outcomes if not fine]
        if wrong:
            name, reason = wrong[0]
            raise Refused(
                f"{self._adapter.name}: {operation}: {len(wrong)} of {len(outcomes)} records: {name}"
                f"{f' ({reason})' if reason else ''}"
            )

    def _go_on(self) -> None:
        if self._stopping:
            raise Interrupted


class Workload(Work):
    """Passes beside the bare disk. `moved(bytes)` is called after each batch."""

    def __init__(
        self,
        built: ConfiguredAdapter,
        records: Records,
        raw: RawFiles | None,
        *,
        keep: bool,
        moved: Callable[[int], None],
    ) -> None:
        super().__init__(built, records, records.batch)
        self._raw = raw
        self._keep = keep
        self._moved = moved
        self.kept = 0
        """Records that stay because of `keep`."""

    async def run(self, number: int) -> Pass:
        """One pass; odd ones begin each batch with the adapter, even ones with the bare disk.

        Raises StorageError for what the adapter refuses, InternalError for wrong bytes, OSError for raw I/O.
        """
        records = self._records
        records.seal()
        taken = Pass([], [], [], [], [], records.count * records.record_bytes)
        batches = in_batches(records.count, records.batch)
        for at, numbers in enumerate(batches):
            self._go_on()
            await self._put(numbers, taken, adapter_first=bool((number + at) % 2))
        for numbers in batches:
            await self._ask(numbers, taken)
        for at, numbers in enumerate(batches):
            self._go_on()
            await self._load(numbers, taken, adapter_first=bool((number + at) % 2))
        if self._raw is not None:
            self._raw.remove(range(records.count))
        if self._keep:
            self.kept += len(self._stored)
            self._stored = []
        elif left := await self._delete(self._stored):
            raise StorageError(f"{self._adapter.name}: {left} of {records.count} records were not deleted")
        return taken

    async def _put(self, numbers: range, taken: Pass, *, adapter_first: bool) -> None:
        records = self._records
        holds = records.committed(numbers)
        with (
            contextlib.ExitStack() as own
        ):  # the adapter drops its own holds; raw I/O has others on the same bytes
            for hold in holds:
                own.callback(hold.drop)
            raw_holds: list[Hold] = []
            for number in numbers:
                second = records.pool.hold(records.keys[number])
                assert second is not None
                raw_holds.append(own.enter_context(second))
            if not adapter_first:
                self._raw_write(numbers, raw_holds, taken)
            items = [PutItem(records.keys[n], hold) for n, hold in zip(numbers, holds, strict=True)]
            self._stored += [item.key for item in items]
            begun_s = time.perf_counter()
            outcomes = await self._adapter.put(items)
            taken.put.append(time.perf_counter() - begun_s)
            self._all("put", [(o.status is PutStatus.STORED, o.status.name, o.reason) for o in outcomes])
            if adapter_first:
                self._raw_write(numbers, raw_holds, taken)
        await records.forget(numbers)
        self._moved(len(numbers) * records.record_bytes)

    async def _ask(self, numbers: range, taken: Pass) -> None:
        records = self._records
        keys = [key for number in numbers for key in (records.keys[number], secrets.token_bytes(KEY_BYTES))]
        for _ in range(EXISTS_CALLS):
            self._go_on()
            begun_s = time.perf_counter()
            found = await self._adapter.exists(keys)
            taken.exists.append(time.perf_counter() - begun_s)
            self._check_found(found)

    async def _load(self, numbers: range, taken: Pass, *, adapter_first: bool) -> None:
        records = self._records
        with records.reserved(numbers) as tickets:
            if not adapter_first:
                self._raw_read(numbers, tickets, taken)
            holds = [records.hold(ticket) for ticket in tickets]
            items = [LoadItem(records.keys[n], hold) for n, hold in zip(numbers, holds, strict=True)]
            begun_s = time.perf_counter()
            outcomes = await self._adapter.load(items)
            taken.load.append(time.perf_counter() - begun_s)
            self._all("load", [(o.status is LoadStatus.LOADED, o.status.name, o.reason) for o in outcomes])
            records.check(numbers, tickets, f"{self._adapter.name}: load")
            if adapter_first:
                self._raw_read(numbers, tickets, taken)
        self._moved(len(numbers) * records.record_bytes)

    def _raw_write(self, numbers: range, holds: Sequence[Hold], taken: Pass) -> None:
        if self._raw is not None:
            taken.raw_write.append(self._raw.write_s(numbers, [hold.view() for hold in holds]))

    def _raw_read(self, numbers: range, tickets: Sequence[int], taken: Pass) -> None:
        if self._raw is None:
            return
        with contextlib.ExitStack() as own:
            holds = [own.enter_context(self._records.hold(ticket)) for ticket in tickets]
            taken.raw_read.append(self._raw.read_s(numbers, [hold.view() for hold in holds]))
            self._records.check(numbers, tickets, "raw I/O")
