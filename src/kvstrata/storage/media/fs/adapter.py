"""The `fs` adapter: one self-describing file per record in a directory of any mounted file system.

    <base_path>/<2 hex>/<2 hex>/<64 hex>.kvc     the record, byte for byte as it lies in L1
    <base_path>/<relative_tmp_dir>/*.part        records being written, removed at the next start
    <base_path>/.kvstrata.lock                   lock of the server that owns the directory, or of those that share it
    <base_path>/.kvstrata.shared/                messages between the servers that share it

The medium is C++.  Its invariants are in ext/core/src/fs/exclusive/connector.h, and for a directory that several
servers share, in ext/core/src/fs/shared/connector.h.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvstrata.native import fs
from kvstrata.storage.lanes import Lane
from kvstrata.storage.native_adapter import NativeAdapter


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

    def path(self, key: bytes) -> Path:
        """The path of a key's record, whether or not the record is stored."""
        name = key.hex()
        return self.base_path / name[:2] / name[2:4] / f"{name}.kvc"
