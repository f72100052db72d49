"""The snapshot of the directory on disk: written as a whole every `snapshot_s`, read once at the start.

The orders of admins (orders.py) lie in the same folder.

    magic (8) · blocks: n u32, n tags u64, n slots u16 · end: n = 0 · document (JSON) · footer

Little-endian, as every machine that the native modules are built for.  The document names the members, the slot number
of each of their tiers, and the number of the first change of each that the placements may lack; a member that was not
in step has none.  It is written last, and leaves out slots that changed their tier while the placements were written.
The footer has the document's offset, and the CRC32C of everything before it.

1. A file becomes the snapshot by rename, after its fsync; then the folder is synced.  After a crash the previous
   snapshot is there, and perhaps a `.new` file, which the next write overwrites.
2. A snapshot that cannot be read, has another format version, or is too old, is left in place, counted, recorded as an
   event, and not served.
3. A thread of its own writes and reads placements in steps, so the loop does not wait for them.
"""

from __future__ import annotations

import asyncio
import os
import struct
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from kvstrata.cluster.directory import SlotsExhausted
from kvstrata.cluster.lookups import Place
from kvstrata.config.private_dir import make_private_dir
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.member import MemberState
from kvstrata.controller.orders import sync_folder
from kvstrata.errors import ConfigError
from kvstrata.naming import name_thread
from kvstrata.native.core import crc32c
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import LONG_BUCKETS, Numbers, counter, gauge, histogram
from kvstrata.rpc.cluster_wire import Register

MAGIC = b"KVSDIR\x00\x03"
"""First bytes of a snapshot; the last of them is the format's version."""
FILE = "directory.snapshot"
MAX_AGE_S = 3_600.0
"""An older snapshot is not served."""
DUMP_CELLS = 65_536
MAX_BLOCK = 1 << 20
MAX_DOCUMENT_BYTES = 64 << 20
_COUNT = struct.Struct("<I")
_FOOTER = struct.Struct("<QI4s")
_END = b"KVSE"


class SavedMember(msgspec.Struct, frozen=True):
    """A member of a snapshot."""

    told: Register
    key: str
    slots: dict[str, Annotated[int, Meta(ge=1, le=65_535)]]
    """By tier: the slot of its placements in the file."""
    cursor: int | None
    """From which it is followed on; None: it was not in step."""


class Document(msgspec.Struct, frozen=True):
    """What a snapshot says besides placements."""

    controller: str
    unix_ms: int
    members: list[SavedMember]


class BadSnapshot(Exception):
    """The file is not a snapshot that can be served; the message says why."""


class Snapshots(Numbers):
    """Writes and reads the snapshot of one controller."""

    snapshot_age_seconds = gauge(
        "Time since the last snapshot was written; absent before the first.", lambda self: self._age_s()
    )
    times = histogram("Time that writing a snapshot took.", name="snapshot_seconds", bounds=LONG_BUCKETS)
    snapshot_failures = counter(
        "Snapshots that could not be written.", read=lambda self: self.status["failed_writes"]
    )
    snapshots_ignored = counter(
        "Snapshots that could not be served after the start.", read=lambda self: self.status["ignored"]
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cluster: Cluster, folder: Path, every_s: float
    ) -> None:
        self._loop = loop
        self._cluster = cluster
        self._path = folder / FILE
        self._every_s = every_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-snapshot", initializer=name_thread)
        self._log = EventLog("snapshot")
        self._writing: asyncio.Future[int] | None = None
        self._restoring = False
        self._slot_of: array[int] | None = None
        self.status: dict[str, Any] = {
            "path": str(self._path),
            "written_unix_ms": 0,
            "written_bytes": 0,
            "written_took_s": 0.0,
            "writes": 0,
            "failed_writes": 0,
            "restored_members": 0,
            "restored_keys": 0,
            "ignored": 0,
            "ignored_reason": "",
        }

    async def open(self) -> None:
        """Make the folder and restore the members; `keep` restores their placements. Raises ConfigError."""
        folder = self._path.parent
        try:
            make_private_dir(folder, "directory.snapshot_dir")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"{folder} cannot be written")
        except OSError as error:
            raise ConfigError(
                f"directory.snapshot_dir: {folder}: {error.strerror or error}; give a folder that this user may "
                "write, or `none`",
                field="directory.snapshot_dir",
            ) from None
        orders, ignored = await self._cluster.orders.keep_in(folder, self._failed)
        if ignored:
            self._ignore(ignored, orders)
        try:
            document = await self._loop.run_in_executor(self._thread, read_document, self._path)
            self._check_age(document)
            self._restore_members(document)
        except FileNotFoundError:
            return
        except BadSnapshot as error:
            self._ignore(str(error))

    async def keep(self) -> None:
        """Restore the placements, then write a snapshot every `snapshot_s`, until cancelled."""
        if self._slot_of is not None:
            await self._restore_placements(self._slot_of)
        while True:
            await asyncio.sleep(self._every_s)
            await self.write()

    async def write(self) -> None:
        """Write a snapshot now. A failure is counted and recorded as an event."""
        if self._restoring or self._writing is not None:
            return  # not all placements of the file are restored yet, or a write is under way
        started_s = self._cluster.clock.monotonic_s()
        cursors = self._cluster.cursors()
        await self._cluster.directory.idle()  # until all changes before these cursors are in the placements
        self._writing = self._loop.run_in_executor(self._thread, self._write, cursors)
        try:
            n_bytes = await asyncio.shield(self._writing)
        except OSError as error:
            self._failed(self._path, error)
            return
        finally:
            self._writing = None
        self.status["writes"] += 1
        self.status["written_bytes"] = n_bytes
        self.status["written_unix_ms"] = self._cluster.clock.unix_ms()
        took_s = self._cluster.clock.monotonic_s() - started_s
        self.times.add(took_s)
        self.status["written_took_s"] = round(took_s, 4)

    def _failed(self, path: Path, error: OSError) -> None:
        self.status["failed_writes"] += 1
        self._cluster.journal.say("snapshot_failed", path=str(path), reason=error.strerror or str(error))

    def _age_s(self) -> float | None:
        written_unix_ms = self.status["written_unix_ms"]
        return max(0.0, (self._cluster.clock.unix_ms() - written_unix_ms) / 1000) if written_unix_ms else None

    async def finish(self) -> None:
        """Write the last snapshot, after a running write."""
        await self._settled()
        await self.write()

    async def close(self) -> None:
        """Wait for a running write, which can end only while the loop runs; then end the thread. Idempotent."""
        await self._settled()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _settled(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])

    # --- writing (on the thread) ------------------------------------------------------------------------------

    def _write(self, cursors: dict[int, int]) -> int:
        before = self._cluster.lookups.places()
        fresh = self._path.with_suffix(".new")
        with open(fresh, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            out = _Checked(file)
            out.write(MAGIC)
            cursor = 0
            while True:
                tags, slots, cursor = self._cluster.directory.registry.dump(cursor, DUMP_CELLS)
                if tags:
                    out.write(_COUNT.pack(len(tags)))
                    out.write(tags.tobytes())
                    out.write(slots.tobytes())
                if not cursor:
                    break
            out.write(_COUNT.pack(0))
            document_at = out.n_bytes
            # The document is made on the loop's thread, since only that thread changes the members and slots in it.
            told = asyncio.run_coroutine_threadsafe(self._document(before, cursors), self._loop).result()
            out.write(told)
            file.write(_FOOTER.pack(document_at, out.crc, _END))
            file.flush()
            os.fsync(file.fileno())
            n_bytes = file.tell()
        os.replace(fresh, self._path)
        sync_folder(self._path.parent)
        return n_bytes

    async def _document(self, before: dict[int, Place], cursors: dict[int, int]) -> bytes:
        cluster = self._cluster
        tiers: dict[int, dict[str, int]] = {}
        for slot, place in cluster.lookups.places().items():
            if before.get(slot) == place:
                tiers.setdefault(place.group, {})[place.tier] = slot
        members = [
            SavedMember(one.told, one.key, tiers.get(one.group, {}), cursors.get(one.group))
            for one in cluster.members
            if one.state is not MemberState.DEAD
        ]
        return msgspec.json.encode(Document(cluster.name, cluster.clock.unix_ms(), members))

    # --- reading --------------------------------------------------------------------------------------------

    def _check_age(self, document: Document) -> None:
        age_s = (self._cluster.clock.unix_ms() - document.unix_ms) / 1000
        if age_s > MAX_AGE_S:
            raise BadSnapshot(f"it is {age_s:.0f} s old, more than {MAX_AGE_S:g}")

    def _restore_members(self, document: Document) -> None:
        cluster = self._cluster
        slot_of = array("H", bytes(2 * 65_536))
        for saved in document.members:
            restored = self._restore_member(saved.told, saved.key)
            if restored is None:
                continue
            self.status["restored_members"] += 1
            if saved.cursor is not None and saved.slots.keys() == restored.keys():
                cluster.resume(saved.told.instance, saved.cursor)
            for tier, slot in restored.items():
                if tier in saved.slots:
                    slot_of[saved.slots[tier]] = slot
        self._slot_of = slot_of
        cluster.restored.clear()
        cluster.journal.say(
            "snapshot_restored", members=self.status["restored_members"], path=str(self._path)
        )

    def _restore_member(self, told: Register, key: str) -> dict[str, int] | None:
        """Restore a member; returns the slots of its tiers, None if the id is taken or the cluster is full."""
        cluster = self._cluster
        member = cluster.members.restore(told, key, now_s=cluster.clock.monotonic_s())
        if member is None:
            return None
        cluster.lookups.set_readable(member.group, member.readable)
        cluster.lookups.set_shared(member.group, told.media)
        try:
            return cluster.directory.restore_slots(member.group, told.tiers)
        except SlotsExhausted:
            return None

    async def _restore_placements(self, slot_of: array[int]) -> None:
        """Restore placements block by block, but leave out tiers that have got another slot meanwhile."""
        self._restoring = True
        lookups = self._cluster.lookups
        ours = lookups.places()
        used = [index for index, slot in enumerate(slot_of) if slot]  # not all 65,536 for each block
        blocks = read_blocks(self._path)
        try:
            while True:
                block = await self._loop.run_in_executor(self._thread, next, blocks, None)
                if block is None:
                    break
                now = lookups.places()
                for index in used:
                    slot = slot_of[index]
                    if slot and now.get(slot) != ours[slot]:
                        slot_of[index] = 0
                wrong = await self._cluster.directory.restore(block[0], block[1], slot_of)
                if wrong:
                    raise BadSnapshot(f"it was restored only in part: {wrong}")
                self.status["restored_keys"] += len(block[0])
        except BadSnapshot as error:
            self._cluster.list_restored()
            self._ignore(str(error))
        finally:
            self._restoring = False
            self._cluster.restored.set()

    def _ignore(self, reason: str, path: Path | None = None) -> None:
        self.status["ignored"] += 1
        self.status["ignored_reason"] = reason
        self._cluster.journal.say("snapshot_ignored", path=str(path or self._path), reason=reason)


class _Checked:
    """A file, with the checksum and length of everything written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0
        self.n_bytes = 0

    def write(self, part: bytes) -> None:
        self._file.write(part)
        self.crc = crc32c(part, self.crc)
        self.n_bytes += len(part)


def read_document(path: Path) -> Document:
    """The document of a snapshot whose checksum is right. Raises BadSnapshot, and FileNotFoundError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(MAGIC) + _COUNT.size + _FOOTER.size:
                raise BadSnapshot(f"it has only {size} bytes")
            magic = file.read(len(MAGIC))
            if magic[:-1] != MAGIC[:-1]:
                raise BadSnapshot("it is not a snapshot of a directory")
            if magic != MAGIC:
                raise BadSnapshot(f"it has format version {magic[-1]}, this controller reads {MAGIC[-1]}")
            file.seek(size - _FOOTER.size)
            document_at, crc, end = _FOOTER.unpack(file.read(_FOOTER.size))
            document_bytes = size - _FOOTER.size - document_at
            if end != _END or not 0 < document_bytes <= MAX_DOCUMENT_BYTES:
                raise BadSnapshot("its end is missing")
            file.seek(0)
            found, left = 0, size - _FOOTER.size
            while left:
                part = file.read(min(left, 1 << 20))
                if not part:
                    raise BadSnapshot("it became shorter while it was read")
                found = crc32c(part, found)
                left -= len(part)
            if found != crc:
                raise BadSnapshot("its checksum is wrong")
            file.seek(document_at)
            return msgspec.json.decode(file.read(document_bytes), type=Document)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadSnapshot(f"it cannot be read: {error}") from None


def read_blocks(path: Path) -> Iterator[tuple[array[int], array[int]]]:
    """Tags and slots, block by block. Raises BadSnapshot."""
    try:
        with open(path, "rb") as file:
            file.seek(len(MAGIC))
            while True:
                (count,) = _COUNT.unpack(_exactly(file, _COUNT.size))
                if not count:
                    return
                if count > MAX_BLOCK:
                    raise BadSnapshot(f"a block in it has {count} placements")
                yield array("Q", _exactly(file, 8 * count)), array("H", _exactly(file, 2 * count))
    except OSError as error:
        raise BadSnapshot(f"it cannot be read: {error}") from None


def _exactly(file: BinaryIO, count: int) -> bytes:
    part = file.read(count)
    if len(part) != count:
        raise BadSnapshot("a block in it ends too early")
    return part
