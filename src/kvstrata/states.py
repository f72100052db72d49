"""State machines as data: the code executes the table of a machine.

A module with a state machine writes it down as one `Machine` and changes state by `Machine.after` alone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class Machine(Generic[State, Event]):
    """The states of one kind of object, and the state that each event leads to.

    The text below each member of the two enums says what the state means and when the event happens.
    """

    def __init__(
        self,
        name: str,
        first: State,
        moves: Mapping[State, Mapping[Event, State]],
    ) -> None:
        """`name` is for messages.  An event that `moves` does not list for a state cannot happen in it."""
        self.name = name
        self.first = first
        """The state that an object begins in."""
        self._after = {(state, event): after for state, row in moves.items() for event, after in row.items()}

    def after(self, state: State, event: Event) -> State:
        """The state that `event` leads to. Raises AssertionError if the event cannot happen, which is our mistake."""
        after = self._after.get((state, event))
        if after is None:
            raise AssertionError(f"{self.name}: {event.name.lower()} cannot happen in {state.name}")
        return after
