// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Reads and verifies records: the only work of the pool that is done without its mutex. A pin keeps
// each extent meanwhile.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex is locked by `lock`. Functions
// that take it drop it while they read, and hold it again when they return; another thread may have
// closed the pool by then.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pool/departures.h"
#include "pool/entries.h"

namespace kvstrata {

struct Checks {
  using Lock = std::unique_lock<std::mutex>;

  // Both must outlive the object.
  Checks(Departures& departures, const std::atomic<bool>& closed) noexcept
      : entries(departures.entries), departures(departures), closed(closed) {}

  // Whether the header of each pinned record is sound, and the record is the one that its
  // reservation promised: key, identity and length. The answer for kNoEntry is 1.
  std::vector<std::uint8_t> match(Lock& lock, const std::vector<std::uint32_t>& pinned,
                                  const Key& identity) const;
  // Compares all checksums of pinned records, and their key and identity with the entry's, and
  // unpins them: UNVERIFIED ones become READY, bad ones leave. Adds to both counts.
  void verify(Lock& lock, const std::vector<std::uint32_t>& pinned, std::uint64_t* good,
              std::uint64_t* bad);
  // Pins the UNVERIFIED entries: those among `found`, or the next ones of the queue, until they
  // have `max_bytes` together.
  std::vector<std::uint32_t> pin_unverified(const std::vector<std::uint32_t>& found);
  std::vector<std::uint32_t> pin_next(std::uint64_t max_bytes);

  Entries& entries;
  Departures& departures;
  const std::atomic<bool>& closed;
  std::vector<std::uint32_t> queue;  // entries to verify, last used at the end
};

}  // namespace kvstrata
