// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/remove.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace kvstrata::disk {

bool Remover::is_there(const Removal& removal) noexcept {
  const DiskPlace* const place = finder_.find(removal.key);
  if (removal.copy != 0) return place != nullptr && place->sequence == removal.copy;
  return place != nullptr || finder_.is_being_put(removal.key);
}

void Remover::remove(Lock& lock, std::span<Removal> removals) noexcept {
  std::uint64_t last = 0;
  std::vector<Removal*> named;
  for (std::size_t begin = 0; begin < removals.size(); begin += kTombstonesOfFrame) {
    const auto group =
        removals.subspan(begin, std::min(kTombstonesOfFrame, removals.size() - begin));
    if (std::none_of(group.begin(), group.end(),
                     [&](const Removal& each) { return is_there(each); }))
      continue;
    const Status room = retirer_.make_room(lock, kFrameHeaderBytes, group.size());
    // The mutex is held from here until the frame has its place, so a record that is put after the
    // removal also comes after the tombstone in the log.
    const std::uint64_t sequence = appender_.sequence() + 1;
    FrameHeader header{.kind = FrameKind::kTombstones};
    std::vector<Removal*> members;
    for (Removal& removal : group) {
      if (!is_there(removal) || !finder_.remove(removal.key, sequence)) continue;
      (removal.copy == 0 ? shared_.counts.deleted_records : shared_.counts.corrupt_records) += 1;
      header.tombstones.push_back(removal.key);
      members.push_back(&removal);
    }
    if (members.empty() || !room.ok() || !appender_.append(lock, std::move(header)).ok()) continue;
    named.insert(named.end(), members.begin(), members.end());
    last = sequence;
  }
  if (named.empty() || !appender_.commit(lock, last).ok()) return;
  for (Removal* const removal : named)
    removal->removed = true;
}

std::uint64_t Remover::clear() noexcept {
  DiskIndex gone;  // freed without the mutex, because freeing a large index takes time
  Lock lock(shared_.mutex);
  if (!retirer_.make_room(lock, kFrameHeaderBytes, 1).ok()) return 0;
  const std::uint64_t sequence = appender_.sequence() + 1;
  gone = finder_.remove_all(sequence);
  const std::uint64_t count = gone.size();
  shared_.counts.deleted_records += count;
  if (!appender_.append(lock, FrameHeader{.kind = FrameKind::kClear}).ok()) return 0;
  return appender_.commit(lock, sequence).ok() ? count : 0;
}

}  // namespace kvstrata::disk
