"""The native connectors of `fs` (ext/core/include/kvstrata/fs_connector.h and fs_shared.h)."""

def connector(
    base_path: str,
    relative_tmp_dir: str,
    *,
    shared: bool,
    use_odirect: bool,
    capacity_bytes: int,
    min_free_bytes: int | None,
) -> object:
    """The capsule for `kvstrata.storage.native_adapter.NativeAdapter`; sizes in bytes, 0 capacity: no cap."""
