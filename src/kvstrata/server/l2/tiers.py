"""The L2 adapters that a running server has, in order of nearness: the one owner of that set.

    state     gets chunks   answers lookups   leaves it by
    --------  ------------  ----------------  -------------------------------------------------------------
    ACTIVE    yes           yes               drain → DRAINING, remove → REMOVING
    DRAINING  what waited   unless told not   nothing waits or is under way → DRAINED; resume, remove as below
    DRAINED   no            unless told not   resume → ACTIVE, remove → REMOVING
    REMOVING  no            no                it has closed and nothing of it is stuck → not in the set

Invariants
1. A name is given once in the life of the server, so what a removed adapter says late means nobody else.
2. Positions count the members that are not REMOVING, from 0; these are the order in which a lookup asks.
3. The store and prefetch controllers keep what is theirs of a member from `join` to `leave`; which members there
   are, in which order and in which state, they read here.

Who changes the set, and when a change is over, is in server/l2/tier_control.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.storage.registry import ConfiguredAdapter

REMOVED = "adapter_removed"
"""Short reason of what an adapter was asked for when it left."""


class AdapterState(enum.StrEnum):
    """See the module's table."""

    ACTIVE = "active"
    DRAINING = "draining"
    DRAINED = "drained"
    REMOVING = "removing"


class Member:
    """One adapter of the set, as the controllers see it."""

    __slots__ = ("adapter", "configured", "entry", "name", "policy", "state", "takes_loads")

    def __init__(self, configured: ConfiguredAdapter, entry: Mapping[str, Any] | None = None) -> None:
        """`entry`: its JSON as it was given."""
        self.configured = configured
        self.entry = dict(entry or {})
        self.name = configured.name
        self.adapter = configured.adapter
        self.policy = configured.policy
        self.state = AdapterState.ACTIVE
        self.takes_loads = True
        """Lookups ask it and load from it."""

    @property
    def takes_puts(self) -> bool:
        """It gets chunks that its policy chooses from now on."""
        return self.state is AdapterState.ACTIVE


class AdapterSet:
    """See the module. Belongs to the event loop."""

    def __init__(self, opened: Iterable[ConfiguredAdapter] = ()) -> None:
        self._members = [Member(configured) for configured in opened]

    def __iter__(self) -> Iterator[Member]:
        """All members, nearest first, those that are being removed included."""
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def placed(self) -> list[Member]:
        """The members that have a position, in its order."""
        return [member for member in self._members if member.state is not AdapterState.REMOVING]

    @property
    def take_loads(self) -> bool:
        """Whether a lookup may find something behind L1."""
        return any(member.takes_loads for member in self._members)

    def get(self, name: str) -> Member | None:
        """The member of that name."""
        return next((member for member in self._members if member.name == name), None)

    def insert(self, member: Member, position: int) -> None:
        """Take a member in at a position; one past the end is the end."""
        assert self.get(member.name) is None, member.name
        placed = self.placed
        at = self._members.index(placed[position]) if position < len(placed) else len(self._members)
        self._members.insert(at, member)

    def discard(self, member: Member) -> None:
        """It is no member any more."""
        self._members.remove(member)
