// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Least recently used, per size class.
#include "pool/policy.h"

namespace kvstrata {

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

  void preview(std::uint32_t cls, std::size_t count,
               std::vector<std::uint32_t>* out) const override {
    preview_list(lists_[cls], count, out);
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
  void preview(std::uint32_t, std::size_t, std::vector<std::uint32_t>*) const override {}
  void forget_class(std::uint32_t) noexcept override {}
  std::int64_t count(std::uint32_t cls) const noexcept override { return counts_[cls]; }

 private:
  std::uint32_t counts_[kMaxClasses] = {};
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lru_policy(EntryLocal* entries) {
  return std::make_unique<LruPolicy>(entries);
}

std::unique_ptr<EvictionPolicy> make_noop_policy(EntryLocal* entries) {
  return std::make_unique<NoopPolicy>(entries);
}

}  // namespace kvstrata
