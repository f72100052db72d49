// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/job.h"

#include <algorithm>
#include <utility>

namespace kvstrata {

Status CopyJob::create(CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                       std::vector<CopyItem> items, std::shared_ptr<CopyJob>* out) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_items(kind, *plan, items));
  std::size_t most_blocks = 0;
  for (const CopyItem& item : items) {
    most_blocks = std::max(most_blocks, item.blocks.size());
  }
  auto job = std::make_shared<CopyJob>();
  const std::size_t sections = plan->section_count();
  job->kind_ = kind;
  job->unit_begins_.push_back(0);
  while (job->unit_begins_.back() != sections) {
    job->unit_begins_.push_back(unit_end(*plan, most_blocks, job->unit_begins_.back()));
  }
  job->progress_ = std::make_unique<Progress[]>(items.size());
  job->outcomes_.resize(items.size(), CopyOutcome::kOk);
  for (std::size_t i = 0; i < items.size(); ++i) {
    job->progress_[i].units_left.store(static_cast<std::uint32_t>(job->units_per_item()),
                                       std::memory_order_relaxed);
    if (kind == CopyKind::kGather) {
      job->progress_[i].sections.resize(sections);
    }
  }
  job->plan_ = std::move(plan);
  job->items_ = std::move(items);
  job->end_unit_ = job->items_.size() * job->units_per_item();
  job->units_left_ = job->end_unit_;
  *out = std::move(job);
  return Status();
}

CopyJob::Unit CopyJob::take_unit() noexcept {
  const std::size_t unit = next_unit_++;
  const std::size_t index = unit % units_per_item();
  return Unit{unit / units_per_item(), unit_begins_[index], unit_begins_[index + 1]};
}

void CopyJob::execute(const Unit& unit) noexcept {
  const CopyPlan& plan = *plan_;
  const CopyItem& item = items_[unit.item];
  Progress& progress = progress_[unit.item];
  const std::size_t count = unit.end - unit.begin;
  auto* const payload = static_cast<unsigned char*>(item.record) +
                        record_header_bytes(static_cast<std::uint32_t>(plan.section_count()));

  const auto crcs = std::make_unique_for_overwrite<std::uint32_t[]>(2 * count);
  if (kind_ == CopyKind::kGather) {
    // Any unit of the item may be the first to write, so each one invalidates the record; the last
    // unit to end writes the header.
    invalidate_record(item.record);
    plan.gather(item.blocks, payload, unit.begin, unit.end, crcs.get());
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t s = unit.begin + i;
      progress.sections[s] = Section{0, plan.section_bytes(s, item.blocks.size()), crcs[i]};
    }
  } else if (progress.outcome.load(std::memory_order_relaxed) == CopyOutcome::kOk) {
    std::uint32_t* const expected = crcs.get() + count;
    const Status status =
        check_record_for_scatter(plan, item.blocks.size(), item.record, item.length, item.spec,
                                 unit.begin, unit.end, expected);
    CopyOutcome outcome = copy_outcome(status);
    if (status.ok()) {
      plan.scatter(item.blocks, payload, unit.begin, unit.end, crcs.get());
      if (!std::equal(crcs.get(), expected, expected)) outcome = CopyOutcome::kCorrupt;
    }
    CopyOutcome none = CopyOutcome::kOk;
    progress.outcome.compare_exchange_strong(none, outcome, std::memory_order_relaxed);
  }

  if (progress.units_left.fetch_sub(1, std::memory_order_acq_rel) != 1) {
    return;
  }
  CopyOutcome& outcome = outcomes_[unit.item];
  outcome = progress.outcome.load(std::memory_order_relaxed);
  if (kind_ == CopyKind::kGather) {
    const Status status = write_record_header(item.record, item.length, item.spec,
                                              progress.sections.data(), progress.sections.size());
    if (!status.ok()) outcome = CopyOutcome::kFailed;
  }
}

bool CopyJob::cancel_rest() noexcept {
  const std::size_t begun = (next_unit_ + units_per_item() - 1) / units_per_item();
  const std::size_t items = end_unit_ / units_per_item();
  if (begun == items) {
    return false;
  }
  std::fill(outcomes_.begin() + static_cast<std::ptrdiff_t>(begun),
            outcomes_.begin() + static_cast<std::ptrdiff_t>(items), CopyOutcome::kCancelled);
  units_left_ -= (items - begun) * units_per_item();
  end_unit_ = begun * units_per_item();
  return true;
}

}  // namespace kvstrata
