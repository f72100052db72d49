"""The native connector of `fs` (ext/core/src/fs/connector.h)."""

def connector(
    base_path: str,
    relative_tmp_dir: str,
    *,
    shared: bool,
    use_odirect: bool,
    capacity_bytes: int,
    min_free_bytes: int | None,
) -> object:
    """The capsule for `kvstrata.storage.native_adapter.NativeAdapter`; its directory is not opened yet.

    `capacity_bytes` 0: no cap.  `min_free_bytes` None: the default of ext/core/src/fs/directory.h.
    """
