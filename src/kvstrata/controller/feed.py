"""What live readers are shown: the cluster once a second, as what has changed, serialised once for all of them.

1. A *look* is the state at one time, with a number.  `look` takes one where the last is LOOK_S old; readers that ask
   meanwhile share it.  While nobody reads, nobody looks.
2. Each look leaves one *change*: the fields that differ from the look before, and the events in between.  A reader that
   has look n is given the changes n+1, n+2, … in order, one at a time.
3. The last MAX_CHANGES are kept, MAX_CHANGES_BYTES at most.  A reader that lacks one which is not kept any more is
   given the whole state instead.  So a reader that does not read costs one message, however long it does not.
4. Applying a whole state and the changes behind it gives the state of the last look; dashboard/model.js does so.

Looks are named EPOCH-NUMBER, so that those of another run of the controller are not taken for ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

LOOK_S = 1.0
MAX_CHANGES = 32
MAX_CHANGES_BYTES = 4 << 20
FORGET_S = 30.0
"""After so long without a reader the next look is told as a whole only."""
MAX_EVENTS = 1_000
"""Of one change, the newest; whoever misses some sees it by their numbers and asks /v1/events."""

Fields = dict[str, Any]


class State(NamedTuple):
    """What is shown.  Nothing in it may be changed once it was handed out."""

    cluster: Fields
    instances: dict[str, Fields]
    """By id; all rows have the same fields."""
    lists: Fields
    """What an admin ordered: `drained` and `removed`."""
    last_event: int


class Change(NamedTuple):
    """What leads from the look before to this one."""

    number: int
    body: bytes


class Feed:
    """Everything runs on one loop; nothing here waits."""

    def __init__(
        self,
        epoch: int,
        clock_s: Callable[[], float],
        see: Callable[[], State],
        events: Callable[[int], list[Fields]],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        """`see` gives the state now; `events(n)` the last MAX_EVENTS behind number n, oldest first."""
        self._epoch = epoch
        self._clock_s = clock_s
        self._see = see
        self._events = events
        self._look_s = look_s
        self._number = 0
        self._looked_s = 0.0
        self._state: State | None = None
        self._changes: deque[Change] = deque()
        self._changes_bytes = 0
        self._whole = Change(0, b"")

    @property
    def kept_bytes(self) -> int:
        """Memory of serialised states and changes."""
        return self._changes_bytes + len(self._whole.body)

    def name(self, number: int) -> str:
        """A look's name."""
        return f"{self._epoch}-{number}"

    def number_of(self, name: str) -> int:
        """The look with this name; 0, which nobody has, where it is none of ours."""
        epoch, _, number = name.partition("-")
        if epoch != str(self._epoch) or not (number.isascii() and number.isdecimal() and len(number) < 16):
            return 0
        return int(number)

    def due_s(self) -> float:
        """Until a look will be taken when somebody asks."""
        return max(0.0, self._looked_s + self._look_s - self._clock_s())

    def look(self) -> None:
        """Take the look that is due, if one is."""
        now_s = self._clock_s()
        if self._state is not None and now_s - self._looked_s < self._look_s:
            return
        before, forgotten = self._state, now_s - self._looked_s > FORGET_S
        self._state, self._looked_s = self._see(), now_s
        self._number += 1
        if before is None or forgotten:
            self._changes.clear()
            self._changes_bytes = 0
            return
        told = difference(before, self._state)
        told["events"] = self._events(before.last_event) if self._state.last_event > before.last_event else []
        body = self._body(self._number - 1, told)
        self._changes.append(Change(self._number, body))
        self._changes_bytes += len(body)
        while len(self._changes) > MAX_CHANGES or self._changes_bytes > MAX_CHANGES_BYTES:
            self._changes_bytes -= len(self._changes.popleft().body)

    def after(self, number: int) -> Change | None:
        """What a reader gets next that has this look; None where it has the last one. `look` was called before."""
        if number == self._number:
            return None
        first = self._changes[0].number if self._changes else self._number + 1
        if first <= number + 1 <= self._number:
            return self._changes[number + 1 - first]
        if self._whole.number != self._number:
            assert self._state is not None
            state = self._state
            told = {
                "cluster": state.cluster,
                "instances": state.instances,
                "gone": [],
                **state.lists,
                "events": [],
            }
            self._whole = Change(self._number, self._body(None, told))
        return self._whole

    def _body(self, after: int | None, told: Fields) -> bytes:
        names = {"look": self.name(self._number), "after": None if after is None else self.name(after)}
        return msgspec.json.encode({**names, **told})


def difference(before: State, now: State) -> Fields:
    """Fields that differ; rows that are new in full; `gone`: ids of rows that are not there any more."""
    instances = {}
    for name, row in now.instances.items():
        old = before.instances.get(name)
        if old is None:
            instances[name] = row
        elif old != row:
            instances[name] = {field: value for field, value in row.items() if old[field] != value}
    told: Fields = {
        "cluster": {
            field: value for field, value in now.cluster.items() if before.cluster.get(field) != value
        },
        "instances": instances,
        "gone": [name for name in before.instances if name not in now.instances],
    }
    for name, value in now.lists.items():
        if before.lists[name] != value:
            told[name] = value
    return told
