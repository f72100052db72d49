# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""The tables of the state machines that the native code executes: see machines.pyi for the contract."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from typing import NamedTuple


cdef extern from "base/machine.h" namespace "kvstrata" nogil:
    struct MachineWord:
        const char* name
        const char* meaning

    cdef cppclass MachineView:
        const char* name
        const MachineWord* states
        size_t state_count
        const MachineWord* events
        size_t event_count
        const uint8_t* moves


cdef extern from "pool/states.h" namespace "kvstrata" nogil:
    MachineView entry_machine "kvstrata::MachineView::of(kvstrata::kEntryMachine)"
    MachineView row_machine "kvstrata::MachineView::of(kvstrata::kRowMachine)"


cdef extern from "disk/states.h" namespace "kvstrata" nogil:
    MachineView segment_machine "kvstrata::MachineView::of(kvstrata::disk::kSegmentMachine)"
    MachineView log_machine "kvstrata::MachineView::of(kvstrata::disk::kLogMachine)"


cdef extern from "fs/states.h" namespace "kvstrata" nogil:
    MachineView part_machine "kvstrata::MachineView::of(kvstrata::kFsPartMachine)"


class MachineTable(NamedTuple):
    name: str
    states: tuple
    events: tuple
    after: dict


cdef tuple _words(const MachineWord* words, size_t count):
    return tuple([(words[i].name.decode(), words[i].meaning.decode()) for i in range(count)])


cdef object _table(MachineView view):
    cdef size_t i, j
    cdef uint8_t follows
    states = _words(view.states, view.state_count)
    events = _words(view.events, view.event_count)
    after = {}
    for i in range(view.event_count):
        for j in range(view.state_count):
            follows = view.moves[i * view.state_count + j]
            if follows < view.state_count:
                after[states[j][0], events[i][0]] = states[follows][0]
    return MachineTable(view.name.decode(), states, events, after)


def machines():
    return [
        _table(entry_machine), _table(row_machine), _table(segment_machine), _table(log_machine),
        _table(part_machine),
    ]
