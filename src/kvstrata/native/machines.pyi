"""The state machines that the native code executes, for docs and tests."""

from typing import NamedTuple

class MachineTable(NamedTuple):
    """One machine, as a header of ext/core/src writes it down (base/machine.h)."""

    name: str
    states: tuple[tuple[str, str], ...]
    """(state, meaning), in the order of the states' numbers."""
    events: tuple[tuple[str, str], ...]
    after: dict[tuple[str, str], str]
    """By (state, event): the state that follows. Where no entry names a state and an event, that event cannot happen
    in that state."""

def machines() -> list[MachineTable]:
    """The machines of an entry and of a session row (pool/states.h), of a segment and of the mode of a disk log
    (disk/states.h), of a part and of a server that shares a directory (fs/states.h)."""
