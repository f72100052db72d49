"""The `fs` adapter: one self-describing file per record in a directory of any mounted file system.

    <base_path>/<2 hex>/<2 hex>/<64 hex>.kvc     the record, byte for byte as it lies in L1
    <base_path>/<relative_tmp_dir>/*.part        records being written, removed at the next start
    <base_path>/.kvstrata.lock                   flock of the server that owns the directory

Invariants
1. A record's name appears only when its bytes are on the medium: written and synced under a temporary name,
   renamed, and STORED is answered after the directory was synced too, once per directory and batch.
2. The names' sizes (rounded up to 4 KiB) plus those being written never exceed `capacity_bytes`; the least
   recently loaded or stored records leave before a new one is written.  The cap counts what earlier servers
   left, because the start reads all names and sizes; it reads no payload.
3. The index (key → size, in order of recency) is touched on the event loop only; threads do nothing but I/O.
4. Between the removal of a name from the index and the end of its unlink the key is in `_removing`, and puts
   of it wait: a heal can never be unlinked by the removal of what it heals.
5. Files that are not named like ours are never touched.

Not here: deadlines and breakers (storage/wrap), retries (service/store), sharing a directory between servers.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import fcntl
import functools
import itertools
import logging
import mmap
import os
import re
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstrata.errors import StorageError
from kvstrata.native import copying
from kvstrata.native.copying import CopyOutcome
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

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_BYTES = 4096
MIN_RECORD_BYTES = BLOCK_BYTES + 1
"""Shortest record there can be: one header page and one byte."""
LOCK_NAME = ".kvstrata.lock"
GROUPS_IN_CAP = 4
"""A put batch is cut into groups of at most cap / 4; one larger than the cap then evicts its own oldest."""
QUEUE_LIMIT = 1024
"""Records that may wait in one lane."""
RECENCY_NS = 3600 * 10**9
"""A load is written to the file's access time when the last one written is older than this."""

_NAME = re.compile(r"[0-9a-f]{64}\.kvc")
_PART = re.compile(r"[0-9a-f]{64}\.[0-9]+\.part")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MAGIC = b"KVSTRATA"
_MAGIC_LENGTH_KEY = struct.Struct("<8s4xI32s")
_STORED_BYTES = struct.Struct("<Q")
_STORED_BYTES_AT = 88


class FsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked settings; sizes in bytes."""

    base_path: str
    relative_tmp_dir: str = "tmp"
    use_odirect: bool = False
    capacity_bytes: int = 0
    """0: no cap but `min_free_bytes`."""
    min_free_bytes: int | None = None
    """Free bytes to leave on the file system; None: 1 % of it, at least 256 MiB, at most a tenth."""
    num_workers: int = 4
    per_op_workers: dict[Lane, int] = {}


class _File:
    """One published record."""

    __slots__ = ("loads", "recency_ns", "size_bytes")

    def __init__(self, size_bytes: int, recency_ns: int) -> None:
        self.size_bytes = size_bytes
        self.recency_ns = recency_ns
        self.loads = 0
        """Loads running now; a record being loaded is no victim."""


class _Scan(NamedTuple):
    files: collections.OrderedDict[bytes, _File]
    """Oldest first."""
    used_bytes: int
    foreign: int
    removed: int
    """Temporary files and stumps that were removed."""


_NO_ROOM = PutOutcome(PutStatus.THROTTLED, "no_room")
"""Result of a write that found no space; only then the item's hold was not dropped."""


def _charge(size_bytes: int) -> int:
    """Bytes that a file of this size counts against the cap."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class FsAdapter(StorageAdapter):
    """See the module. One instance owns its directory from `open` to `close`."""

    def __init__(self, settings: FsSettings, *, name: str = "fs") -> None:
        self.name = name
        self.settings = settings
        self.capabilities = Capabilities(
            persistent=True,
            shared=False,
            max_batch=64,
            alignment_bytes=BLOCK_BYTES if settings.use_odirect else 1,
            can_delete=True,
            can_list=False,
            has_heads=True,
            quiesce="drain",
        )
        self._base = os.path.abspath(settings.base_path)
        self._tmp = os.path.join(self._base, settings.relative_tmp_dir)
        self._files: collections.OrderedDict[bytes, _File] = collections.OrderedDict()
        self._used_bytes = 0
        self._removing: dict[bytes, asyncio.Future[None]] = {}
        self._putting: dict[bytes, asyncio.Future[PutOutcome]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._part_numbers = itertools.count()
        self._known_folders: set[str] = set()
        self._folders_lock = threading.Lock()
        self._direct = settings.use_odirect
        self._min_free_bytes = 0
        self._lock_fd = -1
        self._lanes: Lanes | None = None
        self._context: AdapterContext | None = None
        self._scanned: asyncio.Task[None] | None = None
        self._scan_error_logged = False
        self._closed = False

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Own the directory and begin to read its names; operations wait until that is done.

        Raises StorageError when the directory cannot be made, written or owned.
        """
        self._context = context
        self._lanes = Lanes(
            self.name,
            num_workers=self.settings.num_workers,
            per_op_workers=self.settings.per_op_workers,
            queue_limit=QUEUE_LIMIT,
        )
        try:
            await self._in_lane(Lane.DELETE, lambda: self._own_directory(context.instance_id))
        except BaseException:
            await self._lanes.close()
            self._closed = True
            raise
        self._scanned = asyncio.create_task(self._read_names(), name=f"{self.name}-scan")

    async def close(self) -> None:
        """Wait for what is in flight, then give the directory back."""
        if self._closed or self._lanes is None:
            self._closed = True
            return
        self._closed = True
        if self._scanned is not None:
            await asyncio.wait({self._scanned})
        while self._running:
            await asyncio.wait(set(self._running))
        await self._lanes.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _own_directory(self, instance_id: str) -> None:
        lock_fd = -1
        try:
            _make_folders(self._tmp)
            lock_path = os.path.join(self._base, LOCK_NAME)
            lock_fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(self._tmp).st_dev != os.stat(self._base).st_dev:
                raise StorageError(
                    f"{self.name}: relative_tmp_dir: {self.settings.relative_tmp_dir!r} is on another file"
                    " system than base_path, so files cannot be published by a rename; choose one on the same",
                    field="relative_tmp_dir",
                )
            space = os.statvfs(self._base)
        except BlockingIOError:
            holder = os.pread(lock_fd, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock_fd)
            raise StorageError(
                f"{self.name}: base_path: {self._base!r} belongs to another running server ({holder});"
                " give each server a directory of its own",
                field="base_path",
            ) from None
        except OSError as error:
            if lock_fd >= 0:
                os.close(lock_fd)
            raise StorageError(
                f"{self.name}: base_path: {self._base!r} cannot be used: {error.strerror}"
                f" ({error.filename or LOCK_NAME}); give a directory that this user may write and lock",
                field="base_path",
            ) from None
        except StorageError:
            os.close(lock_fd)
            raise
        self._lock_fd = lock_fd
        try:
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"pid {os.getpid()}, instance {instance_id}\n".encode(), 0)
        except OSError:
            pass  # a full disk: the text is only for whoever wonders about the lock
        total_bytes = space.f_blocks * space.f_frsize
        if self.settings.min_free_bytes is not None:
            self._min_free_bytes = self.settings.min_free_bytes
        else:
            self._min_free_bytes = max(total_bytes // 100, min(256 << 20, total_bytes // 10))

    async def _read_names(self) -> None:
        scan = await self._in_lane(Lane.DELETE, self._scan)
        self._files, self._used_bytes = scan.files, scan.used_bytes
        log.info(
            "%s: %s holds %d records, %d bytes; removed %d unfinished files, ignored %d foreign ones",
            self.name, self._base, len(scan.files), self._used_bytes, scan.removed, scan.foreign,
        )  # fmt: skip
        if not await self._make_room(0):
            log.error("%s: cannot get below its cap of %d bytes", self.name, self.settings.capacity_bytes)

    def _scan(self) -> _Scan:
        files: list[tuple[int, bytes, int]] = []
        foreign = removed = 0
        for entry in os.scandir(self._tmp):
            if _PART.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
                removed += 1
            else:
                foreign += 1
        own = {LOCK_NAME, self.settings.relative_tmp_dir.split(os.sep, 1)[0]}
        for first in os.scandir(self._base):
            if not (_FOLDER.fullmatch(first.name) and first.is_dir(follow_symlinks=False)):
                foreign += first.name not in own
                continue
            for second in os.scandir(first.path):
                if not (_FOLDER.fullmatch(second.name) and second.is_dir(follow_symlinks=False)):
                    foreign += 1
                    continue
                prefix = first.name + second.name
                for entry in os.scandir(second.path):
                    if not (
                        _NAME.fullmatch(entry.name)
                        and entry.name.startswith(prefix)
                        and entry.is_file(follow_symlinks=False)
                    ):
                        foreign += 1
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if status.st_size < MIN_RECORD_BYTES:
                        os.unlink(entry.path)
                        removed += 1
                        continue
                    recency_ns = max(status.st_atime_ns, status.st_mtime_ns)
                    files.append((recency_ns, bytes.fromhex(entry.name[:64]), status.st_size))
        index: collections.OrderedDict[bytes, _File] = collections.OrderedDict()
        for recency_ns, key, size_bytes in sorted(files):
            index[key] = _File(size_bytes, recency_ns)
        return _Scan(index, sum(_charge(size_bytes) for _, _, size_bytes in files), foreign, removed)

    # -- the contract --------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """From the index: no I/O, no lane."""
        if reason := await self._not_ready():
            return [Found(Presence.UNKNOWN, 0, reason)] * len(keys)
        absent = Found(Presence.ABSENT)
        files = self._files
        return [Found(Presence.PRESENT, files[key].size_bytes) if key in files else absent for key in keys]

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """Read in the lookup lane."""
        if await self._not_ready() or self._lanes is None:
            return [b""] * len(keys)
        paths = [self._path(key) if key in self._files else "" for key in keys]
        wait = self._lanes.submit(Lane.LOOKUP, functools.partial(_read_heads, paths))
        return [b""] * len(keys) if wait is None else await asyncio.shield(wait)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """See the contract. A cancelled wait lets the batch go on to its end."""
        return await self._own(self._put_batch(list(items)))

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """See the contract. A cancelled wait lets the batch go on to its end."""
        return await self._own(self._load_batch(list(items)))

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Remove files and make that durable. Waits for puts of the same keys that are under way."""
        return await self._own(self._delete_batch(list(keys)))

    async def clear(self) -> int:
        """Remove all records, durably. Those that are being put stay."""
        if await self._not_ready():
            return 0
        return await self._own(self._remove_all())

    async def usage(self) -> Usage:
        """Bytes as they count against the cap, those being written included."""
        await self._not_ready()
        return Usage(self._used_bytes, self.settings.capacity_bytes, len(self._files))

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` as a task of this adapter; cancelling what is returned ends only the caller's wait."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return asyncio.shield(task)

    async def _not_ready(self) -> str:
        """Waits until the names are read; then why nothing can be done, or an empty string."""
        if self._closed or self._scanned is None:
            return "closed"
        await asyncio.wait({self._scanned})
        error = self._scanned.exception()
        if error is None:
            return ""
        if not self._scan_error_logged:
            self._scan_error_logged = True
            log.error("%s: the names in %s could not be read: %r", self.name, self._base, error)
        return "io"

    async def _in_lane(self, lane: Lane, work: Callable[[], T]) -> T:
        """Run work that continues what was admitted before, in its turn."""
        assert self._lanes is not None
        wait = self._lanes.submit(lane, work, beyond_limit=True)
        assert wait is not None
        return await wait

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._base}/{name[:2]}/{name[2:4]}/{name}.kvc"

    def _now_ns(self) -> int:
        assert self._context is not None
        return self._context.clock.unix_ms() * 1_000_000

    # -- put -----------------------------------------------------------------------------------------------

    async def _put_batch(self, items: list[PutItem]) -> list[PutOutcome]:
        outcomes = [PutOutcome(PutStatus.EXISTS)] * len(items)
        leaders: list[tuple[int, asyncio.Future[PutOutcome]]] = []
        writes: dict[int, asyncio.Future[PutOutcome]] = {}
        reason = await self._not_ready()
        for i, (key, hold) in enumerate(items):
            if reason or len(key) != KEY_BYTES or hold.length < MIN_RECORD_BYTES:
                hold.drop()
                outcomes[i] = PutOutcome(PutStatus.FAILED, reason or "bad_item")
            elif key in self._putting:
                hold.drop()
                leaders.append((i, self._putting[key]))
            elif (file := self._files.get(key)) is not None and file.size_bytes == hold.length:
                hold.drop()
            else:
                writes[i] = self._putting[key] = asyncio.get_running_loop().create_future()
        groups = collections.deque(self._groups(items, writes))
        try:
            while groups:
                group = groups.popleft()
                for i, outcome in zip(group, await self._put_group([items[i] for i in group]), strict=True):
                    outcomes[i] = outcome
                    del self._putting[items[i].key]
                    writes.pop(i).set_result(outcome)
        finally:  # a mistake of ours may have ended this early: nobody shall wait for what is left
            for i in itertools.chain.from_iterable(groups):
                items[i].hold.drop()
            for i, unanswered in writes.items():
                del self._putting[items[i].key]
                unanswered.set_result(PutOutcome(PutStatus.FAILED, "internal"))
        for i, leader in leaders:
            first = await leader
            if first.status is not PutStatus.STORED:
                outcomes[i] = first
        return outcomes

    def _groups(self, items: list[PutItem], writes: Iterable[int]) -> list[list[int]]:
        """Cut a batch so that one group takes a bounded share of the cap."""
        limit_bytes = self.settings.capacity_bytes // GROUPS_IN_CAP or 1 << 62
        groups: list[list[int]] = []
        group_bytes = 0
        for i in writes:
            cost_bytes = _charge(items[i].hold.length)
            if not groups or group_bytes + cost_bytes > limit_bytes:
                groups.append([])
                group_bytes = 0
            groups[-1].append(i)
            group_bytes += cost_bytes
        return groups

    async def _put_group(self, items: list[PutItem]) -> list[PutOutcome]:
        """Make room, write, publish. Every hold is dropped when this returns."""
        stale = [item.key for item in items if item.key in self._files]
        if stale:  # copies of another length cannot be whole: what is put now heals them
            await self._remove(stale)
        for item in items:
            if item.key in self._removing:
                await asyncio.wait({self._removing[item.key]})
        sizes = [item.hold.length for item in items]
        if not await self._make_room(sum(map(_charge, sizes))):
            for item in items:
                item.hold.drop()
            return [PutOutcome(PutStatus.THROTTLED, "capacity")] * len(items)
        outcomes = [PutOutcome(PutStatus.FAILED, "internal")] * len(items)
        try:
            written = await self._write_all(items)
            short = [i for i, result in enumerate(written) if result is _NO_ROOM]
            if short and await self._evict(sum(_charge(sizes[i]) for i in short)):
                for i, result in zip(short, await self._write_all([items[i] for i in short]), strict=True):
                    written[i] = result
            parts: list[tuple[int, bytes, str]] = []
            for i, (item, result) in enumerate(zip(items, written, strict=True)):
                if result is _NO_ROOM:
                    item.hold.drop()
                    outcomes[i] = PutOutcome(PutStatus.THROTTLED, "disk_full")
                elif isinstance(result, PutOutcome):
                    outcomes[i] = result
                else:
                    parts.append((i, item.key, result))
            if parts:
                published = await self._in_lane(Lane.PUT, lambda: self._publish([p[1:] for p in parts]))
                for (i, _, _), outcome in zip(parts, published, strict=True):
                    outcomes[i] = outcome
        finally:
            now_ns = self._now_ns()
            for item, size_bytes, outcome in zip(items, sizes, outcomes, strict=True):
                if outcome.status is PutStatus.STORED:
                    if (old := self._files.pop(item.key, None)) is not None:  # a removal that had failed
                        self._used_bytes -= _charge(old.size_bytes)
                    self._files[item.key] = _File(size_bytes, now_ns)
                else:
                    self._used_bytes -= _charge(size_bytes)
        return outcomes

    async def _write_all(self, items: list[PutItem]) -> list[str | PutOutcome]:
        """Per item the path of a synced temporary file, or how it failed. Holds stay with _NO_ROOM only."""
        assert self._lanes is not None
        waits: list[asyncio.Future[str | PutOutcome]] = []
        for item in items:
            wait = self._lanes.submit(Lane.PUT, functools.partial(self._write_part, item))
            if wait is None:
                item.hold.drop()
                wait = asyncio.get_running_loop().create_future()
                wait.set_result(PutOutcome(PutStatus.THROTTLED, "queue_full"))
            waits.append(wait)
        results: list[str | PutOutcome] = []
        for result in await asyncio.gather(*waits, return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("%s: a put failed by our own mistake", self.name, exc_info=result)
                result = PutOutcome(PutStatus.FAILED, "internal")
            results.append(result)
        return results

    def _write_part(self, item: PutItem) -> str | PutOutcome:
        """In a thread: the record under a temporary name, on the medium."""
        path = f"{self._tmp}/{item.key.hex()}.{next(self._part_numbers)}.part"
        result: str | PutOutcome = PutOutcome(PutStatus.FAILED, "internal")
        try:
            space = os.statvfs(self._base)
            if space.f_bavail * space.f_frsize < item.hold.length + self._min_free_bytes:
                result = _NO_ROOM
            else:
                with item.hold.view() as view:
                    try:
                        self._write_file(path, view, item.hold.address)
                    except FileNotFoundError:  # somebody removed the directory: make it again
                        _make_folders(self._tmp)
                        self._write_file(path, view, item.hold.address)
                result = path
        except OSError as error:
            _discard(path)
            if error.errno in _NO_SPACE:
                result = _NO_ROOM
            else:
                log.warning("%s: cannot write %s: %s", self.name, path, error)
                result = PutOutcome(PutStatus.FAILED, "io")
        finally:
            if result is not _NO_ROOM:
                item.hold.drop()
        return result

    def _write_file(self, path: str, view: memoryview, address: int) -> None:
        fd, direct = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, address)
        try:
            done = len(view) // BLOCK_BYTES * BLOCK_BYTES if direct else len(view)
            _write_at(fd, view[:done], 0)
            if done < len(view):  # O_DIRECT moves whole blocks: pad the last one, then cut the file
                with mmap.mmap(-1, BLOCK_BYTES) as page:
                    page[: len(view) - done] = view[done:]
                    with memoryview(page) as block:
                        _write_at(fd, block, done)
                os.ftruncate(fd, len(view))
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int, address: int) -> tuple[int, bool]:
        """A descriptor, with O_DIRECT where that is asked for and possible; says whether it has it."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        if self._direct and address % BLOCK_BYTES == 0:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self._direct = False
            log.warning("%s: use_odirect has no effect: the file system of %s cannot", self.name, self._base)
            if flags & os.O_CREAT:
                _unlink_if_there(path)
        return os.open(path, flags, 0o600), False

    def _publish(self, parts: list[tuple[bytes, str]]) -> list[PutOutcome]:
        """In a thread: rename synced files to their names, then sync each directory that changed once."""
        outcomes = [PutOutcome(PutStatus.STORED)] * len(parts)
        changed: dict[str, list[int]] = {}
        made: set[str] = set()
        for i, (key, part) in enumerate(parts):
            path = self._path(key)
            folder = os.path.dirname(path)
            try:
                new = self._make_folder(folder)
                try:
                    os.rename(part, path)
                except FileNotFoundError:  # somebody removed the directory: make it again
                    with self._folders_lock:
                        self._known_folders.clear()
                    new = self._make_folder(folder)
                    os.rename(part, path)
                made.update(new)
                for directory in (folder, *map(os.path.dirname, new)):
                    changed.setdefault(directory, []).append(i)
            except OSError as error:
                _discard(part)
                outcomes[i] = self._not_published(path, error)
        for directory, members in changed.items():
            try:
                _sync_folder(directory)
            except OSError as error:
                made.clear()
                for i in members:
                    _discard(self._path(parts[i][0]))
                    outcomes[i] = self._not_published(directory, error)
        with self._folders_lock:
            self._known_folders.update(made)
        return outcomes

    def _not_published(self, path: str, error: OSError) -> PutOutcome:
        if error.errno in _NO_SPACE:
            return PutOutcome(PutStatus.THROTTLED, "disk_full")
        log.warning("%s: cannot publish %s: %s", self.name, path, error)
        return PutOutcome(PutStatus.FAILED, "io")

    def _make_folder(self, folder: str) -> list[str]:
        """Make a record's directory and its parent; returns those whose own entries are to be synced.

        A directory that is there but not known was perhaps made by a server that did not live to sync it.
        """
        new: list[str] = []
        for path in (os.path.dirname(folder), folder):
            with self._folders_lock:
                known = path in self._known_folders
            if not known:
                try:
                    os.mkdir(path, 0o700)
                except FileExistsError:
                    pass
                new.append(path)
        return new

    # -- load ----------------------------------------------------------------------------------------------

    async def _load_batch(self, items: list[LoadItem]) -> list[LoadOutcome]:
        reason = await self._not_ready()
        assert self._lanes is not None or reason
        outcomes = [LoadOutcome(LoadStatus.FAILED, reason or "internal")] * len(items)
        reads: list[tuple[int, _File, bool]] = []
        waits: list[asyncio.Future[LoadOutcome]] = []
        for i, item in enumerate(items):
            file = self._files.get(item.key)
            if reason or self._lanes is None or file is None:
                item.hold.drop()
                if not reason:
                    outcomes[i] = LoadOutcome(LoadStatus.ABSENT)
                continue
            refresh = self._now_ns() - file.recency_ns > RECENCY_NS
            wait = self._lanes.submit(Lane.LOAD, functools.partial(self._read_record, item, refresh))
            if wait is None:
                item.hold.drop()
                outcomes[i] = LoadOutcome(LoadStatus.FAILED, "throttled")
                continue
            file.loads += 1
            reads.append((i, file, refresh))
            waits.append(wait)
        results = await asyncio.gather(*waits, return_exceptions=True)
        gone: list[bytes] = []
        for (i, file, refresh), result in zip(reads, results, strict=True):
            file.loads -= 1
            if isinstance(result, BaseException):
                log.error("%s: a load failed by our own mistake", self.name, exc_info=result)
                continue
            outcomes[i] = result
            key = items[i].key
            if self._files.get(key) is not file:
                continue  # deleted or replaced meanwhile: this says nothing about what is there now
            if result.status is LoadStatus.LOADED:
                self._files.move_to_end(key)
                if refresh:
                    file.recency_ns = self._now_ns()
            elif result.status in (LoadStatus.CORRUPT, LoadStatus.ABSENT):
                gone.append(key)
        if gone:
            await self._remove(dict.fromkeys(gone))
        return outcomes

    def _read_record(self, item: LoadItem, refresh: bool) -> LoadOutcome:
        """In a thread: the file into the extent, verified there."""
        path = self._path(item.key)
        hold = item.hold
        try:
            fd, direct = self._open(path, os.O_RDONLY, hold.address)
            try:
                status = os.fstat(fd)
                if status.st_size != hold.length:
                    return self._wrong_length(item, path, fd, status.st_size)
                with hold.view() as view:
                    whole = _read_record_into(fd, view, direct)
                if refresh:
                    self._note_load(fd, path, status.st_mtime_ns)
            finally:
                os.close(fd)
            found = copying.verify_stored_record(hold.address, hold.length, item.key)
            if whole and found == CopyOutcome.OK:
                return LoadOutcome(LoadStatus.LOADED)
            if whole and found == CopyOutcome.MISMATCH:
                return LoadOutcome(LoadStatus.FAILED, "mismatch")
            why = copying.explain_record(hold.address, hold.length, item.key) if whole else "it was cut"
            log.warning("%s: %s is corrupt and is removed: %s", self.name, path, why)
            return LoadOutcome(LoadStatus.CORRUPT, "checksum")
        except FileNotFoundError:
            return LoadOutcome(LoadStatus.ABSENT)
        except OSError as error:
            log.warning("%s: cannot read %s: %s", self.name, path, error)
            return LoadOutcome(LoadStatus.FAILED, "io")
        finally:
            hold.drop()

    def _note_load(self, fd: int, path: str, mtime_ns: int) -> None:
        """Remember for the next start that the record was used; where the medium cannot, the record is as good."""
        try:
            os.utime(fd, ns=(self._now_ns(), mtime_ns))
        except OSError as error:
            log.debug("%s: cannot set the access time of %s: %s", self.name, path, error)

    def _wrong_length(self, item: LoadItem, path: str, fd: int, size_bytes: int) -> LoadOutcome:
        """A whole record of another length than asked for is the caller's mistake, else it is corrupt."""
        with mmap.mmap(-1, BLOCK_BYTES) as page, memoryview(page) as block:
            found = os.preadv(fd, [block], 0)
            if found >= HEAD_BYTES:
                magic, header_bytes, key = _MAGIC_LENGTH_KEY.unpack_from(block, 0)
                (stored_bytes,) = _STORED_BYTES.unpack_from(block, _STORED_BYTES_AT)
                if magic == MAGIC and key == item.key and header_bytes + stored_bytes == size_bytes:
                    asked_bytes = item.hold.length
                    log.error("%s: %s has %d bytes, asked for %d", self.name, path, size_bytes, asked_bytes)
                    return LoadOutcome(LoadStatus.FAILED, "length")
        log.warning("%s: %s is cut or torn (%d bytes) and is removed", self.name, path, size_bytes)
        return LoadOutcome(LoadStatus.CORRUPT, "length")

    # -- leaving -------------------------------------------------------------------------------------------

    async def _delete_batch(self, keys: list[bytes]) -> int:
        if await self._not_ready():
            return 0
        for key in keys:
            if (pending := self._putting.get(key)) is not None:
                await asyncio.wait({pending})
        return await self._remove([key for key in dict.fromkeys(keys) if key in self._files], durable=True)

    async def _remove_all(self) -> int:
        # A task of its own: what is there is decided when it runs, not when it was made.
        return await self._remove(list(self._files), durable=True)

    async def _make_room(self, need_bytes: int) -> bool:
        """Charge bytes against the cap, evicting for them; False leaves everything as it was."""
        cap_bytes = self.settings.capacity_bytes
        if cap_bytes and need_bytes > cap_bytes:
            return False
        while cap_bytes and self._used_bytes + need_bytes > cap_bytes:
            if not await self._evict(self._used_bytes + need_bytes - cap_bytes):
                return False
        self._used_bytes += need_bytes
        return True

    async def _evict(self, need_bytes: int) -> bool:
        """Remove least recently used records of at least so many bytes; False: that many cannot leave now.

        True means only that something left: the caller looks again.
        """
        victims: list[bytes] = []
        victims_bytes = 0
        for key, file in self._files.items():
            if victims_bytes >= need_bytes:
                break
            if file.loads == 0:
                victims.append(key)
                victims_bytes += _charge(file.size_bytes)
        if victims_bytes < need_bytes:
            if not self._removing:
                return False
            await asyncio.wait(set(self._removing.values()), return_when=asyncio.FIRST_COMPLETED)
            return True
        removed = await self._remove(victims, evicted=True)
        return removed > 0

    async def _remove(self, keys: Iterable[bytes], *, durable: bool = False, evicted: bool = False) -> int:
        """Take keys out of the index and unlink their files; returns how many are gone.

        `evicted` tells the server; `durable` syncs the directories, so that a power cut brings nothing back.
        """
        files = {key: self._files.pop(key) for key in keys}
        if not files:
            return 0
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._removing.update(dict.fromkeys(files, done))
        failed: set[bytes] = set(files)
        try:
            failed = await self._in_lane(Lane.DELETE, lambda: self._unlink_all(list(files), durable))
        finally:
            for key, file in files.items():
                del self._removing[key]
                if key in failed:
                    self._files[key] = file
                    self._files.move_to_end(key, last=False)
                else:
                    self._used_bytes -= _charge(file.size_bytes)
            done.set_result(None)
        if evicted and self._context is not None:
            for key in files:
                if key not in failed:
                    self._context.record_evicted(key)
        return len(files) - len(failed)

    def _unlink_all(self, keys: list[bytes], durable: bool) -> set[bytes]:
        """In a thread: the keys whose files are still there."""
        failed: set[bytes] = set()
        folders: set[str] = set()
        for key in keys:
            path = self._path(key)
            try:
                _unlink_if_there(path)
                folders.add(os.path.dirname(path))
            except OSError as error:
                log.warning("%s: cannot remove %s: %s", self.name, path, error)
                failed.add(key)
        for folder in folders if durable else ():
            try:
                _sync_folder(folder)
            except OSError as error:
                log.warning("%s: cannot sync %s after a removal: %s", self.name, folder, error)
        return failed


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _read_heads(paths: list[str]) -> list[bytes]:
    heads = []
    for path in paths:
        head = b""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                head = os.pread(fd, HEAD_BYTES, 0)
            finally:
                os.close(fd)
        except OSError:
            pass  # the load of that record will say what is wrong
        heads.append(head)
    return heads


def _discard(path: str) -> None:
    """Unlink what an operation that failed has left; where that fails too, the next start removes or counts it."""
    try:
        _unlink_if_there(path)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)


def _make_folders(path: str) -> None:
    """Make a directory and those above it that are missing, private and durable."""
    parent = os.path.dirname(path)
    if not os.path.isdir(path):
        _make_folders(parent)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        _sync_folder(parent)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    """All of `view` at a file offset; one system call writes at most 2 GiB."""
    while view:
        count = os.pwritev(fd, [view], offset)
        view, offset = view[count:], offset + count


def _read_record_into(fd: int, view: memoryview, direct: bool) -> bool:
    """The whole file into `view`; False when the file ended earlier."""
    whole = len(view) // BLOCK_BYTES * BLOCK_BYTES if direct else len(view)
    done = 0
    while done < whole:
        count = os.preadv(fd, [view[done:whole]], done)
        if count == 0:
            return False
        done += count
    if done < len(view):  # O_DIRECT moves whole blocks: the last one goes through a page
        with mmap.mmap(-1, BLOCK_BYTES) as page, memoryview(page) as block:
            if os.preadv(fd, [block], done) < len(view) - done:
                return False
            view[done:] = block[: len(view) - done]
    return True
