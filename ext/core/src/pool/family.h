// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The family of an entry, by which chunks continue each other: entries link to their parent in the
// index, and to their children and siblings in the server's memory.
//
// Keeps: parents form a forest of linked entries, and EntryLocal::children counts the children. An
// entry with children is not a victim.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cstdint>

#include "pool/entries.h"

namespace kvstrata {

inline constexpr std::uint32_t kMaxAncestors = 65'536;  // that one walk up a chain visits

struct Family {
  // The entries must outlive the object.
  explicit Family(Entries& entries) noexcept : entries(entries) {}

  // REQUIRES: `child` has no parent and is not above `parent`.
  void add(std::uint32_t parent, std::uint32_t child) noexcept;
  // Takes the entry from its parent, which may then be a victim.
  void leave_parent(std::uint32_t entry) noexcept;
  void orphan_children(std::uint32_t entry) noexcept;
  // Whether `candidate` is `entry` or above it. Also true if the walk up uses up `budget`.
  bool is_ancestor(std::uint32_t candidate, std::uint32_t entry,
                   std::uint64_t* budget) const noexcept;
  // Calls `visit` with each entry above this one, at most kMaxAncestors.
  template <typename Visit>
  void each_ancestor(std::uint32_t entry, Visit visit) const {
    std::uint32_t steps = 0;
    for (std::uint32_t up = entries.index.parent(entry); up != kNoEntry && steps < kMaxAncestors;
         up = entries.index.parent(up), ++steps) {
      visit(up);
    }
  }

  Entries& entries;
};

}  // namespace kvstrata
