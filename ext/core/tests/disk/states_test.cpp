// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What the lists of a disk log's segments are in each state.
#include "disk/states.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "disk/segments.h"
#include "support/check.h"

using namespace kvstrata;
using namespace kvstrata::disk;

namespace {

struct Lists {
  Lists() : segments(shared) {
    for (std::uint32_t number = 0; number < 3; ++number) {
      auto segment = std::make_unique<Segment>();
      segment->number = number;
      segments.move(segments.adopt(std::move(segment)), SegmentEvent::kCreated);
    }
  }
  void move(std::uint32_t number, SegmentEvent event) { segments.move(segments.at(number), event); }
  void fill(std::uint32_t number) {
    move(number, SegmentEvent::kChosen);
    move(number, SegmentEvent::kFilled);
  }
  std::vector<std::uint32_t> free() { return {segments.free().begin(), segments.free().end()}; }
  std::vector<std::uint32_t> full() { return {segments.full().begin(), segments.full().end()}; }

  using Numbers = std::vector<std::uint32_t>;
  Shared shared{.options = {}, .files = posix_files()};
  Segments segments;
};

using Numbers = Lists::Numbers;

TEST(a_segment_is_in_the_list_that_its_state_means) {
  Lists lists;
  CHECK(lists.free() == Numbers({0, 1, 2}));
  lists.move(0, SegmentEvent::kChosen);
  CHECK(lists.segments.active() == &lists.segments.at(0));
  CHECK(lists.free() == Numbers({1, 2}));
  lists.move(0, SegmentEvent::kFilled);
  CHECK(lists.segments.active() == nullptr && lists.full() == Numbers({0}));
  lists.move(0, SegmentEvent::kTableWritten);
  lists.move(0, SegmentEvent::kRetire);
  CHECK(lists.full() == Numbers({0}));
  lists.move(0, SegmentEvent::kPinsGone);
  CHECK(lists.full().empty() && lists.free() == Numbers({1, 2}));
  lists.move(0, SegmentEvent::kRenewed);
  CHECK(lists.free() == Numbers({1, 2, 0}));
  lists.move(2, SegmentEvent::kRetire);
  CHECK(lists.free() == Numbers({1, 0}));
}

TEST(full_segments_stay_in_the_order_in_which_they_were_filled) {
  Lists lists;
  lists.fill(1);
  lists.fill(0);
  lists.fill(2);
  CHECK(lists.full() == Numbers({1, 0, 2}));
  lists.move(1, SegmentEvent::kRetire);
  lists.move(1, SegmentEvent::kPinsGone);
  CHECK(lists.full() == Numbers({0, 2}));
  lists.move(1, SegmentEvent::kFailed);
  CHECK(lists.full() == Numbers({1, 0, 2}));
}

}  // namespace
