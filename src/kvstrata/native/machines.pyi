"""The state machines that the native code executes, for docs and tests."""

from typing import NamedTuple

class MachineTable(NamedTuple):
    """One machine, as a header of ext/core/src defines it (base/machine.h)."""

    name: str
    states: tuple[tuple[str, str], ...]
    """(state, meaning), in the order of the states' numbers."""
    events: tuple[tuple[str, str], ...]
    after: dict[tuple[str, str], str]
    """By (state, event): the state that follows. Where no entry names a state and an event, that event cannot happen
    in that state."""

def machines() -> list[MachineTable]:
    """The machines of pool/states.h (an entry, a session row), disk/states.h (a segment, the mode of a disk log) and
    fs/states.h (a part, a server that shares a directory)."""
