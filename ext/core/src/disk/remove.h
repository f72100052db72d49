// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Removes records from a disk log, durably: by a tombstone for each key, or one clear for all.
#pragma once

#include <cstdint>
#include <span>

#include "disk/append.h"
#include "disk/find.h"
#include "disk/retire.h"

namespace kvstrata::disk {

struct Removal {
  Digest key{};
  // The sequence of the only copy to remove; 0: removes any record of the key.
  std::uint64_t copy = 0;
  bool removed = false;
};

class Remover {
 public:
  Remover(Shared& shared, Appender& appender, Finder& finder, Retirer& retirer)
      : shared_(shared), appender_(appender), finder_(finder), retirer_(retirer) {}

  // Takes the records out of the index, and sets `removed` where a synced tombstone names the key.
  // A record that left the index without such a tombstone may come back at the next open. Unlocks
  // the mutex. REQUIRES: `lock` holds the mutex.
  void remove(Lock& lock, std::span<Removal> removals) noexcept;

  // Takes the mutex. Returns how many records are gone for good; 0 if that cannot be promised.
  std::uint64_t clear() noexcept;

 private:
  [[nodiscard]] bool is_there(const Removal& removal) noexcept;

  Shared& shared_;
  Appender& appender_;
  Finder& finder_;
  Retirer& retirer_;
};

}  // namespace kvstrata::disk
