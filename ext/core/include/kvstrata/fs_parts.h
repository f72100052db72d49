// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Records on their way into the directory of an `fs` connector: each is a part, then a name.
//
//   kWriting -> kWritten (synced under a temporary name) -> kClaimed (a thread publishes it)
//            -> kSettled (stored, there already, or failed; waits for put_end)
//
// Invariants
// 1. A record that is put while it is being put is written once: the first item makes the part, the
//    others join it and learn its outcome.
// 2. Who claims a part publishes it, whichever batch it is of.
// 3. A part is there until every item that made or joined it has its outcome.
//
// Everything is called with the connector's mutex held.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "kvstrata/fs_files.h"

namespace kvstrata {

struct FsPart {
  enum class State : std::uint8_t { kWriting, kWritten, kClaimed, kSettled };

  Digest key{};
  std::uint32_t length = 0;
  State state = State::kWriting;
  bool found = false;        // its record is there already: no file of the part is
  bool cancelled = false;    // its key was deleted since
  std::uint32_t askers = 0;  // items whose outcome it has
  FsPutOutcome outcome{PutStatus::kFailed, "internal"};
};

class FsParts {
 public:
  using Lock = std::unique_lock<std::mutex>;
  // Settles parts that the calling thread has claimed.
  using Publish = std::function<void(Lock&, std::vector<std::uint64_t>)>;

  // `changed` must outlive it; whoever changes a part's state notifies it.
  explicit FsParts(std::condition_variable& changed) : changed_(changed) {}

  // Whether the same record is on its way and will be there: then end() has the item's outcome.
  [[nodiscard]] bool join(PutItem& item);
  // The part of an item, for which end() has its outcome. REQUIRES: no part has this number.
  FsPart& make(std::uint64_t number, PutItem& item);
  [[nodiscard]] FsPart& at(std::uint64_t number) { return parts_.find(number)->second; }

  [[nodiscard]] bool any_written() const;
  [[nodiscard]] std::vector<std::uint64_t> claim_written();
  // The parts of this key that may still get a name will not. Returns whether there was one.
  bool cancel(const Digest& key);

  // Publishes what is left to publish of a batch, all pieces of which were put, and gives its items
  // their outcomes: who made a part (kStored until now) its own, who joined one kExists if it is
  // there.
  void end(Lock& lock, std::span<PutItem> batch, const Publish& publish);

 private:
  // By number.
  std::map<std::uint64_t, FsPart> parts_;
  std::condition_variable& changed_;
};

}  // namespace kvstrata
