// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Putting records into a disk log: each piece of a batch writes its frames, and the end of the
// batch syncs and publishes all of them.
#pragma once

#include <cstdint>
#include <map>
#include <span>

#include "disk/append.h"
#include "disk/find.h"
#include "disk/retire.h"
#include "kvstrata/connector.h"

namespace kvstrata::disk {

class Putter {
 public:
  Putter(Shared& shared, Appender& appender, Finder& finder, Retirer& retirer)
      : shared_(shared), appender_(appender), finder_(finder), retirer_(retirer) {}

  // Longest record that fits into a segment.
  [[nodiscard]] std::uint64_t max_record_bytes() const noexcept;

  // See Connector::put() and put_end(). Both unlock the mutex. REQUIRES: `lock` holds the mutex.
  void put(Lock& lock, std::span<PutItem> piece) noexcept;
  void end(Lock& lock, std::span<PutItem> batch) noexcept;

 private:
  void put_one(Lock& lock, PutItem& item) noexcept;

  Shared& shared_;
  Appender& appender_;
  Finder& finder_;
  Retirer& retirer_;
  std::map<std::uint64_t, PlacedFrame> puts_;  // written frames, by sequence, from put() to end()
};

}  // namespace kvstrata::disk
