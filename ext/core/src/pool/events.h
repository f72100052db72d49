// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Reports what happened to keys, for components that keep a copy of the index elsewhere: a ring of
// bounded length. Events that nobody took in time are overwritten, oldest first, and counted as
// lost.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "pool/index.h"

namespace kvstrata {

inline constexpr std::size_t kEventRing = 65'536;

// Numbers are those of kvstrata.types.PoolEvent.
enum class EventKind : std::uint8_t {
  kEvicted = 1,
  kCleared = 2,
  kCorrupt = 3,
  kInserted = 4,
  kQuarantined = 5,
  kVerified = 6,  // adopted from another server, and READY from now on
  kRemoved = 7,   // by `remove`, or by a clear of one identity
  kReturned = 8   // by `remove`: the entry was read from another instance and is not kept here
};

struct Event {
  EventKind kind;
  Key key;
  std::uint64_t bytes;
};

struct Events {
  void emit(EventKind kind, const Key& key, std::uint64_t bytes) {
    if (ring.size() >= kEventRing) {
      ring.pop_front();
      lost += 1;
    }
    ring.push_back({kind, key, bytes});
  }
  std::vector<Event> take() {
    std::vector<Event> events(ring.begin(), ring.end());
    ring.clear();
    return events;
  }

  std::deque<Event> ring;
  std::uint64_t lost = 0;
};

}  // namespace kvstrata
