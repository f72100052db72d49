"""The `fs` adapter: one self-describing file per record in a directory of any mounted file system.

    <base_path>/<2 hex>/<2 hex>/<64 hex>.kvc     the record, byte for byte as it lies in L1
    <base_path>/<relative_tmp_dir>/*.part        records being written, removed at the next start
    <base_path>/.kvstrata.lock                   lock of the server that owns the directory, or of those that share it
    <base_path>/.kvstrata.shared/                what those that share it tell each other

The medium is C++ (ext/core/include/kvstrata/fs_connector.h, and fs_shared.h for a shared directory, where the
invariants stand); here are its settings.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvstrata.native import fs
from kvstrata.storage.lanes import Lane
from kvstrata.storage.native_adapter import NativeAdapter


class FsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked settings; sizes in bytes."""

    base_path: str
    relative_tmp_dir: str = "tmp"
    shared: bool = False
    """Several servers use the directory, with one cap for all of them."""
    use_odirect: bool = True
    """Past the page cache, where the file system can; where it cannot, the log says so."""
    capacity_bytes: int = 0
    """0: no cap but `min_free_bytes`."""
    min_free_bytes: int | None = None
    """Free bytes to leave on the file system; None: 1 % of it, at least 256 MiB, at most a tenth."""
    num_workers: int = 4
    per_op_workers: dict[Lane, int] = {}


class FsAdapter(NativeAdapter):
    """See the module. One instance owns its directory from `open` to `close`, unless it is shared."""

    def __init__(self, settings: FsSettings, *, name: str = "fs") -> None:
        base_path = os.path.abspath(settings.base_path)
        capsule = fs.connector(
            base_path,
            settings.relative_tmp_dir,
            shared=settings.shared,
            use_odirect=settings.use_odirect,
            capacity_bytes=settings.capacity_bytes,
            min_free_bytes=settings.min_free_bytes,
        )
        super().__init__(
            capsule, name=name, num_workers=settings.num_workers, per_op_workers=settings.per_op_workers
        )
        self.settings = settings
        self._base = Path(base_path)

    def path(self, key: bytes) -> Path:
        """Where the record of a key lies, if it is there."""
        name = key.hex()
        return self._base / name[:2] / name[2:4] / f"{name}.kvc"
