"""Remembers which tenant each identity root belongs to, over restarts of the server.

A stored record names its identity root, and the root commits to the tenant, but nobody can compute the tenant from it.
So the server writes down the roots that its engines declare:

    $XDG_STATE_HOME/kvstrata/identities/INSTANCE_ID        mode 0600, appended to

    "KVROOTS1", then for each root: root (32 bytes), tenant (16 bytes: the start of the SHA-256 of its name), CRC-32 (4)

Invariants
1. A root in the book was declared by a process that might use the tenant.
2. A line that is torn or damaged is passed over; the file is never used without the checks of its lines.
3. The file has at most two lines for each of `limit` roots; then it is written anew with the newest `limit` roots.
4. The roots are in memory only while `roots` reads them, except the RECENT ones, which are not written again.

A root is written some milliseconds after it was declared, and not synced: a kill of the server in that time, or a power
cut, can lose it until an engine declares it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from kvstrata.config.folders import user_folder
from kvstrata.config.private_dir import make_private_dir
from kvstrata.config.private_file import write_private_file
from kvstrata.errors import ConfigError, StorageError
from kvstrata.process.lane import PoolLane
from kvstrata.process.supervisor import Supervisor
from kvstrata.types import KEY_BYTES

log = logging.getLogger(__name__)

MAGIC = b"KVROOTS1"
TENANT_BYTES = 16
LINE_BYTES = KEY_BYTES + TENANT_BYTES + 4
LIMIT = 1 << 17
"""Most known roots; an engine has one for each combination of tenant, adapter and salt."""
RECENT = 1024


def tenant_mark(tenant: str) -> bytes:
    """What stands for a tenant in the book."""
    return hashlib.sha256(tenant.encode()).digest()[:TENANT_BYTES]


def book_path(instance_id: str, environment: Mapping[str, str]) -> Path | None:
    """Where the book of an instance is kept; None if its user has no folder for state."""
    state = user_folder(environment, "XDG_STATE_HOME", ".local/state")
    return Path(state) / "kvstrata" / "identities" / instance_id if state else None


class IdentityBook:
    """See the module. Belongs to the event loop; files are read and written on the lane."""

    def __init__(self, path: Path | None, lane: PoolLane, supervisor: Supervisor, limit: int = LIMIT) -> None:
        """`path` None: the user has no folder for state, and nothing is kept."""
        self._path = path
        self._lane = lane
        self._supervisor = supervisor
        self._limit = limit
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._unwritten: list[bytes] = []
        self._writing: asyncio.Task[None] | None = None
        self._why_not = "" if path is not None else "neither XDG_STATE_HOME nor HOME names a folder for it"

    def note(self, root: bytes, tenant: str) -> None:
        """Remember the tenant of a root that a process has declared."""
        if root in self._recent or self._path is None or self._why_not:
            return
        self._recent[root] = None
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        self._unwritten.append(_line(root, tenant_mark(tenant)))
        if self._writing is None:
            self._writing = self._supervisor.job(self._write(self._path), "identity-book")

    async def roots(self) -> dict[bytes, bytes]:
        """The mark (see `tenant_mark`) of each known root's tenant. Raises StorageError if they are not kept."""
        while self._writing is not None:
            await asyncio.shield(self._writing)
        if self._path is None or self._why_not:
            raise StorageError(f"the tenants of records are not known: {self._why_not}")
        try:
            return await asyncio.shield(self._lane.run(_read, self._path, self._limit))
        except OSError as error:
            raise StorageError(
                f"the tenants of records are not known: {self._path}: {error.strerror}"
            ) from None

    async def _write(self, path: Path) -> None:
        try:
            while self._unwritten:
                lines, self._unwritten = self._unwritten, []
                await asyncio.shield(self._lane.run(_append, path, b"".join(lines), self._limit))
        except (OSError, ConfigError) as error:
            self._why_not = f"{path}: {error}"
            log.warning("L2 cannot be cleared of single tenants until the next start: %s", self._why_not)
        finally:
            self._writing = None


def _line(root: bytes, mark: bytes) -> bytes:
    return root + mark + zlib.crc32(root + mark).to_bytes(4, "little")


def _read(path: Path, limit: int) -> dict[bytes, bytes]:
    """The roots in the file, the oldest first, with their tenants' marks. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if file.read(len(MAGIC)) != MAGIC:
            return {}
        whole = (size - len(MAGIC)) // LINE_BYTES
        file.seek(len(MAGIC) + max(0, whole - 3 * limit) * LINE_BYTES)
        content = file.read(3 * limit * LINE_BYTES)
    known: dict[bytes, bytes] = {}
    for at in range(0, len(content) - LINE_BYTES + 1, LINE_BYTES):
        root, mark = content[at : at + KEY_BYTES], content[at + KEY_BYTES : at + KEY_BYTES + TENANT_BYTES]
        if content[at : at + LINE_BYTES] == _line(root, mark):
            known.pop(root, None)  # so that the newest come last
            known[root] = mark
    return dict(list(known.items())[-limit:])


def _append(path: Path, lines: bytes, limit: int) -> None:
    """Add lines behind the last whole one. Raises OSError, and ConfigError for a folder that others can write to."""
    make_private_dir(path.parent, "XDG_STATE_HOME")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    with open(fd, "r+b", buffering=0) as file:
        size = os.fstat(fd).st_size
        if file.read(len(MAGIC)) != MAGIC:
            os.ftruncate(fd, 0)
            size, lines = 0, MAGIC + lines
        else:
            size -= (size - len(MAGIC)) % LINE_BYTES
        file.seek(size)
        size += len(lines)
        while lines:
            lines = lines[file.write(lines) :]
    if size > len(MAGIC) + 2 * limit * LINE_BYTES:
        kept = _read(path, limit)
        write_private_file(path, MAGIC + b"".join(_line(*each) for each in kept.items()), overwrite=True)
