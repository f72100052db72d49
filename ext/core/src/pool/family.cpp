// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/family.h"

namespace kvstrata {

void Family::add(std::uint32_t parent, std::uint32_t child) noexcept {
  EntryLocal* const local = entries.local;
  EntryLocal& up = local[parent];
  EntryLocal& down = local[child];
  entries.index.set_parent(child, parent);
  down.previous_sibling = kNoEntry;
  down.next_sibling = up.first_child;
  if (up.first_child != kNoEntry) local[up.first_child].previous_sibling = child;
  up.first_child = child;
  up.children += 1;
}

void Family::leave_parent(std::uint32_t entry) noexcept {
  EntryLocal* const local = entries.local;
  const std::uint32_t parent = entries.index.parent(entry);
  if (parent == kNoEntry) return;
  EntryLocal& up = local[parent];
  EntryLocal& down = local[entry];
  if (down.previous_sibling != kNoEntry) {
    local[down.previous_sibling].next_sibling = down.next_sibling;
  } else {
    up.first_child = down.next_sibling;
  }
  if (down.next_sibling != kNoEntry)
    local[down.next_sibling].previous_sibling = down.previous_sibling;
  down.next_sibling = down.previous_sibling = kNoEntry;
  entries.index.set_parent(entry, kNoEntry);
  up.children -= 1;
  if (up.is_victim()) entries.policy.unblocked(parent, false);
}

void Family::orphan_children(std::uint32_t entry) noexcept {
  EntryLocal* const local = entries.local;
  EntryLocal& left = local[entry];
  for (std::uint32_t child = left.first_child; child != kNoEntry;) {
    const std::uint32_t next = local[child].next_sibling;
    entries.index.set_parent(child, kNoEntry);
    local[child].next_sibling = local[child].previous_sibling = kNoEntry;
    child = next;
  }
  left.first_child = kNoEntry;
  left.children = 0;
}

bool Family::is_ancestor(std::uint32_t candidate, std::uint32_t entry,
                         std::uint64_t* budget) const noexcept {
  for (std::uint32_t at = entry; at != kNoEntry; at = entries.index.parent(at)) {
    if (at == candidate || *budget == 0) return true;
    *budget -= 1;
  }
  return false;
}

}  // namespace kvstrata
