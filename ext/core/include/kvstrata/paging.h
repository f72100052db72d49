// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Page tables of a shared mapping.
//
// The server faults the pool's pages in; but each process has page tables of its own, and the first
// touch of a page costs it a fault even so: a copy into extents that a process has never touched
// ran at a third of its speed. Mapping the pages ahead costs 0.1-0.3 µs a page, once.
#pragma once

#include <cstdint>

#include "kvstrata/status.h"

namespace kvstrata {

// Enters those pages of [address, address + bytes) into this process's page tables, writable, that
// exist already; a page that nobody has touched yet stays so (it would be charged to this process's
// control group). `mapped_bytes` is how much existed; call again later for the rest. Contents do
// not change. Takes the lock of the address space for 2 MiB at a time.
//
// REQUIRES: the range lies in one shared, writable mapping that stays until the return, and begins
// at a page. kBadArgument: it does not begin at a page. kOsError: detail(0) is errno.
Status map_present_pages(std::uint8_t* address, std::uint64_t bytes,
                         std::uint64_t* mapped_bytes) noexcept;

}  // namespace kvstrata
