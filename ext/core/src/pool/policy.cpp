// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/policy.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace kvstrata {

// Least recently used, per size class.

namespace {

constexpr std::uint8_t kListed = 1;

class LruPolicy final : public EvictionPolicy {
 public:
  using EvictionPolicy::EvictionPolicy;

  const char* name() const noexcept override { return "LRU"; }

  void admit(std::uint64_t, std::uint32_t) override {}

  void insert(std::uint32_t entry, std::uint64_t, std::uint32_t cls) override {
    EntryLocal& local = entries_[entry];
    local.list = kListed;
    local.parked = 0;
    push_hot(lists_[cls], entry);
  }

  void touch(std::uint32_t entry) noexcept override {
    EntryLocal& local = entries_[entry];
    if (local.list == 0) return;
    EntryList& list = lists_[local.cls];
    if (local.parked) {
      local.parked = 0;
      parked_[local.cls] -= 1;
    } else {
      unlink(list, entry);
    }
    push_hot(list, entry);
  }

  void remove(std::uint32_t entry, std::uint64_t, bool) override {
    EntryLocal& local = entries_[entry];
    if (local.list == 0) return;
    if (local.parked) {
      parked_[local.cls] -= 1;
    } else {
      unlink(lists_[local.cls], entry);
    }
    local.list = 0;
    local.parked = 0;
  }

  void unblocked(std::uint32_t entry, bool used) noexcept override {
    EntryLocal& local = entries_[entry];
    if (!local.parked) return;
    local.parked = 0;
    parked_[local.cls] -= 1;
    if (used) {
      push_hot(lists_[local.cls], entry);
    } else {
      push_cold(lists_[local.cls], entry);
    }
  }

  std::uint32_t victim(std::uint32_t cls) noexcept override {
    EntryList& list = lists_[cls];
    while (list.cold != kNoEntry && !entries_[list.cold].is_victim()) {
      const std::uint32_t entry = list.cold;
      unlink(list, entry);
      entries_[entry].parked = 1;
      parked_[cls] += 1;
    }
    return list.cold;
  }

  void forget_class(std::uint32_t cls) noexcept override { lists_[cls] = EntryList{}; }

  std::int64_t count(std::uint32_t cls) const noexcept override {
    const std::int64_t listed = check_list(lists_[cls], kListed);
    return listed < 0 ? -1 : listed + parked_[cls];
  }

 private:
  EntryList lists_[kMaxClasses];
  std::uint32_t parked_[kMaxClasses] = {};
};

// Never evicts: an entry that does not fit is refused.
class NoopPolicy final : public EvictionPolicy {
 public:
  using EvictionPolicy::EvictionPolicy;

  const char* name() const noexcept override { return "noop"; }
  bool evicts() const noexcept override { return false; }
  void admit(std::uint64_t, std::uint32_t) override {}
  void insert(std::uint32_t entry, std::uint64_t, std::uint32_t cls) override {
    entries_[entry].list = kListed;
    counts_[cls] += 1;
  }
  void touch(std::uint32_t) noexcept override {}
  void remove(std::uint32_t entry, std::uint64_t, bool) override {
    if (entries_[entry].list == 0) return;
    entries_[entry].list = 0;
    counts_[entries_[entry].cls] -= 1;
  }
  void unblocked(std::uint32_t, bool) noexcept override {}
  std::uint32_t victim(std::uint32_t) noexcept override { return kNoEntry; }
  void forget_class(std::uint32_t) noexcept override {}
  std::int64_t count(std::uint32_t cls) const noexcept override { return counts_[cls]; }

 private:
  std::uint32_t counts_[kMaxClasses] = {};
};

// Tails are the first victims: an LRU list of the tails of each class, before any other policy.

class TailsFirst final : public EvictionPolicy {
 public:
  TailsFirst(EntryLocal* entries, std::unique_ptr<EvictionPolicy> rest) noexcept
      : EvictionPolicy(entries),
        tails_(std::make_unique<LruPolicy>(entries)),
        rest_(std::move(rest)) {}

  const char* name() const noexcept override { return rest_->name(); }

  void admit(std::uint64_t fingerprint, std::uint32_t cls) override {
    rest_->admit(fingerprint, cls);
  }
  void insert(std::uint32_t entry, std::uint64_t fingerprint, std::uint32_t cls) override {
    of(entry).insert(entry, fingerprint, cls);
  }
  void touch(std::uint32_t entry) noexcept override { of(entry).touch(entry); }
  void remove(std::uint32_t entry, std::uint64_t fingerprint, bool evicted) override {
    of(entry).remove(entry, fingerprint, evicted);
  }
  void unblocked(std::uint32_t entry, bool used) noexcept override {
    of(entry).unblocked(entry, used);
  }
  std::uint32_t victim(std::uint32_t cls) noexcept override {
    const std::uint32_t tail = tails_->victim(cls);
    return tail != kNoEntry ? tail : rest_->victim(cls);
  }
  void forget_class(std::uint32_t cls) noexcept override {
    tails_->forget_class(cls);
    rest_->forget_class(cls);
  }
  std::int64_t count(std::uint32_t cls) const noexcept override {
    const std::int64_t tails = tails_->count(cls);
    const std::int64_t rest = rest_->count(cls);
    return tails < 0 || rest < 0 ? -1 : tails + rest;
  }

 private:
  EvictionPolicy& of(std::uint32_t entry) const noexcept {
    return entries_[entry].is_tail() ? *tails_ : *rest_;
  }

  const std::unique_ptr<EvictionPolicy> tails_;
  const std::unique_ptr<EvictionPolicy> rest_;
};

// Adaptive replacement (Megiddo and Modha, FAST 2003), per size class: one list for entries that
// were used once (recent), one for entries that were used again (frequent), and for each list a
// memory of the keys that were evicted from it; a miss that is found in a memory shifts the balance
// between the lists. The paper's cache size is the number of entries that the class has now.

constexpr std::uint8_t kRecent = 1;
constexpr std::uint8_t kFrequent = 2;
// Above this size `returning` is cleared, because keys that were admitted but then refused stay in
// it.
constexpr std::size_t kMostReturning = 65'536;

class ArcPolicy final : public EvictionPolicy {
 public:
  using EvictionPolicy::EvictionPolicy;

  const char* name() const noexcept override { return "ARC"; }

  void admit(std::uint64_t fingerprint, std::uint32_t cls) override {
    ClassState& state = classes_[cls];
    state.missed_frequent = false;
    const auto recent = static_cast<double>(state.evicted_recent.size());
    const auto frequent = static_cast<double>(state.evicted_frequent.size());
    if (state.returning.size() > kMostReturning) state.returning.clear();
    if (state.evicted_recent.erase(fingerprint)) {
      state.returning.insert(fingerprint);
      const double step = std::max(1.0, frequent / recent);
      state.recent_target =
          std::min(state.recent_target + step, static_cast<double>(state.residents()));
    } else if (state.evicted_frequent.erase(fingerprint)) {
      state.returning.insert(fingerprint);
      const double step = std::max(1.0, recent / frequent);
      state.recent_target = std::max(state.recent_target - step, 0.0);
      state.missed_frequent = true;
    }
  }

  void insert(std::uint32_t entry, std::uint64_t fingerprint, std::uint32_t cls) override {
    ClassState& state = classes_[cls];
    EntryLocal& local = entries_[entry];
    const bool known = state.returning.erase(fingerprint) != 0;
    local.list = known ? kFrequent : kRecent;
    local.parked = 0;
    push_hot(state.list(local.list), entry);
  }

  void touch(std::uint32_t entry) noexcept override {
    EntryLocal& local = entries_[entry];
    if (local.list == 0) return;
    ClassState& state = classes_[local.cls];
    if (local.parked) {
      local.parked = 0;
      state.parked_in(local.list) -= 1;
    } else {
      unlink(state.list(local.list), entry);
    }
    local.list = kFrequent;
    push_hot(state.frequent, entry);
  }

  void remove(std::uint32_t entry, std::uint64_t fingerprint, bool evicted) override {
    EntryLocal& local = entries_[entry];
    if (local.list == 0) return;
    ClassState& state = classes_[local.cls];
    const std::size_t residents = state.residents();
    if (local.parked) {
      state.parked_in(local.list) -= 1;
    } else {
      unlink(state.list(local.list), entry);
    }
    if (evicted) {
      (local.list == kRecent ? state.evicted_recent : state.evicted_frequent).add(fingerprint);
      const std::size_t recent = std::min(state.recents(), residents);
      state.evicted_recent.trim(residents - recent);
      state.evicted_frequent.trim(residents - state.evicted_recent.size());
    }
    local.list = 0;
    local.parked = 0;
  }

  void unblocked(std::uint32_t entry, bool used) noexcept override {
    EntryLocal& local = entries_[entry];
    if (!local.parked) return;
    ClassState& state = classes_[local.cls];
    local.parked = 0;
    state.parked_in(local.list) -= 1;
    if (used) {
      push_hot(state.list(local.list), entry);
    } else {
      push_cold(state.list(local.list), entry);
    }
  }

  std::uint32_t victim(std::uint32_t cls) noexcept override {
    ClassState& state = classes_[cls];
    while (true) {
      const auto recent = static_cast<double>(state.recents());
      const bool from_recent =
          state.recent.size > 0 && (state.frequent.size == 0 || recent > state.recent_target ||
                                    (state.missed_frequent && recent >= state.recent_target));
      EntryList& list = from_recent ? state.recent : state.frequent;
      const std::uint32_t entry = list.cold;
      if (entry == kNoEntry || entries_[entry].is_victim()) return entry;
      unlink(list, entry);
      entries_[entry].parked = 1;
      state.parked_in(entries_[entry].list) += 1;
    }
  }

  void forget_class(std::uint32_t cls) noexcept override {
    ClassState& state = classes_[cls];
    state.recent = state.frequent = EntryList{};
    state.evicted_recent.clear();
    state.evicted_frequent.clear();
    state.returning.clear();
    state.parked_recent = state.parked_frequent = 0;
    state.recent_target = 0;
  }

  std::int64_t count(std::uint32_t cls) const noexcept override {
    const ClassState& state = classes_[cls];
    const std::int64_t recent = check_list(state.recent, kRecent);
    const std::int64_t frequent = check_list(state.frequent, kFrequent);
    return recent < 0 || frequent < 0
               ? -1
               : recent + frequent + state.parked_recent + state.parked_frequent;
  }

 private:
  struct ClassState {
    EntryList recent;
    EntryList frequent;
    GhostList evicted_recent;
    GhostList evicted_frequent;
    std::unordered_set<std::uint64_t> returning;  // admitted, was in a memory, not inserted yet
    std::uint32_t parked_recent = 0;
    std::uint32_t parked_frequent = 0;
    double recent_target = 0;
    bool missed_frequent = false;

    EntryList& list(std::uint8_t mark) noexcept { return mark == kRecent ? recent : frequent; }
    std::uint32_t& parked_in(std::uint8_t mark) noexcept {
      return mark == kRecent ? parked_recent : parked_frequent;
    }
    // Parked entries count like listed ones: an entry in use takes part of its list's share.
    std::size_t recents() const noexcept { return recent.size + parked_recent; }
    std::size_t residents() const noexcept { return recents() + frequent.size + parked_frequent; }
  };
  ClassState classes_[kMaxClasses];
};

// S3-FIFO (Yang et al., SOSP 2023), per size class: new entries pass through a small queue; those
// used again on the way go on to the main queue, the others leave early and are remembered, so that
// a second store of the same key goes to the main queue at once. A use is only counted; it moves
// nothing.

constexpr std::uint8_t kSmall = 1;
constexpr std::uint8_t kMain = 2;
constexpr std::uint8_t kMostFrequency = 3;
// The small queue holds 1/kSmallShare of the entries. The paper's tenth suits keys that come back
// at once, or never; a conversation comes back after minutes. Token hit ratios on the Mooncake
// trace with a cache of 2, 5, 10 and 20 % of the blocks (benchmarks/policies.py): a tenth .105 .171
// .236 .311, half .096 .191 .278 .334.
constexpr std::uint32_t kSmallShare = 2;

class S3FifoPolicy final : public EvictionPolicy {
 public:
  using EvictionPolicy::EvictionPolicy;

  const char* name() const noexcept override { return "S3FIFO"; }

  void admit(std::uint64_t, std::uint32_t) override {}

  void insert(std::uint32_t entry, std::uint64_t fingerprint, std::uint32_t cls) override {
    ClassState& state = classes_[cls];
    EntryLocal& local = entries_[entry];
    local.list = state.evicted.erase(fingerprint) ? kMain : kSmall;
    local.parked = 0;
    local.frequency = 0;
    push_hot(state.list(local.list), entry);
  }

  void touch(std::uint32_t entry) noexcept override {
    EntryLocal& local = entries_[entry];
    if (local.frequency < kMostFrequency) local.frequency += 1;
  }

  void remove(std::uint32_t entry, std::uint64_t fingerprint, bool evicted) override {
    EntryLocal& local = entries_[entry];
    if (local.list == 0) return;
    ClassState& state = classes_[local.cls];
    const std::size_t residents = state.residents();
    if (local.parked) {
      state.parked -= 1;
    } else {
      unlink(state.list(local.list), entry);
    }
    if (evicted && local.list == kSmall) {
      state.evicted.add(fingerprint);
      state.evicted.trim(residents);
    }
    local.list = 0;
    local.parked = 0;
  }

  void unblocked(std::uint32_t entry, bool used) noexcept override {
    EntryLocal& local = entries_[entry];
    if (!local.parked) return;
    ClassState& state = classes_[local.cls];
    local.parked = 0;
    state.parked -= 1;
    if (used) {
      push_hot(state.list(local.list), entry);
    } else {
      push_cold(state.list(local.list), entry);
    }
  }

  std::uint32_t victim(std::uint32_t cls) noexcept override {
    ClassState& state = classes_[cls];
    while (true) {
      const bool from_small =
          state.small.size > 0 &&
          (state.main.size == 0 || state.small.size > state.residents() / kSmallShare);
      EntryList& list = from_small ? state.small : state.main;
      const std::uint32_t entry = list.cold;
      if (entry == kNoEntry) return kNoEntry;
      EntryLocal& local = entries_[entry];
      if (!local.is_victim()) {
        unlink(list, entry);
        local.parked = 1;
        state.parked += 1;
      } else if (local.frequency == 0) {
        return entry;
      } else {
        // Each round through the queue uses up one touch.
        local.frequency = from_small ? 0 : static_cast<std::uint8_t>(local.frequency - 1);
        unlink(list, entry);
        local.list = kMain;
        push_hot(state.main, entry);
      }
    }
  }

  void forget_class(std::uint32_t cls) noexcept override {
    ClassState& state = classes_[cls];
    state.small = state.main = EntryList{};
    state.evicted.clear();
    state.parked = 0;
  }

  std::int64_t count(std::uint32_t cls) const noexcept override {
    const ClassState& state = classes_[cls];
    const std::int64_t small = check_list(state.small, kSmall);
    const std::int64_t main = check_list(state.main, kMain);
    return small < 0 || main < 0 ? -1 : small + main + state.parked;
  }

 private:
  struct ClassState {
    EntryList small;
    EntryList main;
    GhostList evicted;
    std::uint32_t parked = 0;

    EntryList& list(std::uint8_t mark) noexcept { return mark == kSmall ? small : main; }
    std::size_t residents() const noexcept { return small.size + main.size + parked; }
  };
  ClassState classes_[kMaxClasses];
};

}  // namespace

void EvictionPolicy::push_hot(EntryList& list, std::uint32_t entry) noexcept {
  EntryLocal& local = entries_[entry];
  local.list_previous = kNoEntry;
  local.list_next = list.hot;
  if (list.hot != kNoEntry) entries_[list.hot].list_previous = entry;
  list.hot = entry;
  if (list.cold == kNoEntry) list.cold = entry;
  list.size += 1;
}

void EvictionPolicy::push_cold(EntryList& list, std::uint32_t entry) noexcept {
  EntryLocal& local = entries_[entry];
  local.list_next = kNoEntry;
  local.list_previous = list.cold;
  if (list.cold != kNoEntry) entries_[list.cold].list_next = entry;
  list.cold = entry;
  if (list.hot == kNoEntry) list.hot = entry;
  list.size += 1;
}

void EvictionPolicy::unlink(EntryList& list, std::uint32_t entry) noexcept {
  const EntryLocal& local = entries_[entry];
  if (local.list_previous != kNoEntry) {
    entries_[local.list_previous].list_next = local.list_next;
  } else {
    list.hot = local.list_next;
  }
  if (local.list_next != kNoEntry) {
    entries_[local.list_next].list_previous = local.list_previous;
  } else {
    list.cold = local.list_previous;
  }
  list.size -= 1;
}

std::int64_t EvictionPolicy::check_list(const EntryList& list, std::uint8_t mark) const noexcept {
  std::int64_t seen = 0;
  std::uint32_t previous = kNoEntry;
  for (std::uint32_t entry = list.hot; entry != kNoEntry; entry = entries_[entry].list_next) {
    const EntryLocal& local = entries_[entry];
    if (local.list != mark || local.parked || local.list_previous != previous) return -1;
    if (++seen > list.size) return -1;
    previous = entry;
  }
  return previous == list.cold && seen == list.size ? seen : -1;
}

bool GhostList::erase(std::uint64_t fingerprint) {
  return live_.erase(fingerprint) != 0;
}

void GhostList::add(std::uint64_t fingerprint) {
  live_[fingerprint] = next_ticket_;
  ring_.push_back({fingerprint, next_ticket_});
  next_ticket_ += 1;
  // Positions that no longer count are dropped when they are the larger part.
  if (ring_.size() > 64 && ring_.size() > 2 * live_.size() + begin_ / 2) {
    std::vector<Slot> kept;
    kept.reserve(live_.size() + live_.size() / 2);
    for (std::size_t i = begin_; i < ring_.size(); ++i) {
      const auto found = live_.find(ring_[i].fingerprint);
      if (found != live_.end() && found->second == ring_[i].ticket) kept.push_back(ring_[i]);
    }
    ring_.swap(kept);
    begin_ = 0;
  }
}

void GhostList::trim(std::size_t limit) {
  while (live_.size() > limit && begin_ < ring_.size()) {
    const Slot& slot = ring_[begin_++];
    const auto found = live_.find(slot.fingerprint);
    if (found != live_.end() && found->second == slot.ticket) live_.erase(found);
  }
}

void GhostList::clear() noexcept {
  ring_.clear();
  live_.clear();
  begin_ = 0;
}

std::unique_ptr<EvictionPolicy> make_policy(std::string_view name, EntryLocal* entries) {
  std::unique_ptr<EvictionPolicy> rest;
  if (name == "LRU") rest = std::make_unique<LruPolicy>(entries);
  if (name == "ARC") rest = std::make_unique<ArcPolicy>(entries);
  if (name == "S3FIFO") rest = std::make_unique<S3FifoPolicy>(entries);
  if (name == "noop") rest = std::make_unique<NoopPolicy>(entries);
  if (rest == nullptr || !rest->evicts()) return rest;
  return std::make_unique<TailsFirst>(entries, std::move(rest));
}

}  // namespace kvstrata
