"""The `object_store` adapter: records as objects in S3, GCS, Azure or a directory, shared by all who use the same URL.

    <url>/<first two hex digits>/<64 hex digits of the key>.kvc  ->  the record, byte for byte as it lies in L1
    <url>/kvstrata-format                                        ->  which records these are

The library (obstore) does the transfers on threads of its own; the lanes bound how many there are, and their threads
wait for them with the GIL dropped.

Invariants
1. Only objects named exactly so are read, written or removed.
2. A put reads the extent in place.  Its hold ends when the library lets go of the bytes, not before, whatever
   became of the request.
3. A put creates and never replaces, except for an object of another length.  Above `multipart_bytes` the store cannot
   promise that: two who put the same record at the same time both store it, and one of them stays.
4. A record is verified in its extent.  A bad one is removed if it is still the one that was read, by its ETag; between
   that look and the removal somebody may put a good one, which is then gone too and will be put again.
5. What the library tried again and gave up is not tried again here.

Not here: a cap (a bucket's lifecycle rules do that) and what listings would tell: nothing on a request's way lists.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstrata.errors import StorageError
from kvstrata.native.copying import CopyOutcome, verify_stored_record
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
from kvstrata.types import KEY_BYTES

try:
    import obstore
    from obstore import exceptions

    _ERRORS = (exceptions.BaseError, OSError, NotImplementedError)
except ImportError:  # nothing here is used then: config.py has said what is missing
    pass

T = TypeVar("T")

log = logging.getLogger(__name__)

DEFAULT_WORKERS = {Lane.LOOKUP: 16, Lane.LOAD: 16, Lane.PUT: 8}
MARKER = "kvstrata-format"
MARKER_TEXT = b"kvstrata records, format 1\n"
NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})\.kvc")
PAGE = 1000
COUNTED_FOR_S = 600.0
MAX_COUNTED = 100_000
"""Objects that `usage` lists; of more it tells so many, and what was put since."""
NOTE_EVERY_S = 60.0
CLOSED, THROTTLED, SLOW_DOWN = "closed", "throttled", "slow_down"
LONGEST_BYTES = (1 << 32) - 1
"""Of a record, by its header."""


class ObjectStoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked settings. `url` has no credentials; `connect` makes the library's store and has them."""

    url: str
    connect: Callable[[], Any]
    multipart_bytes: int = 64 << 20
    part_bytes: int = 8 << 20
    num_workers: int = 4
    per_op_workers: dict[Lane, int] = {}


class _Part(NamedTuple):
    """What was read of a record: how it went, and of which object."""

    status: LoadStatus
    reason: str = ""
    e_tag: str | None = None


class ObjectStoreAdapter(StorageAdapter):
    """See the module."""

    def __init__(self, settings: ObjectStoreSettings, *, name: str = "object_store") -> None:
        self.name = name
        # The library does not sync what it writes into a directory.
        durable = not settings.url.startswith("file:")
        self.capabilities = Capabilities(persistent=durable, shared=True, max_batch=64, has_heads=True)
        self.settings = settings
        self._lanes = Lanes(name, num_workers=settings.num_workers, per_op_workers=settings.per_op_workers)
        self._lookups = settings.per_op_workers.get(Lane.LOOKUP, settings.num_workers)
        self._store: Any = None
        self._creates = True
        """The store can refuse to replace."""
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = True
        self._counting = threading.Lock()
        self._listing: asyncio.Task[Usage] | None = None
        """The one listing at a time, for all who ask."""
        self._usage = Usage(0, 0, 0)
        self._counted_s: float | None = None
        self._noted: dict[str, float] = {}
        self._bad_objects = 0

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Reach the store, read or write what says which records are there. Raises StorageError."""
        try:
            await self._in_lane(Lane.LOOKUP, self._reach)
        except (*_ERRORS, ValueError) as error:
            await self._lanes.close()
            raise StorageError(
                f"{self.name}: url: {self.settings.url!r} {_advice(error)}: {plain(error)}", field="url"
            ) from None
        except StorageError:
            await self._lanes.close()
            raise
        self._closed = False

    def _reach(self) -> None:
        self._store = self.settings.connect()
        try:
            found = bytes(obstore.get(self._store, MARKER).bytes())
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
        else:
            if found != MARKER_TEXT:
                raise StorageError(
                    f"{self.name}: url: {self.settings.url!r} holds records of another version, its {MARKER!r} says"
                    f" {found[:60]!r}; give another prefix",
                    field="url",
                )
            return
        try:
            obstore.put(self._store, MARKER, MARKER_TEXT, mode="create", use_multipart=False)
        except NotImplementedError:
            self._creates = False
            obstore.put(self._store, MARKER, MARKER_TEXT, use_multipart=False)
        except exceptions.AlreadyExistsError:  # another server, just now
            pass

    async def close(self) -> None:
        """Wait for what is in flight. Idempotent."""
        self._closed = True
        while self._running:
            await asyncio.wait(set(self._running))
        await self._lanes.close()

    # -- the contract: each batch is a task of the adapter, a cancelled call ends the wait only ------------

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """A HEAD for each, side by side in the lookup lane."""
        return await self._spread(
            list(keys), self._find, Found(Presence.UNKNOWN, 0, CLOSED), Found(Presence.UNKNOWN, 0, THROTTLED)
        )

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """A read of the first bytes of each, side by side in the lookup lane."""
        return await self._spread(list(keys), self._read_head, b"", b"")

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Each in a thread of the lane."""
        return await self._own(self._all([self._put_one(item) for item in items]))

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """Each in a thread of the lane, large ones in parts side by side."""
        return await self._own(self._all([self._load_one(item) for item in items]))

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Removes in bulk what a HEAD finds."""
        if self._closed:
            return 0
        paths = [path_of(key) for key in dict.fromkeys(keys) if len(key) == KEY_BYTES]
        return await self._own(self._in_lane(Lane.DELETE, lambda: self._delete(paths)))

    async def clear(self) -> int:
        """Lists our names below the prefix and removes them."""
        if self._closed:
            return 0
        try:
            return await self._own(self._in_lane(Lane.DELETE, self._clear))
        except _ERRORS as error:
            raise StorageError(f"{self.name}: cannot be cleared: {plain(error)}", field=self.name) from None

    async def usage(self) -> Usage:
        """What a listing of at most MAX_COUNTED records found within COUNTED_FOR_S, and what this server did since."""
        if self._closed:
            return Usage(0, 0, 0)
        if self._listing is None or self._listing.done():
            self._listing = self._start(self._in_lane(Lane.DELETE, self._count))
        return await asyncio.shield(self._listing)

    def numbers(self) -> dict[str, int]:
        """Objects under our names that were no sound records, since the start."""
        return {"bad_objects": self._bad_objects}

    # -- on the event loop ---------------------------------------------------------------------------------

    async def _own(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _all(self, works: list[Coroutine[Any, Any, T]]) -> list[T]:
        return list(await asyncio.gather(*works))

    async def _in_lane(self, lane: Lane, work: Callable[[], T]) -> T:
        """What a full lane does not refuse: the rest of a load that it took, and what comes one at a time."""
        done = self._lanes.submit(lane, work, beyond_limit=True)
        assert done is not None, "refused work that has no limit"
        return await done

    async def _spread(self, keys: list[bytes], ask: Callable[[bytes], T], closed: T, refused: T) -> list[T]:
        """Ask for each key, each thread of the lookup lane for its share; `refused` where the lane is full."""
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

        return await self._own(shares())

    async def _put_one(self, item: PutItem) -> PutOutcome:
        if self._closed or len(item.key) != KEY_BYTES:
            item.hold.drop()
            return PutOutcome(PutStatus.FAILED, CLOSED if self._closed else "bad_item")
        done = self._lanes.submit(Lane.PUT, lambda: self._write(item))
        if done is None:
            item.hold.drop()
            return PutOutcome(PutStatus.THROTTLED, "queue_full")
        return await done

    async def _load_one(self, item: LoadItem) -> LoadOutcome:
        if self._closed or len(item.key) != KEY_BYTES:
            item.hold.drop()
            return LoadOutcome(LoadStatus.FAILED, CLOSED if self._closed else "bad_item")
        length, step = item.hold.length, self.settings.part_bytes
        if length <= step:
            done = self._lanes.submit(
                Lane.LOAD, lambda: self._judge(item, lambda: [self._read(item, 0, length)])
            )
            if done is not None:
                return await done
        else:
            first = self._lanes.submit(Lane.LOAD, lambda: self._read(item, 0, step))
            if first is not None:
                rest = [
                    self._in_lane(Lane.LOAD, functools.partial(self._read, item, at, min(at + step, length)))
                    for at in range(step, length, step)
                ]
                parts = list(await asyncio.gather(first, *rest, return_exceptions=True))
                return await self._in_lane(Lane.LOAD, lambda: self._judge(item, lambda: parts))
        item.hold.drop()
        return LoadOutcome(LoadStatus.FAILED, THROTTLED)

    # -- in the lanes' threads -----------------------------------------------------------------------------

    def _find(self, key: bytes) -> Found:
        if len(key) != KEY_BYTES:
            return Found(Presence.UNKNOWN, 0, "bad_item")
        try:
            size = int(obstore.head(self._store, path_of(key))["size"])
        except FileNotFoundError:
            return Found(Presence.ABSENT)
        except _ERRORS as error:
            return Found(Presence.UNKNOWN, 0, self._note(error))
        if not HEAD_BYTES <= size <= LONGEST_BYTES:  # no record; the next put replaces it
            return Found(Presence.ABSENT)
        return Found(Presence.PRESENT, size)

    def _read_head(self, key: bytes) -> bytes:
        try:
            return bytes(obstore.get_range(self._store, path_of(key), start=0, end=HEAD_BYTES))
        except _ERRORS:
            return b""

    def _write(self, item: PutItem) -> PutOutcome:
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
        except FileNotFoundError as error:  # the bucket
            return PutOutcome(PutStatus.FAILED, self._note(error))
        except _ERRORS as error:
            reason = self._note(error)
            return PutOutcome(PutStatus.THROTTLED if reason in _LATER else PutStatus.FAILED, reason)
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

    def _size(self, path: str) -> int | None:
        try:
            return int(obstore.head(self._store, path)["size"])
        except FileNotFoundError:
            return None

    def _read(self, item: LoadItem, begin: int, end: int) -> _Part:
        """One part of a record into its extent."""
        whole = end - begin == item.hold.length
        try:
            found = obstore.get(
                self._store, path_of(item.key), options=None if whole else {"range": (begin, end)}
            )
            e_tag = found.meta["e_tag"]
            if found.meta["size"] != item.hold.length:
                return _Part(LoadStatus.CORRUPT, "", e_tag)
            item.hold.view()[begin:end] = found.bytes()
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                return _Part(LoadStatus.FAILED, self._note(error))
            return _Part(LoadStatus.ABSENT)
        except (*_ERRORS, ValueError) as error:  # ValueError: fewer bytes than were promised
            if _RANGE.search(str(error)):  # it ends before this part
                return _Part(LoadStatus.CORRUPT)
            return _Part(LoadStatus.FAILED, self._note(error))
        return _Part(LoadStatus.LOADED, "", e_tag)

    def _judge(self, item: LoadItem, read: Callable[[], Sequence[_Part | BaseException]]) -> LoadOutcome:
        """What became of a record whose parts `read` reads; a bad one is removed, and the hold ends in any case."""
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
                return LoadOutcome(LoadStatus.FAILED, "changed")  # parts of two objects
            verified = verify_stored_record(item.hold.address, item.hold.length, item.key)
            if verified == CopyOutcome.OK:
                return LoadOutcome(LoadStatus.LOADED)
            if verified == CopyOutcome.MISMATCH:
                return LoadOutcome(LoadStatus.FAILED, "mismatch")
            return self._bad(item, parts[0].e_tag)
        finally:
            item.hold.drop()

    def _bad(self, item: LoadItem, e_tag: str | None) -> LoadOutcome:
        self._bad_objects += 1
        path = path_of(item.key)
        try:
            now = obstore.head(self._store, path)
            same = now["e_tag"] == e_tag if e_tag is not None else now["size"] != item.hold.length
            if same:
                self._remove([path])
                self._count_change(-int(now["size"]), -1)
        except FileNotFoundError:
            pass
        except _ERRORS as error:
            return LoadOutcome(LoadStatus.FAILED, self._note(error))
        return LoadOutcome(LoadStatus.CORRUPT)

    def _remove(self, paths: list[str]) -> None:
        try:
            obstore.delete(self._store, paths)
        except FileNotFoundError:  # of one of them: somebody else was faster
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
        for page in obstore.list(self._store, chunk_size=PAGE):
            ours = [meta["path"] for meta in page if NAME.fullmatch(meta["path"])]
            if ours:
                self._remove(ours)
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
            for page in obstore.list(self._store, chunk_size=PAGE):
                ours = [meta["size"] for meta in page if NAME.fullmatch(meta["path"])]
                used_bytes, records = used_bytes + sum(ours), records + len(ours)
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
        """The short reason; the log hears of each kind once a minute."""
        reason = reason_of(error)
        now_s = time.monotonic()
        if now_s - self._noted.get(reason, -NOTE_EVERY_S) >= NOTE_EVERY_S:
            self._noted[reason] = now_s
            log.warning("%s: %s: %s", self.name, reason, plain(error))
        return reason


_LATER = (SLOW_DOWN, "full")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_RANGE = re.compile(r"non-2xx status code: 416|InvalidRange|range was invalid", re.IGNORECASE)
_FULL = re.compile(r"<Code>\w*(?:Quota|InsufficientStorage|StorageFull|CapacityExceeded)\w*</Code>")
_QUERY = re.compile(r"\?\S*")
_USER = re.compile(r"(?<=://)[^/@\s]*@")


def path_of(key: bytes) -> str:
    """The name of a record's object below the URL."""
    name = key.hex()
    return f"{name[:2]}/{name}.kvc"


def reason_of(error: Exception) -> str:
    """A short word for what the library raised."""
    text = str(error)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return "full" if _FULL.search(text) else "denied"
    if "NoSuchBucket" in text:
        return "no_bucket"
    if status := _STATUS.search(text):
        if status[1] == "507" or _FULL.search(text):
            return "full"
        return {"503": SLOW_DOWN, "429": SLOW_DOWN}.get(status[1], "io")
    if system := _OS_ERROR.search(text):
        words = {"28": "full", "122": "full", "30": "read_only", "13": "denied", "111": "unreachable"}
        return words.get(system[1], "io")
    for kind, word in (("Timeout", "timeout"), ("Connect", "unreachable")):
        if f"kind: {kind}" in text:
            return word
    return "io"


def plain(error: Exception) -> str:
    """What an error says, without bodies, queries and whatever else may hold credentials."""
    text = str(error).partition("\n\nDebug source")[0]
    code = _CODE.search(text)
    text = _USER.sub("", _QUERY.sub("", text.partition("<")[0])).strip()
    return f"{text[:300]}{' ' + code[1] if code else ''}"


def _advice(error: Exception) -> str:
    return {
        "no_bucket": "names a bucket that does not exist; make it",
        "denied": "may not be used with these credentials; they must allow to get, put, delete and list objects",
        "unreachable": "cannot be reached; is the address right and the server up?",
        "timeout": "does not answer in time; is the address right?",
        "read_only": "cannot be written",
        "full": "is full",
        SLOW_DOWN: "asks for fewer requests",
    }.get(reason_of(error), "cannot be used")
