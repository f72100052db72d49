# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""The connector of `fs` (ext/core/src/fs/connector.h) in a capsule; see fs.pyi."""

import os

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string


cdef extern from "files/files.h" namespace "kvstrata" nogil:
    cdef cppclass FileLayer:
        pass
    FileLayer& posix_files() noexcept


cdef extern from "kvstrata/connector.h" namespace "kvstrata" nogil:
    const char* connector_capsule_name
    cdef cppclass Connector:
        pass


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

    cdef cppclass FsConnector(Connector):
        FsConnector(FsOptions, FileLayer&) except +


cdef extern from *:
    """
    static void set_min_free(kvstrata::FsOptions& options, std::uint64_t bytes) {
      options.min_free_bytes = bytes;
    }
    """
    void set_min_free(FsOptions&, uint64_t) noexcept


def connector(base_path, relative_tmp_dir, *, shared, use_odirect, capacity_bytes, min_free_bytes):
    cdef FsOptions options
    cdef Connector* made
    options.base_path = os.fsencode(base_path)
    options.relative_tmp_dir = os.fsencode(relative_tmp_dir)
    options.shared = shared
    options.use_odirect = use_odirect
    options.capacity_bytes = capacity_bytes
    if min_free_bytes is not None:
        set_min_free(options, min_free_bytes)
    # The capsule holds a pointer to the base class, as its name promises.
    made = new FsConnector(options, posix_files())
    return PyCapsule_New(made, connector_capsule_name, NULL)
