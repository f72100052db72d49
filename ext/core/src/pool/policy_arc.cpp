// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Adaptive replacement (Megiddo and Modha, FAST 2003), per size class: one list for entries that
// were used once (recent), one for entries that were used again (frequent), and for each list a
// memory of the keys that were evicted from it; a miss that is found in a memory shifts the balance
// between the lists. The paper's cache size is the number of entries that the class has now.
#include <algorithm>
#include <unordered_set>

#include "pool/policy.h"

namespace kvstrata {

namespace {

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

  void preview(std::uint32_t cls, std::size_t count,
               std::vector<std::uint32_t>* out) const override {
    preview_list(classes_[cls].recent, count, out);
    preview_list(classes_[cls].frequent, count, out);
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

}  // namespace

std::unique_ptr<EvictionPolicy> make_arc_policy(EntryLocal* entries) {
  return std::make_unique<ArcPolicy>(entries);
}

}  // namespace kvstrata
