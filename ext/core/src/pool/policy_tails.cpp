// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Tails are the first victims: an LRU list of the tails of each class, before any other policy.
#include <utility>

#include "pool/policy.h"

namespace kvstrata {

namespace {

class TailsFirst final : public EvictionPolicy {
 public:
  TailsFirst(EntryLocal* entries, std::unique_ptr<EvictionPolicy> rest) noexcept
      : EvictionPolicy(entries), tails_(make_lru_policy(entries)), rest_(std::move(rest)) {}

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
  void preview(std::uint32_t cls, std::size_t count,
               std::vector<std::uint32_t>* out) const override {
    rest_->preview(cls, count, out);
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

}  // namespace

std::unique_ptr<EvictionPolicy> make_tails_first(EntryLocal* entries,
                                                 std::unique_ptr<EvictionPolicy> rest) {
  return std::make_unique<TailsFirst>(entries, std::move(rest));
}

}  // namespace kvstrata
