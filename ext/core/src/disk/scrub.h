// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The scrubber of a disk log: reads records again, checks them, and removes the bad ones.
#pragma once

#include <cstdint>

#include "disk/remove.h"

namespace kvstrata::disk {

class Scrubber {
 public:
  // All references must outlive it.
  Scrubber(Shared& shared, Segments& segments, Appender& appender, Finder& finder, Remover& remover)
      : shared_(shared),
        segments_(segments),
        appender_(appender),
        finder_(finder),
        remover_(remover) {}

  // Checks records from where the last call stopped, until `bytes` are read, all records have been
  // visited once, no memory for a record is left, or the log stops. Of a bad record it removes the
  // copy that it has read, not one that was put meanwhile. Returns the bytes read. REQUIRES: `lock`
  // holds the log's mutex, which is released during reads and held again on return.
  std::uint64_t scrub(Lock& lock, std::uint64_t bytes) noexcept;

  // The body of the scrubber's thread: checks as many bytes per second as the options allow, until
  // the log stops. Takes the mutex.
  void run();

 private:
  Shared& shared_;
  Segments& segments_;
  Appender& appender_;
  Finder& finder_;
  Remover& remover_;
  // The next record to check: its segment, and its index in that segment. Under the mutex.
  std::uint32_t segment_ = 0;
  std::size_t record_ = 0;
};

}  // namespace kvstrata::disk
