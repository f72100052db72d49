"""The `object_store` adapter: records as objects in S3, GCS or Azure; the same URL means shared records.

    <url>/<first two hex digits>/<64 hex digits of the key>.kvc  ->  the record, byte for byte as it lies in L1
    <url>/kvstrata-format                                        ->  the version of the records

The library (obstore) makes the transfers on threads of its own.  Each transfer occupies a thread of a lane, which waits
with the GIL dropped, so the lanes bound the number of transfers.

Invariants
1. Only objects with exactly these names are read, written or removed.
2. A put reads the extent in place.  Its hold ends when the library releases the bytes, not before, whatever
   the outcome of the request.
3. A put creates an object and never replaces one, unless the existing object has another length.  Above
   `multipart_bytes` the store cannot guarantee that: two servers that put a record at the same time both upload it, and
   one of the two objects stays.
4. A record is verified in its extent.  A bad object is removed if its ETag is still that of the object that was read.
   If another server puts a good record between this check and the removal, the good one is removed and must be put
   again.
5. The library repeats failed requests; the adapter does not repeat them once more.

The adapter has no cap (a bucket's lifecycle rules can limit it), and no request that serves users lists the bucket.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstrata.errors import ConfigError, StorageError
from kvstrata.native.record import CopyOutcome, verify_stored_record
from kvstrata.policy.reasons import BAD_ITEM, CLOSED, MISMATCH, QUEUE_FULL, THROTTLED
from kvstrata.storage.base import (
    HEAD_BYTES,
    AdapterContext,
    Capabilities,
    Found,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.storage.lanes import Lane, Lanes
from kvstrata.storage.media.object_store.failures import LATER, RANGE, advice, is_wrong, plain, reason_of
from kvstrata.storage.media.object_store.listing import pages
from kvstrata.storage.media.object_store.names import (
    MARKER,
    MARKER_TEXT,
    MOST_MARKER_BYTES,
    path_of,
)
from kvstrata.storage.media.object_store.settings import ObjectStoreSettings
from kvstrata.storage.media.object_store.sharing import Item, Part, refused, share
from kvstrata.storage.work import Work
from kvstrata.types import KEY_BYTES

try:
    import obstore
    from obstore import exceptions

    _ERRORS = (exceptions.BaseError, OSError, NotImplementedError)
except ImportError:  # config.py then refuses the type and says what to install, so this module is not used
    pass

T = TypeVar("T")

log = logging.getLogger(__name__)

DEFAULT_WORKERS = {Lane.LOOKUP: 16, Lane.LOAD: 16, Lane.PUT: 8}
COUNTED_FOR_S = 600.0
MAX_COUNTED = 100_000
"""Most objects that `usage` lists; in a larger store it counts only these and the puts since."""
NOTE_EVERY_S = 60.0
LONGEST_BYTES = (1 << 32) - 1
"""Longest record that its header can describe."""


class ObjectStoreAdapter(StorageAdapter):
    """See the module."""

    def __init__(self, settings: ObjectStoreSettings, *, name: str = "object_store") -> None:
        self.name = name
        self.capabilities = Capabilities(
            persistent=True, shared=True, medium=settings.medium, max_batch=64, has_heads=True
        )
        self.settings = settings
        self._lanes = Lanes(name, num_workers=settings.num_workers, per_op_workers=settings.per_op_workers)
        self._lookups = settings.per_op_workers.get(Lane.LOOKUP, settings.num_workers)
        self._store: Any = None
        self._creates = True
        """Whether the store can refuse to replace an object."""
        self._work = Work(name)
        self._closed = True
        self._counting = threading.Lock()
        self._listing: asyncio.Task[Usage] | None = None
        """The one listing that runs; all callers of `usage` wait for it."""
        self._usage = Usage(0, 0, 0)
        self._counted_s: float | None = None
        self._noted: dict[str, float] = {}
        self._bad_objects = 0

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Reach the store; check, or write, the object that names the version. Raises StorageError, ConfigError."""
        try:
            await self._in_lane(Lane.LOOKUP, self._reach)
        except (*_ERRORS, ValueError) as error:
            await self._lanes.close()
            kind = ConfigError if is_wrong(error) else StorageError
            raise kind(
                f"{self.name}: url: {self.settings.url!r} {advice(error)}: {plain(error)}", field="url"
            ) from None
        except ConfigError:
            await self._lanes.close()
            raise
        self._closed = False

    def _reach(self) -> None:
        self._store = self.settings.connect()
        try:
            marker = obstore.get(self._store, MARKER)
            found = bytes(marker.bytes()) if marker.meta["size"] <= MOST_MARKER_BYTES else b"too many bytes"
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
        else:
            if found != MARKER_TEXT:
                raise ConfigError(
                    f"{self.name}: url: {self.settings.url!r} holds records of another version, its {MARKER!r} says"
                    f" {found[:60]!r}; choose another prefix",
                    field="url",
                )
            return
        try:
            obstore.put(self._store, MARKER, MARKER_TEXT, mode="create", use_multipart=False)
        except NotImplementedError:
            self._creates = False
            obstore.put(self._store, MARKER, MARKER_TEXT, use_multipart=False)
        except exceptions.AlreadyExistsError:  # another server has just written it
            pass

    async def close(self) -> None:
        """Wait for the operations in flight. Idempotent."""
        self._closed = True
        await self._work.ended()
        await self._lanes.close()

    # -- the contract: each batch is a task of the adapter, and a cancelled call ends only its wait --------

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """Send a HEAD for each key, concurrently in the lookup lane."""
        return await self._spread(
            list(keys), self._find, Found(Presence.UNKNOWN, 0, CLOSED), Found(Presence.UNKNOWN, 0, THROTTLED)
        )

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """Read the first bytes of each record, concurrently in the lookup lane."""
        return await self._spread(list(keys), self._read_head, b"", b"")

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Put the records, divided among the threads of the lane."""
        if self._closed:
            return refused(items, PutOutcome(PutStatus.FAILED, CLOSED))
        full = PutOutcome(PutStatus.THROTTLED, QUEUE_FULL)
        return await self._work.own(self._share(Lane.PUT, items, self._write, full))

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """Load the records, divided among the threads of the lane; parts of a large one are loaded concurrently."""
        if self._closed:
            return refused(items, LoadOutcome(LoadStatus.FAILED, CLOSED))
        return await self._work.own(self._load(items))

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Remove in bulk the records that a HEAD finds."""
        if self._closed:
            return 0
        paths = [path_of(key) for key in dict.fromkeys(keys) if len(key) == KEY_BYTES]
        return await self._work.own(self._in_lane(Lane.DELETE, lambda: self._delete(paths)))

    async def clear(self) -> int:
        """List the records below the prefix and remove them. Raises StorageError."""
        if self._closed:
            return 0
        try:
            return await self._work.own(self._in_lane(Lane.DELETE, self._clear))
        except _ERRORS as error:
            raise StorageError(f"{self.name}: cannot be cleared: {plain(error)}", field=self.name) from None

    async def usage(self) -> Usage:
        """The records of the last listing, and this server's changes since then.

        A listing stops after MAX_COUNTED records, and is repeated once it is COUNTED_FOR_S old.
        """
        if self._closed:
            return Usage(0, 0, 0)
        if self._listing is None or self._listing.done():
            self._listing = self._work.start(self._in_lane(Lane.DELETE, self._count))
        return await asyncio.shield(self._listing)

    def numbers(self) -> dict[str, int]:
        """The number of objects since the start that had a record's name but were not a sound record."""
        return {"bad_objects": self._bad_objects}

    # -- on the event loop ---------------------------------------------------------------------------------

    async def _in_lane(self, lane: Lane, work: Callable[[], T]) -> T:
        """Run work that even a full lane must take: the rest of a load, and work that never runs twice at a time."""
        done = self._lanes.submit(lane, work, beyond_limit=True)
        assert done is not None, "refused work that has no limit"
        return await done

    async def _spread(self, keys: list[bytes], ask: Callable[[bytes], T], closed: T, refused: T) -> list[T]:
        """Ask for all keys, divided among the threads of the lookup lane.

        Keys whose share a full lane does not take get the answer `refused`; after `close`, all keys get `closed`.
        """
        if self._closed or not keys:
            return [closed] * len(keys)
        count = min(len(keys), self._lookups)

        def share(number: int) -> list[T]:
            return [ask(key) for key in keys[number::count]]

        async def shares() -> list[T]:
            answers = [refused] * len(keys)
            waits = [self._lanes.submit(Lane.LOOKUP, functools.partial(share, n)) for n in range(count)]
            for number, wait in enumerate(waits):
                if wait is not None:
                    answers[number::count] = await wait
            return answers

        return await self._work.own(shares())

    async def _share(self, lane: Lane, items: Sequence[Item], work: Callable[[Item], T], full: T) -> list[T]:
        n_threads = self.settings.per_op_workers.get(lane, self.settings.num_workers)
        return await share(functools.partial(self._lanes.submit, lane), n_threads, items, work, full)

    async def _load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        step, full = self.settings.part_bytes, LoadOutcome(LoadStatus.FAILED, THROTTLED)
        small = {number: item for number, item in enumerate(items) if item.hold.length <= step}
        large = {number: item for number, item in enumerate(items) if number not in small}
        of_small, of_large = await asyncio.gather(
            self._share(Lane.LOAD, list(small.values()), self._load_whole, full),
            asyncio.gather(*map(self._load_parts, large.values())),
        )
        outcomes = dict(zip((*small, *large), (*of_small, *of_large), strict=True))
        return [outcomes[number] for number in range(len(items))]

    async def _load_parts(self, item: LoadItem) -> LoadOutcome:
        """Load a record that is longer than a part."""
        length, step = item.hold.length, self.settings.part_bytes
        first = self._lanes.submit(Lane.LOAD, functools.partial(self._read, item, 0, step))
        if first is None:
            return refused([item], LoadOutcome(LoadStatus.FAILED, THROTTLED))[0]
        rest = [
            self._in_lane(Lane.LOAD, functools.partial(self._read, item, at, min(at + step, length)))
            for at in range(step, length, step)
        ]
        parts = list(await asyncio.gather(first, *rest, return_exceptions=True))
        return await self._in_lane(Lane.LOAD, lambda: self._judge(item, lambda: parts))

    # -- in the lanes' threads -----------------------------------------------------------------------------

    def _find(self, key: bytes) -> Found:
        if len(key) != KEY_BYTES:
            return Found(Presence.UNKNOWN, 0, BAD_ITEM)
        try:
            size = self._size(path_of(key))
        except _ERRORS as error:
            return Found(Presence.UNKNOWN, 0, self._note(error))
        if size is None or not HEAD_BYTES <= size <= LONGEST_BYTES:  # not a record; the next put replaces it
            return Found(Presence.ABSENT)
        return Found(Presence.PRESENT, size)

    def _read_head(self, key: bytes) -> bytes:
        try:
            return bytes(obstore.get_range(self._store, path_of(key), start=0, end=HEAD_BYTES))
        except _ERRORS:
            return b""

    def _write(self, item: PutItem) -> PutOutcome:
        if len(item.key) != KEY_BYTES:
            return refused([item], PutOutcome(PutStatus.FAILED, BAD_ITEM))[0]
        path, length = path_of(item.key), item.hold.length
        view = item.hold.view()
        weakref.finalize(view, item.hold.drop).atexit = False  # invariant 2
        large = length > self.settings.multipart_bytes
        create = self._creates and not large
        try:
            if not create and self._size(path) == length:
                return PutOutcome(PutStatus.EXISTS)
            try:
                self._send(path, view, create, large)
            except exceptions.AlreadyExistsError:
                if self._size(path) == length:
                    return PutOutcome(PutStatus.EXISTS)
                self._send(path, view, False, large)
        except FileNotFoundError as error:  # the bucket does not exist
            return PutOutcome(PutStatus.FAILED, self._note(error))
        except _ERRORS as error:
            reason = self._note(error)
            return PutOutcome(PutStatus.THROTTLED if reason in LATER else PutStatus.FAILED, reason)
        finally:
            del view
        self._count_change(length, 1)
        return PutOutcome(PutStatus.STORED)

    def _send(self, path: str, view: memoryview, create: bool, large: bool) -> None:
        obstore.put(
            self._store,
            path,
            view,
            mode="create" if create else None,
            use_multipart=large,
            chunk_size=self.settings.part_bytes,
            max_concurrency=4,
        )

    def _head(self, path: str) -> tuple[int, str | None]:
        """Bytes and ETag of an object. Raises FileNotFoundError or another error of `_ERRORS`."""
        found = obstore.head(self._store, path)
        return int(found["size"]), found["e_tag"]

    def _size(self, path: str) -> int | None:
        try:
            return self._head(path)[0]
        except FileNotFoundError:
            return None

    def _fetch(self, path: str, begin: int, target: memoryview, length: int) -> tuple[int, str | None]:
        """Read a part of an object that has `length` bytes. Returns and raises what `_head` does, or ValueError."""
        whole = len(target) == length
        options = None if whole else {"range": (begin, begin + len(target))}
        found = obstore.get(self._store, path, options=options)
        size: int = found.meta["size"]
        if size == length:
            target[:] = found.bytes()
        return size, found.meta["e_tag"]

    def _read(self, item: LoadItem, begin: int, end: int) -> Part:
        """Read one part of a record into its extent."""
        if len(item.key) != KEY_BYTES:
            return Part(LoadStatus.FAILED, BAD_ITEM)
        length = item.hold.length
        try:
            size, e_tag = self._fetch(path_of(item.key), begin, item.hold.view()[begin:end], length)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                return Part(LoadStatus.FAILED, self._note(error))
            return Part(LoadStatus.ABSENT)
        except (*_ERRORS, ValueError) as error:  # ValueError: fewer bytes came than were announced
            if RANGE.search(str(error)):  # the object ends before this part
                return Part(LoadStatus.CORRUPT)
            return Part(LoadStatus.FAILED, self._note(error))
        return Part(LoadStatus.LOADED if size == length else LoadStatus.CORRUPT, "", e_tag)

    def _load_whole(self, item: LoadItem) -> LoadOutcome:
        return self._judge(item, lambda: [self._read(item, 0, item.hold.length)])

    def _judge(self, item: LoadItem, read: Callable[[], Sequence[Part | BaseException]]) -> LoadOutcome:
        """Read a record's parts with `read`, and judge the record; remove a bad one. The hold ends in any case."""
        try:
            parts = []
            for part in read():
                if isinstance(part, BaseException):
                    raise part
                parts.append(part)
            for status in (LoadStatus.FAILED, LoadStatus.ABSENT, LoadStatus.CORRUPT):
                for part in parts:
                    if part.status is status:
                        if status is LoadStatus.CORRUPT:
                            return self._bad(item, part.e_tag)
                        return LoadOutcome(status, part.reason)
            if len({part.e_tag for part in parts}) > 1:
                return LoadOutcome(LoadStatus.FAILED, "changed")  # the parts come from two objects
            verified = verify_stored_record(item.hold.address, item.hold.length, item.key)
            if verified == CopyOutcome.OK:
                return LoadOutcome(LoadStatus.LOADED)
            if verified == CopyOutcome.MISMATCH:
                return LoadOutcome(LoadStatus.FAILED, MISMATCH)
            return self._bad(item, parts[0].e_tag)
        finally:
            item.hold.drop()

    def _bad(self, item: LoadItem, e_tag: str | None) -> LoadOutcome:
        self._bad_objects += 1
        path = path_of(item.key)
        try:
            size, tag = self._head(path)
            if tag == e_tag if e_tag is not None else size != item.hold.length:
                self._remove([path])
                self._count_change(-size, -1)
        except FileNotFoundError:
            pass
        except _ERRORS as error:
            return LoadOutcome(LoadStatus.FAILED, self._note(error))
        return LoadOutcome(LoadStatus.CORRUPT)

    def _remove(self, paths: list[str]) -> None:
        try:
            obstore.delete(self._store, paths)
        except FileNotFoundError:  # somebody else has removed one of them
            for path in paths if len(paths) > 1 else ():
                self._remove([path])

    def _delete(self, paths: list[str]) -> int:
        try:
            sizes = {path: size for path in paths if (size := self._size(path)) is not None}
            if sizes:
                self._remove(list(sizes))
        except _ERRORS as error:
            self._note(error)
            return 0
        self._count_change(-sum(sizes.values()), -len(sizes))
        return len(sizes)

    def _clear(self) -> int:
        removed = 0
        for ours in pages(self._store):
            if ours:
                self._remove([meta["path"] for meta in ours])
                removed += len(ours)
        with self._counting:
            self._counted_s = None
        return removed

    def _count(self) -> Usage:
        with self._counting:
            if self._counted_s is not None and time.monotonic() - self._counted_s < COUNTED_FOR_S:
                return self._usage
        used_bytes = records = 0
        try:
            for ours in pages(self._store):
                used_bytes, records = used_bytes + sum(meta["size"] for meta in ours), records + len(ours)
                if records >= MAX_COUNTED:
                    break
        except _ERRORS as error:
            self._note(error)
            return self._usage
        with self._counting:
            self._usage, self._counted_s = Usage(used_bytes, 0, records), time.monotonic()
            return self._usage

    def _count_change(self, record_bytes: int, records: int) -> None:
        with self._counting:
            if self._counted_s is not None:
                used_bytes, _, known = self._usage
                self._usage = Usage(max(0, used_bytes + record_bytes), 0, max(0, known + records))

    def _note(self, error: Exception) -> str:
        """The short reason of an error, which is logged at most once a minute per reason."""
        reason = reason_of(error)
        now_s = time.monotonic()
        if now_s - self._noted.get(reason, -NOTE_EVERY_S) >= NOTE_EVERY_S:
            self._noted[reason] = now_s
            log.warning("%s: %s: the store %s: %s", self.name, reason, advice(error), plain(error))
        return reason
