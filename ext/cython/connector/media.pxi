# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# The connectors of `fs` and `disk` in capsules. A capsule holds a Connector*, which need not be the address of the
# object.

cdef extern from "files/files.h" namespace "kvstrata" nogil:
    cdef cppclass FileLayer:
        pass
    FileLayer& posix_files() noexcept


cdef extern from "fs/connector.h" namespace "kvstrata" nogil:
    cdef cppclass OptionalBytes "std::optional<std::uint64_t>":
        pass

    cdef cppclass FsOptions:
        FsOptions() except +
        string base_path
        string relative_tmp_dir
        cbool shared
        cbool use_odirect
        uint64_t capacity_bytes
        OptionalBytes min_free_bytes

    cdef cppclass FsConnector(CConnector):
        FsConnector(FsOptions, FileLayer&) except +


cdef extern from *:
    """
    static void set_min_free(kvstrata::FsOptions& options, std::uint64_t bytes) {
      options.min_free_bytes = bytes;
    }
    """
    void set_min_free(FsOptions&, uint64_t) noexcept


def fs_connector(
    base_path: str, relative_tmp_dir: str, *, shared: bool, use_odirect: bool, capacity_bytes: int,
    min_free_bytes: int | None
) -> object:
    """The capsule for `kvstrata.tiers.native_adapter.NativeAdapter`; its directory is not opened yet.

    `capacity_bytes` 0: no cap.  `min_free_bytes` None: the default of ext/core/src/fs/directory.h.
    """
    cdef FsOptions options
    cdef CConnector* made
    options.base_path = os.fsencode(base_path)
    options.relative_tmp_dir = os.fsencode(relative_tmp_dir)
    options.shared = shared
    options.use_odirect = use_odirect
    options.capacity_bytes = capacity_bytes
    if min_free_bytes is not None:
        set_min_free(options, min_free_bytes)
    made = new FsConnector(options, posix_files())
    return PyCapsule_New(made, connector_capsule_name, NULL)


cdef extern from "disk/log.h" namespace "kvstrata" nogil:
    cdef cppclass DiskOptions:
        string folder
        uint64_t capacity_bytes, segment_bytes, min_free_bytes
        cbool direct
        uint32_t reinsert_percent

    cdef cppclass DiskLog(CConnector):
        DiskLog(DiskOptions) except +

    uint64_t kMinDiskBytes


# The smallest capacity of a disk log.
MIN_CAPACITY_BYTES: int = kMinDiskBytes


def disk_connector(
    folder: str, *, capacity_bytes: int, segment_bytes: int = 0, min_free_bytes: int = 0, direct: bool = True,
    reinsert_percent: int = 20
) -> object:
    """A capsule for `NativeConnector`; its log is not opened yet.

    `folder`: an absolute path, created if it is missing.  `capacity_bytes`: at least MIN_CAPACITY_BYTES.
    `segment_bytes`: a multiple of 4096, at most a sixteenth of the capacity; 0: by the capacity.
    `min_free_bytes`: the log grows only if it leaves this much free on the file system.  `direct`: use O_DIRECT if the
    file system supports it.  `reinsert_percent`: when a segment retires, this share of it is written again: its most
    recently used records.
    """
    cdef DiskOptions options
    options.folder = folder.encode("utf-8", "surrogateescape")
    options.capacity_bytes = capacity_bytes
    options.segment_bytes = segment_bytes
    options.min_free_bytes = min_free_bytes
    options.direct = direct
    options.reinsert_percent = reinsert_percent
    cdef CConnector* made = <CConnector*>new DiskLog(options)
    return PyCapsule_New(made, connector_capsule_name, NULL)
