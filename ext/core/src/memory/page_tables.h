// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Fills the page tables of a process for a shared mapping.
//
// The server faults the pool's pages in, but each process has its own page tables, so a process
// still takes a fault at its first touch of each page: a copy into extents that the process had
// never touched ran at a third of the usual speed. Mapping pages ahead of use costs 0.1-0.3 µs per
// page, once.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace kvstrata {

// Faults in the pages of a shared, writable mapping and changes no byte, even while other processes
// write to it. Returns 0 or errno.
int populate_pages(std::uint8_t* address, std::uint64_t bytes) noexcept;

// Maps the pages of [address, address + bytes) that already exist into this process's page tables,
// writable. A page that no process has touched yet is left out, because it would be charged to this
// process's control group; a later call can map it. `mapped_bytes` receives the number of bytes
// that were mapped, also after an error. Contents do not change. Holds the kernel's lock of the
// address space for 2 MiB at a time.
//
// REQUIRES: the range lies in one shared, writable mapping that exists until the call returns.
// kBadArgument: the address is not at the beginning of a page. kOsError: mincore or madvise failed;
// detail(0) is errno.
Status map_present_pages(std::uint8_t* address, std::uint64_t bytes,
                         std::uint64_t* mapped_bytes) noexcept;

}  // namespace kvstrata
