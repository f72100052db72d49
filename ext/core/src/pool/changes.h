// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The latest changes of an instance's chunks (a chunk is added to a tier, or leaves it), numbered,
// for the server's own parts and for followers that keep a copy of the list elsewhere. Chunks are
// named by the first word of their key (the tag). L1 is tier 0; its changes are written under the
// pool's mutex, those of another tier by the code that changes it.
//
// A reader keeps a cursor: the number of the first change that it has not read. No state is kept
// for a reader. A reader that is more than kChanges behind must read the complete list again.
//
// Thread-safe. Memory is used only for changes that were written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/event_fd.h"
#include "base/status.h"

namespace kvstrata {

inline constexpr std::size_t kChanges = 262'144;

enum class Change : std::uint8_t {
  kCame = 0,
  kGone = 1,     // of L1: it was evicted
  kEmptied = 2,  // of the whole tier; the tag is 0
  kCleared = 3,  // the others are of L1: gone too, for another reason
  kRemoved = 4,
  kCorrupt = 5
};

struct ChangeEntry {
  std::uint64_t tag;
  std::uint16_t tier;
  Change change;
};
static_assert(sizeof(ChangeEntry) == 16);

// The net effect of a range of changes on one tier's chunks: apply `cleared` first. No tag is in
// both lists, or in one of them twice.
struct TierChanges {
  std::uint16_t tier = 0;
  bool cleared = false;
  std::vector<std::uint64_t> gone, came;
};

struct ChangedTiers {
  std::uint64_t next = 0;  // the cursor after the range
  std::vector<TierChanges> tiers;
};

class Changes {
 public:
  // Opens the descriptor. Idempotent. kOsError: no descriptor is available.
  Status begin() noexcept;

  void note(std::uint16_t tier, Change change, std::uint64_t tag) noexcept {
    note_all(tier, change, &tag, 1, 1);
  }
  // `stride`: words from one tag to the next, so that the tags may be first words of keys.
  void note_all(std::uint16_t tier, Change change, const std::uint64_t* tags, std::size_t n,
                std::size_t stride) noexcept;

  // The cursor of a reader that wants only changes from now on.
  std::uint64_t next() noexcept;

  // At most `limit` changes from `cursor` on, as they were written or summed up by tier. False: the
  // cursor is too old, or not one of this object's.
  bool read(std::uint64_t cursor, std::size_t limit, std::vector<ChangeEntry>* entries);
  bool read(std::uint64_t cursor, std::size_t limit, ChangedTiers* changed);

  // Whether `cursor` has changes to read, or is one that read() refuses. If it has none, the
  // descriptor becomes readable at the next change.
  bool wait(std::uint64_t cursor) noexcept;
  [[nodiscard]] int fd() const noexcept { return signal_.fd(); }
  void drain() const noexcept { signal_.drain(); }

 private:
  std::mutex mutex_;
  // Change number n is at n % kChanges.
  const std::unique_ptr<ChangeEntry[]> entries_ =
      std::make_unique_for_overwrite<ChangeEntry[]>(kChanges);
  std::uint64_t next_ = 0;
  bool armed_ = false;
  EventFd signal_;
};

}  // namespace kvstrata
