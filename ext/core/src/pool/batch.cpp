// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/batch.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvstrata {

LoadBatch::~LoadBatch() {
  for (const Item& item : items_) {
    pool_->abort(item.ticket, {&item.index, 1}, false);
  }
}

Status LoadBatch::reserve(std::shared_ptr<Pool> pool, const LoadRequest& request,
                          std::span<const std::uint32_t> wanted) noexcept {
  pool_ = std::move(pool);
  const auto n_slices = static_cast<std::uint32_t>(request.n_slices());
  // Runs of neighbouring chunks of one slice, in the order of their first keys.
  std::vector<std::vector<std::uint32_t>> runs;
  std::vector<std::size_t> open(n_slices);  // by slice: 1 + the number of its last run
  for (const std::uint32_t number : wanted) {
    std::size_t& last = open[number % n_slices];
    if (last == 0 || runs[last - 1].back() + n_slices != number) {
      runs.emplace_back();
      last = runs.size();
    }
    runs[last - 1].push_back(number);
  }
  for (const std::vector<std::uint32_t>& run : runs)
    KVSTRATA_RETURN_IF_ERROR(reserve_run(request, run));
  if (refusal.why != ReserveOutcome::kReserved) {
    // Chunks of other slices may have been reserved before the refusal was known.
    std::size_t kept = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (numbers[i] / n_slices >= refusal.chunk) {
        pool_->abort(items_[i].ticket, {&items_[i].index, 1}, false);
        continue;
      }
      items_[kept] = items_[i];
      numbers[kept] = numbers[i];
      ++kept;
    }
    items_.resize(kept);
    numbers.resize(kept);
  }
  holds = std::vector<Hold>(items_.size());
  for (std::size_t i = 0; i < items_.size(); ++i)
    KVSTRATA_RETURN_IF_ERROR(pool_->hold_reserved(items_[i].ticket, items_[i].index, &holds[i]));
  return Status();
}

Status LoadBatch::reserve_run(const LoadRequest& request,
                              std::span<const std::uint32_t> run) noexcept {
  const auto n_slices = static_cast<std::uint32_t>(request.n_slices());
  const std::uint32_t slice = run.front() % n_slices;
  if (refusal.why != ReserveOutcome::kReserved) {
    const auto beyond = std::find_if(run.begin(), run.end(), [&](std::uint32_t number) {
      return number / n_slices >= refusal.chunk;
    });
    run = run.first(static_cast<std::size_t>(beyond - run.begin()));
    if (run.empty()) return Status();
  }
  std::vector<std::uint8_t> keys(run.size() * kKeyBytes);
  for (std::size_t i = 0; i < run.size(); ++i) {
    std::memcpy(keys.data() + i * kKeyBytes, request.keys + run[i] * kKeyBytes, kKeyBytes);
  }
  ReserveRequest ask;
  ask.keys = keys.data();
  ask.n_keys = run.size();
  if (run.front() >= n_slices) {
    ask.parent = request.keys + (run.front() - n_slices) * kKeyBytes;
  } else if (!request.parents.empty()) {
    ask.parent = request.parents.data() + slice * kKeyBytes;
  }
  ask.record_bytes = request.room_bytes[slice];
  ask.tail = request.tail;
  ask.identity = request.identity.data();
  ask.tenant = request.tenant;
  ReserveResult result;
  KVSTRATA_RETURN_IF_ERROR(pool_->reserve(ask, &result));
  for (std::size_t i = 0; i < run.size(); ++i) {
    const auto outcome = static_cast<ReserveOutcome>(result.outcomes[i]);
    if (outcome == ReserveOutcome::kReserved) {
      items_.push_back({result.ticket, static_cast<std::uint32_t>(i)});
      numbers.push_back(run[i]);
    } else if (outcome == ReserveOutcome::kPresent) {
      present.push_back(run[i]);
    } else if (refusal.why == ReserveOutcome::kReserved || run[i] / n_slices < refusal.chunk) {
      refusal = {run[i] / n_slices, outcome};
    }
  }
  return Status();
}

Status LoadBatch::finish(const std::uint8_t* loaded, std::uint8_t* outcomes) noexcept {
  const std::vector<Item> items = std::exchange(items_, {});
  std::vector<std::uint32_t> committed, given_back;
  std::vector<std::uint8_t> each;
  Status status;
  for (std::size_t begin = 0, end = 0; begin < items.size(); begin = end) {
    const std::uint64_t ticket = items[begin].ticket;
    committed.clear();
    given_back.clear();
    for (; end < items.size() && items[end].ticket == ticket; ++end)
      (loaded[end] != 0 ? committed : given_back).push_back(items[end].index);
    each.assign(committed.size(), static_cast<std::uint8_t>(CommitOutcome::kNotReserved));
    if (!committed.empty()) {
      const Status done = pool_->commit(ticket, committed, true, each.data());
      if (status.ok()) status = done;
    }
    if (!given_back.empty()) pool_->abort(ticket, given_back, false);
    std::size_t at = 0;
    for (std::size_t i = begin; i < end; ++i)
      outcomes[i] = loaded[i] != 0 ? each[at++] : kGivenBack;
  }
  return status;
}

}  // namespace kvstrata
