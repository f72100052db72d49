// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// CopyJob: one job of the CPU's copy engine as units of work. A unit is some sections of one item,
// so that several threads can share a large record; the thread that ends the last unit of an item
// finishes the item.
//
//   units   [0, next)     taken, in order
//           [next, end)   to be taken; a cancellation makes `end` smaller
//
// REQUIRES, for all calls but create() and execute(): the copy engine's mutex is held.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "copy/items.h"

namespace kvstrata {

class CopyJob {
 public:
  struct Unit {
    std::size_t item;
    std::size_t begin;  // sections
    std::size_t end;
  };

  // kBadArgument, kOutOfRange: see check_items().
  static Status create(CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                       std::vector<CopyItem> items, std::shared_ptr<CopyJob>* out) noexcept;

  // For JobLedger.
  std::uint64_t id = 0;
  bool reported = false;
  bool done = false;

  [[nodiscard]] bool all_taken() const noexcept { return next_unit_ == end_unit_; }
  [[nodiscard]] bool has_several_units() const noexcept { return end_unit_ > 1; }
  // True if all units have been executed, except those that were cancelled.
  [[nodiscard]] bool all_ended() const noexcept { return units_left_ == 0; }

  // REQUIRES: not all_taken().
  [[nodiscard]] Unit take_unit() noexcept;
  // Copies a unit. Called without the mutex, by several threads for different units.
  void execute(const Unit& unit) noexcept;
  // Called once for each unit that was executed.
  void end_unit() noexcept { --units_left_; }

  // Cancels the items of which no unit was taken. Returns false if there are none.
  bool cancel_rest() noexcept;

  // REQUIRES: all_ended(); called once.
  [[nodiscard]] std::vector<CopyOutcome> take_outcomes() noexcept { return std::move(outcomes_); }

 private:
  // The state of one item while its units run.
  struct Progress {
    std::atomic<std::uint32_t> units_left{0};
    std::atomic<CopyOutcome> outcome{CopyOutcome::kOk};  // the first failure that a unit met
    std::vector<Section> sections;  // gather: the section table, filled by the units
  };

  [[nodiscard]] std::size_t units_per_item() const noexcept { return unit_begins_.size() - 1; }

  CopyKind kind_ = CopyKind::kGather;
  std::shared_ptr<const CopyPlan> plan_;
  std::vector<CopyItem> items_;
  std::unique_ptr<Progress[]> progress_;
  std::vector<CopyOutcome> outcomes_;
  std::vector<std::size_t> unit_begins_;  // first section of each unit of an item, then the end
  std::size_t next_unit_ = 0;
  std::size_t end_unit_ = 0;
  std::size_t units_left_ = 0;  // units of [0, end_unit_) that have not been executed
};

}  // namespace kvstrata
