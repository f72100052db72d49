// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A state machine as data: one table that the code executes, a test walks cell by cell, and
// docs/states.md shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace kvstrata {

// The name of a state or an event, and the sentence that explains it in the docs.
struct MachineWord {
  const char* name;
  const char* meaning;
};

// States and events are enumerations that count from 0, in the order of `states` and `events`.
template <typename State, std::size_t kStates, typename Event, std::size_t kEvents>
struct Machine {
  static constexpr std::uint8_t kNever = 0xFF;  // the event cannot happen in this state

  const char* name;
  MachineWord states[kStates];
  MachineWord events[kEvents];
  std::uint8_t moves[kEvents][kStates];  // the state that follows, or kNever

  constexpr bool can(State state, Event event) const noexcept {
    return moves[static_cast<std::size_t>(event)][static_cast<std::size_t>(state)] != kNever;
  }
  // Aborts the process if the event cannot happen in this state: that is a bug.
  constexpr State after(State state, Event event) const noexcept {
    if (!can(state, event)) [[unlikely]]
      refuse(state, event);
    return static_cast<State>(
        moves[static_cast<std::size_t>(event)][static_cast<std::size_t>(state)]);
  }

 private:
  [[noreturn]] [[gnu::cold]] void refuse(State state, Event event) const noexcept {
    std::fprintf(stderr, "%s: %s cannot happen in %s\n", name,
                 events[static_cast<std::size_t>(event)].name,
                 states[static_cast<std::size_t>(state)].name);
    std::abort();
  }
};

// A machine of any type, with numbers in place of its enumerations: for tests and for the docs.
struct MachineView {
  const char* name;
  const MachineWord* states;
  std::size_t state_count;
  const MachineWord* events;
  std::size_t event_count;
  const std::uint8_t* moves;  // [event_count][state_count]

  template <typename State, std::size_t kStates, typename Event, std::size_t kEvents>
  static constexpr MachineView of(const Machine<State, kStates, Event, kEvents>& machine) noexcept {
    return {machine.name, machine.states, kStates, machine.events, kEvents, &machine.moves[0][0]};
  }
};

}  // namespace kvstrata
