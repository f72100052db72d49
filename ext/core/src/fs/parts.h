// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Records that an `fs` connector is storing. Each record is first a *part*, a file under a
// temporary name, which is then renamed to the record's name. FsPartState has its states.
//
// Invariants
// 1. Concurrent puts of one record write it once: the first item makes the part, the others join it
//    and get its outcome.
// 2. The thread that claims a part publishes it, whichever batch it belongs to.
// 3. A part is kept until every item that made or joined it has its outcome.
//
// Every function of FsParts is called with the connector's mutex held.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "fs/files.h"

namespace kvstrata {

enum class FsPartState : std::uint8_t {
  kWriting,  // a thread is writing it
  kWritten,  // synced under a temporary name, or its record exists already
  kClaimed,  // a thread is publishing it
  kSettled,  // its outcome is known, and kept until every batch that asked for it has ended
};

struct FsPart {
  Digest key{};
  Digest parent{};  // set by the maker, see FsRecord
  std::uint32_t length = 0;
  FsPartState state = FsPartState::kWriting;  // goes only forward
  bool cancelled = false;                     // the key was deleted meanwhile
  std::uint32_t askers = 0;  // items that made or joined it and have not got its outcome yet
  PutOutcome outcome{PutStatus::kFailed, Reason::kInternal};
};

class FsParts {
 public:
  using Lock = std::unique_lock<std::mutex>;
  // Publishes and settles parts that the calling thread has claimed.
  using Publish = std::function<void(Lock&, std::vector<std::uint64_t>)>;

  // `changed` must outlive it; the thread that changes a part's state notifies it.
  explicit FsParts(std::condition_variable& changed) : changed_(changed) {}

  // Joins the item to the part of the same record that is neither settled nor cancelled. True: it
  // joined, and end() gives the item its outcome. False: there is no such part.
  [[nodiscard]] bool join(PutItem& item);
  // Makes a part for the item; end() gives the item its outcome. REQUIRES: no part has this number.
  FsPart& make(std::uint64_t number, PutItem& item);
  [[nodiscard]] FsPart& at(std::uint64_t number) { return parts_.find(number)->second; }

  // Settles the part, which is being written or published, with this outcome.
  static void settle(FsPart& part, PutOutcome outcome) noexcept;

  [[nodiscard]] std::vector<std::uint64_t> claim_written();
  // Cancels the parts of this key that are not settled. Returns whether there was one.
  bool cancel(const Digest& key);

  // Ends a batch, all pieces of which were put: publishes those of its parts that no thread has
  // claimed, waits for the others, and gives each item its outcome. An item that made a part (its
  // status is kStored until now) gets the part's outcome. An item that joined a part gets kExists
  // if the part was stored, otherwise the part's outcome.
  void end(Lock& lock, std::span<PutItem> batch, const Publish& publish);

 private:
  std::map<std::uint64_t, FsPart> parts_;  // by number
  std::condition_variable& changed_;
};

// Puts or loads each item of a piece by `one`: sets the item's outcome and drops its hold, since
// the medium has finished with the item's bytes.
template <typename Item, typename One>
void fs_each(std::span<Item> piece, One&& one) {
  for (Item& item : piece) {
    set_outcome(item, one(item));
    item.hold.reset();
  }
}

}  // namespace kvstrata
