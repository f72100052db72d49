"""The `fs` adapter: one self-describing file per record in a directory of any mounted file system.

    <base_path>/<2 hex>/<2 hex>/<64 hex>.kvc     the record, byte for byte as it lies in L1
    <base_path>/<relative_tmp_dir>/*.part        records being written, removed at the next start
    <base_path>/.kvstrata.lock                   lock of the server that owns the directory, or of those that share it
    <base_path>/.kvstrata.shared/                messages between the servers that share it

The medium is C++.  Its invariants are in ext/core/src/fs/exclusive/connector.h, and for a directory that several
servers share, in ext/core/src/fs/shared/connector.h.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvstrata.errors import StorageError
from kvstrata.native import fs
from kvstrata.storage.base import WALK_KEYS
from kvstrata.storage.lanes import Lane
from kvstrata.storage.media.medium import medium_word
from kvstrata.storage.native_adapter import NativeAdapter

_NAME = re.compile(r"([0-9a-f]{2})([0-9a-f]{2})[0-9a-f]{60}\.kvc")


class FsAdapter(NativeAdapter):
    """See the module. One instance owns its directory from `open` to `close`, unless it is shared."""

    def __init__(
        self,
        base_path: str,
        *,
        relative_tmp_dir: str = "tmp",
        shared: bool = False,
        use_odirect: bool = True,
        capacity_bytes: int = 0,
        min_free_bytes: int | None = None,
        num_workers: int = 4,
        per_op_workers: Mapping[Lane, int] | None = None,
        name: str = "fs",
    ) -> None:
        """`shared`: several servers use the directory, with one cap for all of them.

        `use_odirect` bypasses the page cache; on a file system without direct I/O, the adapter logs that and uses the
        cache.  `capacity_bytes` 0: the only limit is `min_free_bytes`, the bytes to leave free on the file system
        (None: 1 % of it, at least 256 MiB, at most a tenth).  The other parameters: storage/lanes.py.
        """
        self.base_path = Path(os.path.abspath(base_path))
        capsule = fs.connector(
            str(self.base_path),
            relative_tmp_dir,
            shared=shared,
            use_odirect=use_odirect,
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes,
        )
        super().__init__(capsule, name=name, num_workers=num_workers, per_op_workers=per_op_workers)
        if shared:
            medium = medium_word("fs", self.base_path.resolve())
            self.capabilities = msgspec.structs.replace(self.capabilities, medium=medium)

    async def walk(self) -> AsyncIterator[Sequence[bytes]]:
        """The connector's list; a directory that several servers share is read, since nobody has an index of it."""
        if self.capabilities.lists:
            async for page in super().walk():
                yield page
            return
        for first in range(256) if not self._not_ready() else ():
            found = self._lanes.submit(
                Lane.DELETE, partial(_keys_below, self.base_path / f"{first:02x}"), beyond_limit=True
            )
            assert found is not None, "refused work that has no limit"
            try:
                keys = await found
            except OSError as error:
                raise StorageError(
                    f"{self.name}: not listed: {self.base_path}: {error.strerror}", field=self.name
                ) from None
            for begin in range(0, len(keys), WALK_KEYS):
                yield keys[begin : begin + WALK_KEYS]

    def path(self, key: bytes) -> Path:
        """The path of a key's record, whether or not the record is stored."""
        name = key.hex()
        return self.base_path / name[:2] / name[2:4] / f"{name}.kvc"


def _keys_below(folder: Path) -> list[bytes]:
    """The keys of the records in a folder of the first level. Raises OSError; folders and files may vanish."""
    keys: list[bytes] = []
    try:
        for inner in sorted(os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for name in os.listdir(folder / inner):
                    match = _NAME.fullmatch(name)
                    if match is not None and match.groups() == (folder.name, inner):
                        keys.append(bytes.fromhex(name[:-4]))
    except FileNotFoundError:
        pass
    return keys
