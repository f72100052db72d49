"""The snapshot of the directory on disk: written as a whole every `snapshot_s`, read once at the start.

The file with the orders of admins (orders.py) is in the same folder.

    magic (8) · partitions of the registry (ext/core/src/registry/saved.cpp) · document (JSON) · footer

Little-endian, as every machine that the native modules are built for.  The document names the members, the slot number
of each of their tiers, and the number of the first change of each that the placements may lack; a member that was not
in step has none.  It is written last, and leaves out slots that changed their tier while the placements were written.
The footer has the document's offset, and the CRC32C of the document; each partition has a CRC32C of its own.

1. A file becomes the snapshot by rename, after its fsync; then the folder is synced.  After a crash the previous
   snapshot is there, and perhaps a `.new` file, which the next write overwrites.
2. A snapshot that cannot be read, has another format version, or is too old, is left in place, counted, recorded as an
   event, and not served.
3. No placement is served before all placements were read and their checksums verified.
4. A separate thread writes and reads placements, so the loop does not wait for them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

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

MAGIC = b"KVSDIR\x00\x04"
"""First bytes of a snapshot; the last of them is the format's version."""
FILE = "directory.snapshot"
MAX_AGE_S = 3_600.0
"""An older snapshot is not served."""
MAX_DOCUMENT_BYTES = 64 << 20
_FOOTER = struct.Struct("<QI")


class SavedMember(msgspec.Struct, frozen=True):
    """A member of a snapshot."""

    told: Register
    key: str
    slots: dict[str, Annotated[int, Meta(ge=1, le=65_535)]]
    """By tier: the slot of its placements in the file."""
    cursor: int | None
    """Cursor from which it is followed; None: it was not in step."""


class Document(msgspec.Struct, frozen=True):
    """The content of a snapshot besides placements."""

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
        self._restored: asyncio.Future[tuple[int, str]] | None = None
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
            document, begin, end = await self._loop.run_in_executor(self._thread, read_document, self._path)
            age_s = (self._cluster.clock.unix_ms() - document.unix_ms) / 1000
            if age_s > MAX_AGE_S:
                raise BadSnapshot(f"it is {age_s:.0f} s old, more than {MAX_AGE_S:g}")
        except FileNotFoundError:
            return
        except BadSnapshot as error:
            self._ignore(str(error))
            return
        directory, path = self._cluster.directory, str(self._path.absolute())
        left_out, load = directory.open_left_out(), directory.registry.restore
        slot_of = self._restore_members(document)
        self._restored = directory.restore(
            lambda slots: self._thread.submit(load, path, begin, end, slots), slot_of, left_out
        )

    async def keep(self) -> None:
        """Wait for the placements of a snapshot, then write one every `snapshot_s`, until cancelled."""
        if self._restored is not None:
            self.status["restored_keys"], wrong = await self._restored
            if wrong:
                self._cluster.list_restored()
                self._ignore(wrong)
        while True:
            await asyncio.sleep(self._every_s)
            await self.write()

    async def write(self) -> None:
        """Write a snapshot now. A failure is counted and recorded as an event."""
        if self._writing is not None:
            return
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
            file.write(MAGIC)
            for partition in itertools.count():
                placements = self._cluster.directory.registry.dump(partition)
                if not placements:
                    break
                file.write(placements)
            document_at = file.tell()
            # The document is made on the loop's thread, since only that thread changes the members and slots in it.
            told = asyncio.run_coroutine_threadsafe(self._document(before, cursors), self._loop).result()
            file.write(told)
            file.write(_FOOTER.pack(document_at, crc32c(told)))
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

    def _restore_members(self, document: Document) -> dict[int, int]:
        """Restore the members; returns which slot each slot of the file has now."""
        cluster = self._cluster
        slot_of: dict[int, int] = {}
        for saved in document.members:
            restored = self._restore_member(saved.told, saved.key)
            if restored is None:
                continue
            self.status["restored_members"] += 1
            if saved.cursor is not None and saved.slots.keys() == restored.keys():
                cluster.resume(saved.told.instance, saved.cursor)
            slot_of |= {saved.slots[tier]: slot for tier, slot in restored.items() if tier in saved.slots}
        cluster.journal.say(
            "snapshot_restored", members=self.status["restored_members"], path=str(self._path)
        )
        return slot_of

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

    def _ignore(self, reason: str, path: Path | None = None) -> None:
        self.status["ignored"] += 1
        self.status["ignored_reason"] = reason
        self._cluster.journal.say("snapshot_ignored", path=str(path or self._path), reason=reason)


def read_document(path: Path) -> tuple[Document, int, int]:
    """The document of a snapshot whose checksum is right, and where the placements begin and end.

    Raises BadSnapshot, and FileNotFoundError.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(MAGIC) + _FOOTER.size:
                raise BadSnapshot(f"it has only {size} bytes")
            magic = file.read(len(MAGIC))
            if magic[:-1] != MAGIC[:-1]:
                raise BadSnapshot("it is not a snapshot of a directory")
            if magic != MAGIC:
                raise BadSnapshot(f"it has format version {magic[-1]}, this controller reads {MAGIC[-1]}")
            file.seek(size - _FOOTER.size)
            document_at, crc = _FOOTER.unpack(file.read(_FOOTER.size))
            document_bytes = size - _FOOTER.size - document_at
            if document_at < len(MAGIC) or not 0 < document_bytes <= MAX_DOCUMENT_BYTES:
                raise BadSnapshot("its end is missing")
            file.seek(document_at)
            told = file.read(document_bytes)
            if crc32c(told) != crc:
                raise BadSnapshot("its checksum is wrong")
            return msgspec.json.decode(told, type=Document), len(MAGIC), document_at
    except FileNotFoundError:
        raise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadSnapshot(f"it cannot be read: {error}") from None
