"""The `fs` adapter: one self-describing file per record in a directory of any mounted file system.

    <base_path>/<2 hex>/<2 hex>/<64 hex>.kvc     the record, byte for byte as it lies in L1
    <base_path>/<relative_tmp_dir>/*.part        records being written, removed at the next start
    <base_path>/.kvstrata.lock                   lock of the server that owns the directory

With `shared` all this lies in <base_path>/server-<number>, one folder for each server.  The medium is C++, with its
invariants in ext/core/src/fs/connector.h and fs/others.h.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvstrata.native.connector import fs_connector
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.shared import medium_word
from kvstrata.tiers.native_adapter import NativeAdapter


class FsAdapter(NativeAdapter):
    """See the module. One instance owns its directory, or its folder there, from `open` to `close`."""

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
        """`shared`: several servers use the directory; each has a cap of its own and reads all records.

        `use_odirect` bypasses the page cache; on a file system without direct I/O, the adapter logs that and uses the
        cache.  `capacity_bytes` 0: the only limit is `min_free_bytes`, the bytes to leave free on the file system
        (None: 1 % of it, at least 256 MiB, at most a tenth).  The other parameters: tiers/lanes.py.
        """
        self.base_path = Path(os.path.abspath(base_path))
        capsule = fs_connector(
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

    def path(self, key: bytes) -> Path:
        """The path of a key's record, whether or not it is stored. REQUIRES a directory that is not shared."""
        name = key.hex()
        return self.base_path / name[:2] / name[2:4] / f"{name}.kvc"
