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
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata.errors import ConfigError, StorageError
from kvstrata.keys.batch import split
from kvstrata.native.core import CopyOutcome, verify_stored_record
from kvstrata.tiers.base import (
    MIN_RECORD_BYTES,
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    Outcome,
    Presence,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.media.object_store.failures import LATER, RANGE, advice, is_wrong, plain, reason_of
from kvstrata.tiers.reasons import MISMATCH, QUEUE_FULL, RAISED, THROTTLED
from kvstrata.tiers.work import Work

try:
    import obstore
    from obstore import exceptions

    _ERRORS = (exceptions.BaseError, OSError, NotImplementedError)
except ImportError:  # config.py then refuses the type and says what to install, so this module is not used
    pass

log = logging.getLogger(__name__)

DEFAULT_WORKERS = {Lane.LOOKUP: 16, Lane.LOAD: 16, Lane.PUT: 8}
NOTE_EVERY_S = 60.0
LONGEST_BYTES = (1 << 32) - 1
"""Maximum length of a record, by its header."""
QUEUE_LIMIT = 1 << 14
"""Maximum number of requests that wait in a lane."""
PAGE = 1000
LIST_S = 600.0
"""Maximum time of a listing: a server may send pages without end, each within the time limit of a request."""
MARKER = "kvstrata-format"
MARKER_TEXT = b"kvstrata records, format 1\n"
MOST_MARKER_BYTES = 4096
NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})\.kvc")


def path_of(key: bytes) -> str:
    """The name of a record's object below the URL."""
    name = key.hex()
    return f"{name[:2]}/{name}.kvc"


class ObjectStoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked settings. Only `connect`, which makes the library's store, has the credentials; `url` has none."""

    url: str
    connect: Callable[[], Any]
    medium: str = ""
    """As in the adapter's `Capabilities`."""
    multipart_bytes: int = 64 << 20
    part_bytes: int = 8 << 20
    num_workers: int = 4
    per_op_workers: dict[Lane, int] = {}


class Part(NamedTuple):
    """The outcome of reading one part of a record's extent."""

    outcome: Outcome
    reason: str = ""
    size: int = 0
    """Bytes of the whole object; 0: the object ends before this part."""
    e_tag: str | None = None


class ObjectStoreAdapter(StorageAdapter):
    """The `object_store` adapter."""

    def __init__(self, settings: ObjectStoreSettings, *, name: str = "object_store") -> None:
        self.name = name
        self.capabilities = Capabilities(persistent=True, shared=True, medium=settings.medium, max_batch=64)
        self.settings = settings
        self._lanes = Lanes(
            name,
            num_workers=settings.num_workers,
            per_op_workers=settings.per_op_workers,
            queue_limit=QUEUE_LIMIT,
        )
        self._store: Any = None
        self._creates = True
        """Whether the store can refuse to replace an object."""
        self._work = Work(name)
        self._counting = threading.Lock()
        self._usage = Usage(0, 0, 0)
        self._noted: dict[str, float] = {}
        self._bad_objects = 0

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Reach the store; check, or write, the object that names the version. Raises StorageError, ConfigError."""
        try:
            await self._lanes.run(Lane.LOOKUP, self._reach)
        except (*_ERRORS, ValueError) as error:
            await self._lanes.close()
            kind = ConfigError if is_wrong(error) else StorageError
            raise kind(
                f"{self.name}: url: {self.settings.url!r} {advice(error)}: {plain(error)}", field="url"
            ) from None
        except ConfigError:
            await self._lanes.close()
            raise

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
        await self._work.ended()
        await self._lanes.close()

    # -- the contract: each batch is a task of the adapter, and a cancelled call ends only its wait --------

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """Send a HEAD for each key, concurrently in the lookup lane."""
        return await self._work.own(self._exists(keys, ask))

    async def put(self, items: Sequence[Item]) -> None:
        """Put the records, divided among the threads of the lane."""
        await self._work.own(self._put(items))

    async def load(self, items: Sequence[Item]) -> None:
        """Load the records, divided among the threads of the lane; parts of a large one are loaded concurrently."""
        await self._work.own(asyncio.gather(*map(self._load, items)))

    async def delete(self, keys: bytes) -> int:
        """Remove in bulk the records that a HEAD finds."""
        paths = [path_of(key) for key in dict.fromkeys(split(keys))]
        return await self._work.own(self._lanes.run(Lane.DELETE, lambda: self._delete(paths)))

    async def clear(self) -> int:
        """List the records below the prefix and remove them. Raises StorageError."""
        try:
            return await self._work.own(self._lanes.run(Lane.DELETE, self._clear))
        except _ERRORS as error:
            raise StorageError(f"{self.name}: cannot be cleared: {plain(error)}", field=self.name) from None

    async def usage(self) -> Usage:
        """The records that this server has put since its start and not removed; the bucket is not listed."""
        with self._counting:
            return self._usage

    def numbers(self) -> dict[str, int]:
        """The number of objects since the start that had a record's name but were not a sound record."""
        return {"bad_objects": self._bad_objects}

    # -- on the event loop ---------------------------------------------------------------------------------

    async def _exists(self, keys: bytes, ask: Ask) -> bytes:
        waits = [self._lanes.submit(Lane.LOOKUP, functools.partial(self._find, key)) for key in split(keys)]
        found = [(Presence.UNKNOWN, THROTTLED) if wait is None else await wait for wait in waits]
        ask.reason = next((reason for _, reason in found if reason), "")
        return bytes([presence for presence, _ in found])

    async def _put(self, items: Sequence[Item]) -> None:
        waits = [(item, self._lanes.submit(Lane.PUT, functools.partial(self._write, item))) for item in items]
        for item, wait in waits:
            if wait is None:
                item.settle(Outcome.THROTTLED, QUEUE_FULL)
            else:
                await wait

    async def _load(self, item: Item) -> None:
        length, step = item.hold.length, self.settings.part_bytes
        work: Callable[[], Any] = functools.partial(self._read, item, 0, step)
        if length <= step:
            work = functools.partial(self._load_whole, item)
        first = self._lanes.submit(Lane.LOAD, work)
        if first is None:
            item.settle(Outcome.FAILED, THROTTLED)
            return
        if length <= step:
            await first
            return
        rest = [
            self._lanes.run(Lane.LOAD, functools.partial(self._read, item, at, min(at + step, length)))
            for at in range(step, length, step)
        ]
        parts = list(await asyncio.gather(first, *rest, return_exceptions=True))
        await self._lanes.run(Lane.LOAD, lambda: self._judge(item, lambda: parts))

    # -- in the lanes' threads -----------------------------------------------------------------------------

    def _find(self, key: bytes) -> tuple[Presence, str]:
        try:
            size = self._size(path_of(key))
        except _ERRORS as error:
            return Presence.UNKNOWN, self._note(error)
        if size is None or not MIN_RECORD_BYTES <= size <= LONGEST_BYTES:
            return Presence.ABSENT, ""  # not a record; the next put replaces it
        return Presence.PRESENT, ""

    def _write(self, item: Item) -> None:
        item.outcome, item.reason = self._written(item)  # `_written` handles the hold

    def _written(self, item: Item) -> tuple[Outcome, str]:
        path, length = path_of(item.key), item.hold.length
        view = item.hold.view()
        weakref.finalize(view, item.hold.drop).atexit = False  # invariant 2
        large = length > self.settings.multipart_bytes
        create = self._creates and not large
        try:
            if not create and self._size(path) == length:
                return Outcome.EXISTS, ""
            try:
                self._send(path, view, create, large)
            except exceptions.AlreadyExistsError:
                if self._size(path) == length:
                    return Outcome.EXISTS, ""
                self._send(path, view, False, large)
        except FileNotFoundError as error:  # the bucket does not exist
            return Outcome.FAILED, self._note(error)
        except _ERRORS as error:
            reason = self._note(error)
            return Outcome.THROTTLED if reason in LATER else Outcome.FAILED, reason
        finally:
            del view
        self._count_change(length, 1)
        return Outcome.STORED, ""

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

    def _fetch(self, path: str, begin: int, target: memoryview, room: int) -> tuple[int, str | None]:
        """Read a part of the object, unless the whole object has more than `room` bytes.

        Returns and raises what `_head` does, or ValueError.
        """
        whole = len(target) == room
        options = None if whole else {"range": (begin, begin + len(target))}
        found = obstore.get(self._store, path, options=options)
        size: int = found.meta["size"]
        if size <= room:
            target[: size - begin] = found.bytes()
        return size, found.meta["e_tag"]

    def _read(self, item: Item, begin: int, end: int) -> Part:
        """Read one part of a record into its extent."""
        room = item.hold.length
        try:
            size, e_tag = self._fetch(path_of(item.key), begin, item.hold.view()[begin:end], room)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                return Part(Outcome.FAILED, self._note(error))
            return Part(Outcome.ABSENT)
        except (*_ERRORS, ValueError) as error:  # ValueError: fewer bytes arrived than were announced
            if RANGE.search(str(error)):  # the object ends before this part
                return Part(Outcome.LOADED if begin else Outcome.CORRUPT)
            return Part(Outcome.FAILED, self._note(error))
        return Part(Outcome.LOADED if size <= room else Outcome.CORRUPT, "", size, e_tag)

    def _load_whole(self, item: Item) -> None:
        self._judge(item, lambda: [self._read(item, 0, item.hold.length)])

    def _judge(self, item: Item, read: Callable[[], Sequence[Part | BaseException]]) -> None:
        """Read a record's parts with `read`, and settle its item; removes a bad record."""
        outcome, reason = Outcome.FAILED, RAISED
        try:
            outcome, reason = self._judged(item, read())
        finally:
            item.settle(outcome, reason)

    def _judged(self, item: Item, parts: Sequence[Part | BaseException]) -> tuple[Outcome, str]:
        read = []
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            read.append(part)
        for outcome in (Outcome.FAILED, Outcome.ABSENT, Outcome.CORRUPT):
            for part in read:
                if part.outcome is outcome:
                    return (
                        self._bad(item, part.e_tag) if outcome is Outcome.CORRUPT else (outcome, part.reason)
                    )
        if len({part.e_tag for part in read if part.size}) > 1:
            return Outcome.FAILED, "changed"  # the parts come from two objects
        verified = verify_stored_record(item.hold.address, read[0].size, item.key)
        if verified == CopyOutcome.OK:
            return Outcome.LOADED, ""
        if verified == CopyOutcome.MISMATCH:
            return Outcome.FAILED, MISMATCH
        return self._bad(item, read[0].e_tag)

    def _bad(self, item: Item, e_tag: str | None) -> tuple[Outcome, str]:
        self._bad_objects += 1
        path = path_of(item.key)
        try:
            size, tag = self._head(path)
            if tag == e_tag if e_tag is not None else size < MIN_RECORD_BYTES:
                self._remove([path])
                self._count_change(-size, -1)
        except FileNotFoundError:
            pass
        except _ERRORS as error:
            return Outcome.FAILED, self._note(error)
        return Outcome.CORRUPT, ""

    def _remove(self, paths: list[str]) -> None:
        try:
            obstore.delete(self._store, paths)
        except FileNotFoundError:  # another client has removed one of them
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
        for ours in self._pages():
            if ours:
                self._remove([meta["path"] for meta in ours])
                removed += len(ours)
        with self._counting:
            self._usage = Usage(0, 0, 0)
        return removed

    def _pages(self) -> Iterator[list[Any]]:
        """The pages of a listing, each with only the objects whose names are ours. Raises TimeoutError after LIST_S."""
        until_s = time.monotonic() + LIST_S
        for page in obstore.list(self._store, chunk_size=PAGE):
            yield [meta for meta in page if NAME.fullmatch(meta["path"])]
            if time.monotonic() > until_s:
                raise TimeoutError(f"incomplete: the listing did not end within {LIST_S:g} s")

    def _count_change(self, record_bytes: int, records: int) -> None:
        with self._counting:
            used_bytes, _, known = self._usage
            self._usage = Usage(max(0, used_bytes + record_bytes), 0, max(0, known + records))

    def _note(self, error: Exception) -> str:
        """The reason code of an error, which is logged at most once a minute per reason."""
        reason = reason_of(error)
        now_s = time.monotonic()
        if now_s - self._noted.get(reason, -NOTE_EVERY_S) >= NOTE_EVERY_S:
            self._noted[reason] = now_s
            log.warning("%s: %s: the store %s: %s", self.name, reason, advice(error), plain(error))
        return reason
