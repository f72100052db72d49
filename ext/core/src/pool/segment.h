// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The two files of a pool as the server has them: mapped, and backed by memory as far as they are
// used. An extent or entry without memory is never touched, so a full file system costs a refusal,
// not a SIGBUS.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "memory/backing.h"
#include "pool/index.h"
#include "pool/policy.h"

namespace kvstrata {

// Opened in steps, index before extents; the descriptors stay the caller's. Complete, and neither
// moved nor changed, once a Pool owns it.
struct PoolSegment {
  // Gets memory for the first `head_bytes` of the index and for a part of its cold entries. Entries
  // that were never used get theirs when they are taken (Entries::take).
  [[nodiscard]] Status back_index(int index_fd, std::uint64_t file_bytes, std::uint64_t head_bytes,
                                  std::uint64_t cold_offset, std::uint64_t cold_bytes);
  [[nodiscard]] Status map_index(int index_fd, std::uint64_t file_bytes);
  // Maps the extents, and makes the server's own table of entries. REQUIRES: `index` is set.
  [[nodiscard]] Status open_extents(int extents_fd);

  std::uint8_t* extents_address() const noexcept {
    return static_cast<std::uint8_t*>(extents_mapping.address());
  }
  EntryLocal* local() const noexcept { return static_cast<EntryLocal*>(local_mapping.address()); }
  std::uint64_t missing_bytes() const noexcept {
    return index_backing.missing_bytes() + extents_backing.missing_bytes();
  }

  IndexView index;
  Mapping index_mapping;
  Mapping extents_mapping;
  Mapping local_mapping;  // private memory: an EntryLocal for each entry
  Backing index_backing;
  Backing extents_backing;
};

}  // namespace kvstrata
