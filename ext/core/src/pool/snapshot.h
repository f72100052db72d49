// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Reads an index file as it is, for tools that look at a pool without taking part in it.
//
// The file is read, never mapped: a file that is truncated meanwhile costs a refusal instead of a
// SIGBUS, and a hole of a sparse file is read as zeros without giving it memory. Nothing in the
// file is trusted and nothing is written. A running server may change entries meanwhile: each entry
// is read twice, and Entry::changing says that it changed.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "pool/index.h"
#include "pool/slab.h"

namespace kvstrata {

class IndexSnapshot {
 public:
  struct Entry {
    std::uint32_t number = 0;
    std::uint8_t state = 0;  // an EntryState, or what damage has left there
    bool changing = false;   // the fields were changed meanwhile, or by a server that then died
    Key key{};
    std::uint64_t offset = 0;
    std::uint32_t length = 0;
    std::uint32_t generation = 0;
    std::uint32_t parent = kNoEntry;
    std::uint64_t rows[kRowBits / 64] = {};  // as ColdEntry::rows
    std::uint8_t identity[16] = {};
    std::uint64_t owner = 0;
    std::uint64_t tenant = 0;
  };
  struct Run {
    std::uint32_t first_slab = 0;
    std::uint32_t slabs = 0;
    std::uint64_t extent_bytes = 0;
  };
  static constexpr std::uint32_t kMostEntries = 4096;  // of one `read`

  // Reads header and rows. The descriptor stays the caller's and must be that of a regular file.
  [[nodiscard]] static Status open(int index_fd, IndexSnapshot* out, FormatMismatch* mismatch);

  const IndexHeader& header() const noexcept { return head_.front().header; }
  // REQUIRES: row < kRowCount.
  const RowRecord& row(std::uint32_t row) const noexcept { return head_.front().rows[row]; }
  std::uint64_t file_bytes() const noexcept { return layout_.file_bytes; }
  // Entries that were ever used lie below this number.
  std::uint32_t entries_touched() const noexcept;
  // The sound runs of the slab table.
  std::vector<Run> runs() const;

  // Appends the entries among [first, first + kMostEntries) that are not FREE; `next` is the number
  // to continue from, 0 after the last. `index_fd` must be the descriptor that was opened.
  [[nodiscard]] Status read(int index_fd, std::uint32_t first, std::vector<Entry>* entries,
                            std::uint32_t* next) const;

 private:
  struct Head {
    IndexHeader header;
    RowRecord rows[kRowCount];
  };
  std::vector<Head> head_;  // one element
  IndexLayout layout_;
};

}  // namespace kvstrata
