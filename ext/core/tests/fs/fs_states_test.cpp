// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Every cell of the state tables of `fs`.
#include "fs/states.h"

#include <array>
#include <string>

#include "support/check.h"

using namespace kvstrata;

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

// Events: wrote write_failed claimed published needless publish_failed cancelled.
TEST(a_part_moves_as_its_table_says) {
  check_cells(kFsPartMachine, "IWCS",
              {
                  "WS....I",  // wrItIng
                  "..C...W",  // Written
                  "...SSSC",  // Claimed
                  ".......",  // Settled
              });
}

// Events: joined took_office deposed turn_ended left.
TEST(a_server_that_shares_a_directory_moves_as_its_table_says) {
  check_cells(kFsSharerMachine, "-HOD",
              {
                  "H....",  // outside
                  ".O.H-",  // Hears
                  "..DO-",  // Office
                  "..DH-",  // Deposed
              });
}

}  // namespace
