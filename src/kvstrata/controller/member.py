"""A controller's record of one instance, and the table of its states.  No I/O, no clock, no decisions.

`Members` decides: it changes a `Member`, and adds to an `Outbox` what the caller must do next.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.controller.orders import Orders
from kvstrata.rpc.cluster_wire import NO_CONDITION, Register

if TYPE_CHECKING:  # with compiled modules, which `kvstrata ctl` does without
    from kvstrata.cluster.follow import Follower
    from kvstrata.controller.commands import Command

MAX_SUPERSEDED = 16
"""Maximum number of earlier incarnations that a member remembers; these may not join again while the member lives."""
MAX_SENT = 16
"""Maximum number of a member's commands under way; the others wait."""

# --- the member -------------------------------------------------------------------------------------------------


class MemberState(enum.StrEnum):
    """State of one incarnation of an instance."""

    RESTORED = "restored"
    """It is known from the snapshot, and has not registered since this controller started."""
    LIVE = "live"
    """It has registered, and answers polls."""
    DEAD = "dead"
    """It has not answered for `dead_after_s`. Its placements are forgotten; it is still shown."""
    GONE = "gone"
    """It is not a member yet, or no longer one."""


SHOWN_STATES = (MemberState.RESTORED, MemberState.LIVE, MemberState.DEAD)
"""States of members that status and metrics count."""


class MemberEvent(enum.Enum):
    """Events of a member."""

    READ = "read"
    """It was read from the snapshot."""
    REGISTERED = "registered"
    """Its process registers, for the first time or again."""
    SILENT = "silent"
    """It has not answered for `dead_after_s`."""
    LEFT = "left"
    """Its process says goodbye."""
    REPLACED = "replaced"
    """Another incarnation of the instance registers, or this one after its death; the new registration makes a new
    member."""
    REMOVED = "removed"
    """An admin has removed it."""
    CROWDED_OUT = "crowded out"
    """More than MAX_DEAD members are dead, and this member for the longest time."""


MOVES = {
    MemberState.GONE: {
        MemberEvent.READ: MemberState.RESTORED,
        MemberEvent.REGISTERED: MemberState.LIVE,
    },
    MemberState.RESTORED: {
        MemberEvent.REGISTERED: MemberState.LIVE,
        MemberEvent.SILENT: MemberState.GONE,
        MemberEvent.REPLACED: MemberState.GONE,
        MemberEvent.REMOVED: MemberState.GONE,
    },
    MemberState.LIVE: {
        MemberEvent.REGISTERED: MemberState.LIVE,
        MemberEvent.SILENT: MemberState.DEAD,
        MemberEvent.LEFT: MemberState.GONE,
        MemberEvent.REPLACED: MemberState.GONE,
        MemberEvent.REMOVED: MemberState.GONE,
    },
    MemberState.DEAD: {
        MemberEvent.REPLACED: MemberState.GONE,
        MemberEvent.REMOVED: MemberState.GONE,
        MemberEvent.CROWDED_OUT: MemberState.GONE,
    },
}
"""By state and event: the next state. An event that a state does not list cannot occur in it."""

# --- the whole record -------------------------------------------------------------------------------------------


class Member:
    """One incarnation of an instance, since it became a member."""

    def __init__(
        self, group: int, told: Register, key: str, first: MemberEvent, now_s: float, orders: Orders
    ) -> None:
        self._orders = orders
        self.group = group
        """Number of its placements in the directory; new each time that an incarnation becomes a member."""
        self.told = told
        self.key = key
        """Public key (Z85) of the connection on which it registered; all of its messages come with this key."""
        self.state = MOVES[MemberState.GONE][first]
        self.joined_s = now_s
        self.heard_s = now_s
        self.ended_s = 0.0
        """Time of its death."""
        self.condition = NO_CONDITION
        """Its last reported condition; kept after its death, since its engines serve without it."""
        self.obeys = (0, 0)
        """The greatest (cluster id, token) that the instance has seen."""
        self.superseded: deque[int] = deque(maxlen=MAX_SUPERSEDED)

        self.follower: Follower | None = None
        """Set while the member lives."""
        self.waiting: dict[int, Command] = {}
        """Commands that have not ended, by number, oldest first."""
        self.sending = asyncio.Semaphore(MAX_SENT)
        """Limits the commands under way."""

    @property
    def confirmed(self) -> bool:
        """Whether the directory has its exact contents as of its last answer."""
        return self.follower is not None and self.follower.confirmed

    def on_event(self, event: MemberEvent) -> None:
        """Move to the state that the table names."""
        self.state = MOVES[self.state][event]

    @property
    def id(self) -> str:
        """The instance's name in the cluster."""
        return self.told.instance

    @property
    def incarnation(self) -> int:
        """Number of this run of the instance's process."""
        return self.told.incarnation

    @property
    def draining(self) -> bool:
        """Whether an admin has ordered that peers do not read from it."""
        return self.id in self._orders.drained

    @property
    def readable(self) -> bool:
        """Whether peers may read from it."""
        return (
            self.told.gives_to_peers
            and not self.draining
            and self.state in (MemberState.RESTORED, MemberState.LIVE)
        )


def total_keys(members: Iterable[Member], keys: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """Placements by tier of all these members; `keys`: by group and tier.

    Each instance knows a part of a shared tier, so the total of such a tier is the maximum over the instances.
    """
    totals: dict[str, int] = {}
    for member in members:
        ours = keys.get(member.group, {})
        for tier in member.told.tiers:
            known, total = ours.get(tier, 0), totals.get(tier, 0)
            totals[tier] = max(total, known) if tier in member.told.media else total + known
    return totals


class News(NamedTuple):
    """An event for operators."""

    kind: str
    instance: str
    facts: dict[str, Any]


class Outbox:
    """Decisions that the caller has to carry out; the caller empties the outbox after each call."""

    def __init__(self) -> None:
        self.forgotten: list[Member] = []
        """Members whose placements are to be dropped."""
        self.drained_otherwise: list[Member] = []
        """Members whose draining differs from the order."""
        self.news: list[News] = []

    def say(self, kind: str, member: Member, **facts: Any) -> None:
        """Add an event of a member."""
        self.news.append(News(kind, member.id, facts))

    def clear(self) -> None:
        """Empty the outbox after its decisions were carried out."""
        self.forgotten.clear()
        self.drained_otherwise.clear()
        self.news.clear()
