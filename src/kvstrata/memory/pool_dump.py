"""Describes a pool from its files, without a server; it writes, locks, maps and adopts nothing.

The files may belong to a running server, to one that died, or to none; they may be damaged or cut off.  They do not
contain the names of tenants and models.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstrata.errors import SegmentError
from kvstrata.memory import linux
from kvstrata.memory.paths import PID_FILE
from kvstrata.memory.segment_files import EXTENTS, INDEX, SESSIONS_LOCK
from kvstrata.native.pool import STATES
from kvstrata.native.snapshot import ROW_BITS, IndexSnapshot

_ALIGNMENT = 4096
_MOST_SIZES = 64
_MOST_IDENTITIES = 1024
_MOST_DAMAGED = 32


def dump(path: Path, *, entries: bool = False) -> dict[str, Any]:
    """A document about the pool whose index is the file `path`, or lies in the folder `path`.

    With `entries` the document also describes each entry.

    Raises SegmentError that says why the files cannot be read as a pool.
    """
    folder = path if path.is_dir() else None
    index = path / INDEX if folder else path
    with _opened(index) as fd:
        try:
            snapshot = IndexSnapshot(fd)
            document = _header(snapshot, index)
            document["server"] = _server(fd, folder)
            if folder:
                document["extents_file"] = _extents(folder, document["extents_bytes"])
            rows = snapshot.rows()
            tally = _Tally(document["extents_bytes"], {row["row"] for row in rows})
            every: list[dict[str, Any]] = []
            at = 0
            while True:
                read, at = snapshot.read(at)
                for entry in read:
                    tally.add(entry)
                    if entries:
                        every.append(_entry(entry))
                if not at:
                    break
        except OSError as error:
            raise SegmentError(f"{index}: cannot be read: {error.strerror or error}", field="FILE") from error
        except SegmentError as error:
            raise SegmentError(f"{index}: {error}", field="FILE") from error
    locked = _row_locks(folder, [row["row"] for row in rows])
    document["rows"] = [
        {
            "row": row["row"],
            "session": row["session"].hex(),
            "group": row["group"].hex(),
            "pid": row["pid"],
            "epoch": row["epoch"],
            "registers_memory": row["registers_memory"],
            "lock": locked.get(row["row"], "unknown") if row["row"] else "server",
            "may_touch_entries": tally.touched[row["row"] % ROW_BITS],
            "reserved_entries": tally.owned[row["row"]],
        }
        for row in rows
    ]
    document.update(tally.document())
    if entries:
        document["every_entry"] = every
    return document


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Opens a regular file for reading. Raises SegmentError that says what to do."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
    except FileNotFoundError:
        raise SegmentError(
            f"{path}: no such file; pools lie in /dev/shm/kvstrata-UID-PORT", field="FILE"
        ) from None
    except PermissionError:
        raise SegmentError(f"{path}: permission denied{_owner(path)}", field="FILE") from None
    except (OSError, ValueError) as error:
        raise SegmentError(f"{path}: cannot be opened: {error}", field="FILE") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SegmentError(f"{path}: not a regular file; give an index file or its folder", field="FILE")
        yield fd
    finally:
        os.close(fd)


def _owner(path: Path) -> str:
    for one in (path, path.parent):
        with contextlib.suppress(OSError):
            found = one.stat()
            return f"; {one} has uid {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}, run it as that user"
    return ""


def _header(snapshot: IndexSnapshot, index: Path) -> dict[str, Any]:
    header = snapshot.header()
    beat = header["heartbeat_ns"]
    age_s = (time.monotonic_ns() - beat) * 1e-9
    return {
        "index": str(index),
        "format_version": header["format_version"],
        "pool_id": header["pool_id"].hex(),
        "index_bytes": header["file_bytes"],
        "extents_bytes": header["extents_bytes"],
        "entry_capacity": header["entry_capacity"],
        "entries_touched": header["entries_touched"],
        "epoch": header["epoch"],
        "heartbeat_age_s": age_s if beat and age_s >= 0 else None,
        "has_l2": header["has_l2"],
        "slab_bytes": header["slab_bytes"],
        "runs": [
            {"first_slab": first, "slabs": slabs, "extent_bytes": extent}
            for first, slabs, extent in snapshot.runs()
        ],
    }


def _server(index_fd: int, folder: Path | None) -> dict[str, Any]:
    """Whether a server has the pool now; a server locks the index for its life."""
    server: dict[str, Any] = {"running": linux.byte_locker(index_fd, 0) is not None}
    if folder:
        try:
            with _opened(folder / PID_FILE) as fd:
                server["pid_file"] = os.read(fd, 32).decode("ascii", "replace").strip()
        except (SegmentError, OSError) as error:
            server["pid_file"] = f"unknown: {error}"
    return server


def _extents(folder: Path, expected_bytes: int) -> dict[str, Any]:
    try:
        with _opened(folder / EXTENTS) as fd:
            found = os.fstat(fd)
    except SegmentError as error:
        return {"problem": str(error)}
    problem = "" if found.st_size == expected_bytes else f"the index is for {expected_bytes} bytes"
    return {"bytes": found.st_size, "allocated_bytes": found.st_blocks * 512, "problem": problem}


def _row_locks(folder: Path | None, rows: list[int]) -> dict[int, str]:
    """By row: `held` while its process locks its byte of sessions.lock, `free` once that process is gone."""
    if not folder:
        return {}
    try:
        with _opened(folder / SESSIONS_LOCK) as fd:
            return {
                row: "free" if linux.byte_locker(fd, row) is None else "held"
                for row in rows
                if row  # the server's own row has no byte
            }
    except (SegmentError, OSError):
        return {}


def _entry(entry: tuple[Any, ...]) -> dict[str, Any]:
    number, state, changing, key, offset, length, generation, parent, rows, identity, owner, tenant = entry
    return {
        "entry": number,
        "state": _state(state),
        "changing": changing,
        "key": key.hex(),
        "offset": offset,
        "length": length,
        "generation": generation,
        "parent": parent,
        "row_bits": [bit for bit in range(ROW_BITS) if rows >> bit & 1],
        "owner": owner if owner < 1 << 32 else None,
        "identity": identity.hex(),
        "tenant": tenant,
    }


def _state(number: int) -> str:
    return STATES[number] if number < len(STATES) else f"unknown {number}"


class _Tally:
    """Sums over entries, with bounds that a damaged file cannot exceed."""

    def __init__(self, extents_bytes: int, rows: set[int]) -> None:
        self.touched: Counter[int] = Counter()
        """Entries that rows may touch, by row modulo ROW_BITS."""
        self.owned: Counter[int] = Counter()
        """Reserved entries, by row."""
        self._extents_bytes = extents_bytes
        self._rows = rows
        self._states: dict[Any, list[int]] = {}
        self._sizes: dict[Any, list[int]] = {}
        self._tenants: dict[Any, list[int]] = {}
        self._identities: dict[Any, list[int]] = {}
        self._leased = [0, 0]
        self._changing = 0
        self._damaged: list[dict[str, Any]] = []
        self._damaged_count = 0

    def add(self, entry: tuple[Any, ...]) -> None:
        number, state_number, changing, _, offset, length, _, _, rows, identity, owner, tenant = entry
        state = _state(state_number)
        self._changing += changing
        problem = self._problem(state_number, offset, length)
        if problem and not changing:
            self._damaged_count += 1
            if len(self._damaged) < _MOST_DAMAGED:
                self._damaged.append(
                    {"entry": number, "state": state, "offset": offset, "length": length, "problem": problem}
                )
        for bit in range(rows.bit_length()):
            if rows >> bit & 1:
                self.touched[bit] += 1
        if state == "reserved" and owner in self._rows:
            self.owned[owner] += 1
        if rows and state in ("ready", "unverified"):
            _count(self._leased, length)
        _count_at(self._states, state, length, _MOST_SIZES)
        _count_at(self._sizes, length, length, _MOST_SIZES)
        _count_at(self._tenants, tenant, length, _MOST_IDENTITIES)
        _count_at(self._identities, identity.hex(), length, _MOST_IDENTITIES)

    def _problem(self, state: int, offset: int, length: int) -> str:
        if state >= len(STATES):
            return "no such state"
        if length == 0:
            return "no length"
        if offset % _ALIGNMENT:
            return f"offset is not a multiple of {_ALIGNMENT}"
        return "leaves the extents" if offset + length > self._extents_bytes else ""

    def document(self) -> dict[str, Any]:
        return {
            "states": _sums("state", self._states),
            "sizes": _sums("record_bytes", self._sizes),
            "tenants": _sums("tenant", self._tenants),
            "identities": _sums("identity", self._identities),
            "leases": {"entries": self._leased[0], "bytes": self._leased[1]},
            "changing_entries": self._changing,
            "damaged_entries": self._damaged_count,
            "damaged": self._damaged,
        }


def _count(sums: list[int], length: int) -> None:
    sums[0] += 1
    sums[1] += length


def _count_at(table: dict[Any, list[int]], key: Any, length: int, most: int) -> None:
    """Adds to the row `key` of a table with at most `most` rows; further keys are added to the row None."""
    if key not in table and len(table) >= most:
        key = None
    _count(table.setdefault(key, [0, 0]), length)


def _sums(name: str, table: dict[Any, list[int]]) -> list[dict[str, Any]]:
    """The rows of a table in order; the row None, which sums up all other keys, comes last."""
    keys = sorted(key for key in table if key is not None) + [None] * (None in table)
    return [{name: key, "entries": table[key][0], "bytes": table[key][1]} for key in keys]
