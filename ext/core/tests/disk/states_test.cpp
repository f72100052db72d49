// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Every cell of the disk log's state tables, and what the lists of segments are in each state.
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

// A row is a state, a letter is the state after the event of its column, a dot an event that cannot
// happen there.
template <typename State, std::size_t kStates, typename Event, std::size_t kEvents>
void check_cells(const Machine<State, kStates, Event, kEvents>& machine, const std::string& letters,
                 const std::array<const char*, kStates>& rows) {
  for (std::size_t from = 0; from < kStates; ++from) {
    std::string row;
    for (std::size_t event = 0; event < kEvents; ++event) {
      const auto state = static_cast<State>(from);
      const auto happened = static_cast<Event>(event);
      row += machine.can(state, happened)
                 ? letters.at(static_cast<std::size_t>(machine.after(state, happened)))
                 : '.';
    }
    CHECK_EQ(row, std::string(rows[from]));
  }
}

// Events: created chosen filled table_written retire pins_gone renewed failed dropped foreign_file
// file_gone.
TEST(a_segment_moves_as_its_table_says) {
  check_cells(kSegmentMachine, "-FAULRDX",
              {
                  "F........X.",  // absent
                  ".A..D......",  // Free
                  "..U........",  // Active
                  "...LR......",  // fUll
                  "....R......",  // Listed
                  "...RRD.....",  // Retiring
                  "......FRX..",  // Drained
                  ".........X-",  // foreign
              });
}

// Events: opened no_room room sync_failed close.
TEST(a_log_changes_its_mode_as_its_table_says) {
  check_cells(kLogMachine, "-OSRTX",
              {
                  "O..RT",  // opening
                  ".SORT",  // Open
                  ".SORT",  // Starved
                  "RRRRX",  // Read-only
                  ".TTXT",  // sTopping
                  ".XXXX",  // stopping, and read-only
              });
}

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
