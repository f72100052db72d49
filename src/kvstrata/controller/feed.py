"""The live feed of dashboards: the changes of the cluster's state once a second, serialised once for all readers.

1. A *look* is the state at one time, and has a number.  `look` takes a new look when the last is LOOK_S old; readers
   that ask meanwhile share the last one.  Without readers no looks are taken.
2. Each look makes one *change*: the fields that differ from the previous look, and the events between the two.  A
   reader that has look n gets the changes n+1, n+2, … in order, one at a time.
3. The last MAX_CHANGES are kept, at most MAX_CHANGES_BYTES.  A reader whose next change is no longer kept gets the
   whole state instead, so a reader that stops reading costs one message, however long it stops.
4. A whole state and the changes after it, applied in order, give the state of the last look; dashboard/model.js applies
   them.

Looks are named EPOCH-NUMBER, so that a look of another run of the controller is recognised.
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
"""After this time without a reader, no change leads to the next look: readers get the whole state."""
MAX_EVENTS = 1_000
"""Most events in one change, the newest ones. A reader sees by their numbers that some are left out, and asks
/v1/events."""

Fields = dict[str, Any]


class State(NamedTuple):
    """The state that readers see. Nothing in it is changed after it was made."""

    cluster: Fields
    instances: dict[str, Fields]
    """Rows by id; all rows have the same fields."""
    lists: Fields
    """Orders of admins: `drained` and `removed`."""
    last_event: int


class Change(NamedTuple):
    """The difference between two consecutive looks; `number` is that of the second."""

    number: int
    body: bytes


class Feed:
    """The looks and changes of one controller. Everything runs on one loop; nothing here waits."""

    def __init__(
        self,
        epoch: int,
        clock_s: Callable[[], float],
        see: Callable[[], State],
        events: Callable[[int], list[Fields]],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        """`see` gives the present state, `events(n)` the last MAX_EVENTS events after number n, oldest first."""
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
        """The number of the look with this name; 0, which no look has, for a name of another run."""
        epoch, _, number = name.partition("-")
        if epoch != str(self._epoch) or not (number.isascii() and number.isdecimal() and len(number) < 16):
            return 0
        return int(number)

    def due_s(self) -> float:
        """Time until the next look is due."""
        return max(0.0, self._looked_s + self._look_s - self._clock_s())

    def look(self) -> None:
        """Take a look, if one is due."""
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
        """The next change for a reader that has this look; None if that is the last look. Call `look` first."""
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
    """The fields that differ between two states; new rows are complete, `gone` names rows that were dropped."""
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
