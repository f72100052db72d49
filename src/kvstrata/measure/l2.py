"""Passes of verified puts, `exists` and loads of one storage adapter.

A pass puts records of random bytes under random keys, batch after batch, asks `exists` for them and for as many absent
keys, loads them into wiped extents, compares every byte, and deletes them.

1. Keys are 32 random bytes, so records of other users are never asked for, written or removed.
2. `Work.end` deletes the records that were put, even after a failure, once no put is running.
3. Extents belong to a real pool, small and private to this process, and the adapter gets them through real holds.

A run may be cancelled at any time; `Work.end` then waits for operations of the adapter that are still running.
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
from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.clock import SystemClock
from kvstrata.errors import InternalError, Refused, StorageError
from kvstrata.memory import linux
from kvstrata.native.core import Hold, LoadBatch, LoadRequest, Pool, RecordSpec, record_bytes, seal_record
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.tiers.base import AdapterContext, Ask, Item, Outcome, Presence
from kvstrata.tiers.tier import Tier
from kvstrata.types import KEY_BYTES

EXISTS_CALLS = 10
"""Calls of `exists` for each batch in a pass."""
DROP_S = 10.0
"""Limit for holds to be dropped after the answer to their batch; it takes milliseconds, unless something is stuck."""
IDENTITY = bytes(KEY_BYTES)
WIPED = 0xA5


class Pass(NamedTuple):
    """Seconds of each call in one pass, one call for each batch."""

    put: list[float]
    exists: list[float]
    load: list[float]
    moved_bytes: int
    """Bytes that each of put and load moved."""


class Records:
    """`count` records of `payload_bytes` bytes, with fresh keys in each pass, and a pool with extents for one batch.

    Owns the records' memory and the pool until `close`.
    """

    def __init__(self, payload_bytes: int, count: int, batch: int) -> None:
        """Raises OSError without enough memory."""
        self.count = count
        self.batch = min(batch, count)
        self.payload_bytes = payload_bytes
        self.record_bytes = record_bytes(1, payload_bytes)
        self._memory = mmap.mmap(-1, count * self.record_bytes)
        self._anchor = (ctypes.c_char * 1).from_buffer(self._memory)
        self._address = ctypes.addressof(self._anchor)
        source = random.Random(0)
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
        self._libc = ctypes.CDLL(None)
        self._libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def context(self) -> AdapterContext:
        """The context for opening an adapter on the pool's extents."""
        pool = self.pool
        return AdapterContext(
            "kvstrata-bench", SystemClock(), pool.extents_address, pool.extents_bytes, lambda key: None, self._fds[1]
        )  # fmt: skip

    def seal(self) -> None:
        """Give every record a fresh key."""
        self.keys = [secrets.token_bytes(KEY_BYTES) for _ in range(self.count)]
        for number, key in enumerate(self.keys):
            spec = RecordSpec(key, IDENTITY, bytes(KEY_BYTES), bytes(KEY_BYTES), 256)
            seal_record(self._at(number), self.record_bytes, spec, [self.payload_bytes])

    def committed(self, numbers: Sequence[int]) -> list[Hold]:
        """Commit these records to the pool, where a server's records lie before a put; returns holds on them.

        The caller drops the holds, then `forget` removes the records.  Raises StorageError if the adapter still holds
        extents of an earlier batch.
        """
        batch = self.reserved(numbers)
        for number, hold in zip(numbers, batch.holds, strict=True):
            ctypes.memmove(hold.address, self._at(number), self.record_bytes)
            hold.drop()
        if set(batch.finish(bytes([1]) * len(numbers))) != {CommitOutcome.COMMITTED}:
            raise InternalError("the pool refused a record of this benchmark")
        held, _ = self.pool.hold_batch(self._keys_of(numbers), self.pool.extents_bytes)
        return held

    async def forget(self, numbers: Sequence[int]) -> None:
        """Remove these records from the pool once no hold is left. Raises StorageError if holds stay for DROP_S."""
        left = [self.keys[number] for number in numbers]
        ends_s = time.monotonic() + DROP_S
        while left:
            left = [key for key in left if not self.pool.remove(key)]
            if left and time.monotonic() > ends_s:
                raise StorageError(
                    f"the adapter still holds {len(left)} extents after their batch was answered"
                )
            await asyncio.sleep(0.001 if left else 0)

    def reserved(self, numbers: Sequence[int]) -> LoadBatch:
        """Reserve extents for these records, as the server does for loads; they are given back with the batch.

        Raises StorageError if the adapter still holds extents of an earlier batch.
        """
        request = LoadRequest(self._keys_of(numbers), b"", [self.record_bytes], IDENTITY)
        batch = self.pool.reserve_batch(request, range(len(numbers)))
        if batch.refusal is not None:
            why = ReserveOutcome(batch.refusal[1]).name.lower()
            raise StorageError(
                f"no extent for a record ({why}): the adapter may hold those of an earlier batch"
            )
        return batch

    def wipe(self, hold: Hold) -> None:
        """Overwrite an extent."""
        ctypes.memset(hold.address, WIPED, self.record_bytes)

    def check(self, number: int, hold: Hold, what: str) -> None:
        """Compare every byte of a loaded record, and wipe it. Raises InternalError for a wrong byte."""
        if self._libc.memcmp(hold.address, self._at(number), self.record_bytes):
            raise InternalError(f"{what} gave other bytes than were stored")
        self.wipe(hold)

    def close(self) -> None:
        """Free everything; memory with a hold stays mapped until the hold is dropped."""
        self.pool.close()
        for fd in self._fds:
            os.close(fd)
        del self._anchor
        self._memory.close()

    def _at(self, number: int) -> int:
        return self._address + number * self.record_bytes

    def _keys_of(self, numbers: Sequence[int]) -> bytes:
        return b"".join([self.keys[number] for number in numbers])


class Work:
    """Passes of one open adapter; `end` deletes the stored records."""

    def __init__(self, tier: Tier, records: Records, batch: int = 0) -> None:
        """`batch`: most records of a call, by default that of `records`."""
        self._adapter, self._records = tier, records
        self._batch = batch or records.batch
        self._stored: list[bytes] = []

    async def run(self) -> Pass:
        """Run one pass.

        Raises Refused or StorageError if the adapter refuses a record, InternalError for wrong bytes.
        """
        records = self._records
        records.seal()
        taken = Pass([], [], [], records.count * records.record_bytes)
        batches = in_batches(records.count, records.batch)
        for step in (self._put, self._ask, self._load):
            for numbers in batches:
                await step(numbers, taken)
        if left := await self._delete(self._stored):
            raise StorageError(f"{self._adapter.name}: {left} of {records.count} records were not deleted")
        return taken

    async def end(self) -> int:
        """Delete the records of unfinished work; returns the number that may still be stored."""
        if self._adapter.running:  # a put that outlives its wait may still store
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._adapter.ended(), DROP_S)
        return await self._delete(self._stored)

    async def _delete(self, keys: Sequence[bytes]) -> int:
        """Delete records; returns the number that may still be stored."""
        for at in range(0, len(keys), self._batch):
            await self._adapter.delete(b"".join(keys[at : at + self._batch]))
        found = await self._adapter.exists(b"".join(keys), Ask())
        gone = {key for key, presence in zip(keys, found, strict=True) if presence == Presence.ABSENT}
        self._stored = [key for key in self._stored if key not in gone]
        return len(keys) - len(gone)

    def _check_found(self, found: bytes, why: str) -> None:
        """Check the answers of `exists` for keys that are alternately stored and absent, beginning with a stored one.

        Raises StorageError for a stored key that is not found, InternalError for an absent key that is found.
        """
        there, absent = found[::2], found[1::2]
        if wrong := there.replace(bytes([Presence.PRESENT]), b""):
            raise StorageError(
                f"{self._adapter.name}: exists: {len(wrong)} of {len(there)} stored records are "
                f"{Presence(wrong[0]).name.lower()} {why}".rstrip()
            )
        if Presence.PRESENT in absent:
            raise InternalError(f"{self._adapter.name}: exists: keys that were never stored are present")

    def _all(self, operation: str, outcome: Outcome, items: Sequence[Item]) -> None:
        wrong = [item for item in items if item.outcome is not outcome]
        if wrong:
            name, reason = wrong[0].outcome.name.lower(), wrong[0].reason
            raise Refused(
                f"{self._adapter.name}: {operation}: {len(wrong)} of {len(items)} records: {name}"
                f"{f' ({reason})' if reason else ''}"
            )

    async def _put(self, numbers: range, taken: Pass) -> None:
        records = self._records
        holds = records.committed(numbers)
        items = [Item(records.keys[n], hold) for n, hold in zip(numbers, holds, strict=True)]
        self._stored += [item.key for item in items]
        begun_s = time.perf_counter()
        settled = await self._adapter.put(items)
        taken.put.append(time.perf_counter() - begun_s)
        self._all("put", Outcome.STORED, settled)
        await records.forget(numbers)

    async def _ask(self, numbers: range, taken: Pass) -> None:
        records = self._records
        keys = [key for number in numbers for key in (records.keys[number], secrets.token_bytes(KEY_BYTES))]
        asked = b"".join(keys)
        for _ in range(EXISTS_CALLS):
            begun_s = time.perf_counter()
            ask = Ask()
            found = await self._adapter.exists(asked, ask)
            taken.exists.append(time.perf_counter() - begun_s)
            self._check_found(found, ask.reason)

    async def _load(self, numbers: range, taken: Pass) -> None:
        records = self._records
        batch = records.reserved(numbers)
        items = [Item(records.keys[n], hold) for n, hold in zip(numbers, batch.holds, strict=True)]
        for item in items:
            records.wipe(item.hold)
        begun_s = time.perf_counter()
        settled = await self._adapter.load(items)
        taken.load.append(time.perf_counter() - begun_s)
        self._all("load", Outcome.LOADED, settled)
        for number, item in zip(numbers, items, strict=True):  # the reservation keeps the bytes
            records.check(number, item.hold, f"{self._adapter.name}: load")


def in_batches(count: int, batch: int) -> list[range]:
    """The numbers from 0 to count - 1, in runs of `batch`; the last run may be shorter."""
    return [range(at, min(at + batch, count)) for at in range(0, count, batch)]
