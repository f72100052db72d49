"""Records of what a controller knows of one instance; their states follow tables.  No I/O, no clock, no decisions.

`Members`, `Syncs` and `Commands` decide: they change a `Member`, and put what the caller must do next into an `Outbox`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from typing import Any, NamedTuple

from kvstrata.controller.orders import Orders
from kvstrata.rpc.cluster_wire import (
    TAG_BYTES,
    Command,
    CommandKind,
    CommandResult,
    KvKind,
    Load,
    Register,
    SyncPart,
    TierRate,
)
from kvstrata.states import Machine

MAX_SUPERSEDED = 16
"""Earlier incarnations that a member remembers; none of them may join again while the member lives."""
SYNC_AGAIN_S = 5.0
"""Time between two requests for a full sync that has not begun."""
NO_LOAD = Load({}, {}, {}, {}, 0, 0, 0, 0)

# --- the member -------------------------------------------------------------------------------------------------


class MemberState(enum.StrEnum):
    """State of one incarnation of an instance."""

    RESTORED = "restored"
    """Only the snapshot names it; it has not registered since this controller started."""
    LIVE = "live"
    """It has registered, and its messages arrive often enough."""
    DEAD = "dead"
    """It was silent for `dead_after_s`. Its placements are forgotten; it is still shown."""
    GONE = "gone"
    """It is not a member yet, or no longer."""


SHOWN_STATES = (MemberState.RESTORED, MemberState.LIVE, MemberState.DEAD)
"""States of members that status and metrics count."""


class MemberEvent(enum.Enum):
    """What can happen to a member."""

    READ = "read"
    """The snapshot names it."""
    REGISTERED = "registered"
    """Its process registers, for the first time or again."""
    SILENT = "silent"
    """No message of it has arrived for `dead_after_s`."""
    LEFT = "left"
    """Its process says goodbye."""
    REPLACED = "replaced"
    """Another incarnation of the instance registers, or this one after its death; the new registration makes a new
    member."""
    REMOVED = "removed"
    """An admin has removed it."""
    CROWDED_OUT = "crowded out"
    """More than MAX_DEAD members are dead, and this member for the longest time."""


MEMBER = Machine(
    "Member of a controller's cluster",
    MemberState.GONE,
    {
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
    },
)

# --- its full syncs ---------------------------------------------------------------------------------------------


class SyncState(enum.Enum):
    """State of a full sync."""

    RUNNING = "running"
    """Its parts arrive, in any order."""
    PUBLISHING = "publishing"
    """Its SyncEnd agrees with its parts; the directory makes its chunks visible to lookups."""
    DONE = "done"
    """Lookups find its chunks."""
    FAILED = "failed"
    """It was dropped; lookups find what they found before."""


class SyncEvent(enum.Enum):
    """What can happen to a full sync."""

    PART = "part"
    """A new part arrives."""
    ENDED = "ended"
    """SyncEnd arrives, and its counts agree with the parts."""
    MISCOUNTED = "miscounted"
    """SyncEnd arrives, and its counts differ from the parts."""
    PUBLISHED = "published"
    """The directory has made its chunks visible."""
    BROKEN = "broken"
    """The directory has no room for it."""
    ABANDONED = "abandoned"
    """The member begins another sync, registers again, dies or leaves."""


SYNC = Machine(
    "Full sync at a controller",
    SyncState.RUNNING,
    {
        SyncState.RUNNING: {
            SyncEvent.PART: SyncState.RUNNING,
            SyncEvent.ENDED: SyncState.PUBLISHING,
            SyncEvent.MISCOUNTED: SyncState.FAILED,
            SyncEvent.BROKEN: SyncState.FAILED,
            SyncEvent.ABANDONED: SyncState.FAILED,
        },
        SyncState.PUBLISHING: {
            SyncEvent.PUBLISHED: SyncState.DONE,
            SyncEvent.BROKEN: SyncState.FAILED,
            SyncEvent.ABANDONED: SyncState.FAILED,
        },
    },
)


class Sync:
    """One full sync of a member."""

    def __init__(self, number: int, events_seq: int, now_s: float) -> None:
        self.state = SYNC.first
        self.number = number
        self.events_seq = events_seq
        self.begun_s = now_s
        self.parts = 0
        """Number of leading parts that have all arrived."""
        self.tags: dict[str, int] = {}
        """Number of tags that have arrived, by tier."""
        self._ahead: set[int] = set()

    def happened(self, event: SyncEvent) -> None:
        """Move to the state that the table names."""
        self.state = SYNC.after(self.state, event)

    def has(self, index: int) -> bool:
        """Whether this part has arrived."""
        return index < self.parts or index in self._ahead

    def take(self, part: SyncPart) -> None:
        """Count a new part."""
        self.happened(SyncEvent.PART)
        self._ahead.add(part.index)
        while self.parts in self._ahead:
            self._ahead.remove(self.parts)
            self.parts += 1
        self.tags[part.tier] = self.tags.get(part.tier, 0) + len(part.tags) // TAG_BYTES

    @property
    def ahead(self) -> int:
        """Number of parts that have arrived before an earlier part."""
        return len(self._ahead)


# --- its commands -----------------------------------------------------------------------------------------------


class Issued:
    """A command of this controller, and its result."""

    def __init__(
        self,
        number: int,
        instance: str,
        kind: CommandKind,
        argument: dict[str, Any],
        now_s: float,
        ttl_s: float,
    ) -> None:
        self.is_sent = False
        """Whether each answer to a heartbeat carries it now."""
        self.command = Command(number, kind, argument)
        self.number = number
        self.instance = instance
        self.kind = kind
        self.issued_s = now_s
        self.expires_s = now_s + ttl_s
        self.result: CommandResult | None = None
        """Set once the command has ended: by the instance's result, or because it expired, its member is gone, or
        this controller no longer leads.
        """


# --- the whole record -------------------------------------------------------------------------------------------


class Member:
    """One incarnation of an instance, since it became a member.

    `Members` writes the first group of fields, `Syncs` the second, `Commands` the third.
    """

    def __init__(
        self, group: int, told: Register, key: str, first: MemberEvent, now_s: float, orders: Orders
    ) -> None:
        self._orders = orders
        self.group = group
        """Number of its placements in the directory; new each time that an incarnation becomes a member."""
        self.told = told
        self.key = key
        """Public key (Z85) of the connection on which it registered; all of its messages come with this key."""
        self.state = MEMBER.after(MEMBER.first, first)
        self.joined_s = now_s
        self.heard_s = now_s
        self.ended_s = 0.0
        """Time of its death."""
        self.reported = "ready"
        """The instance's state, as its heartbeats report it."""
        self.load = NO_LOAD
        self.obeys = (0, 0)
        """The greatest (cluster id, token) that the instance has seen."""
        self.models: list[KvKind] = []
        self.engines: list[str] = []
        """URLs of its engines, as its last heartbeat told; kept after its death, since engines serve without it."""
        self.rates: list[TierRate] = []
        """How fast it fills its L1, as its last heartbeat told."""
        self.superseded: deque[int] = deque(maxlen=MAX_SUPERSEDED)

        self.confirmed = False
        """A full sync has ended, and every event since then was applied."""
        self.applied_seq = told.last_event
        self.lacking_since_s: float | None = None
        """Time since when its heartbeats name events that have not arrived."""
        self.sync: Sync | None = None
        self.sync_wanted = ""
        """Why a full sync is wanted; empty: none is wanted."""
        self.sync_asked_s = -SYNC_AGAIN_S
        self.synced_number = -1
        self.synced_s: float | None = None
        self.sync_count = 0
        self.sync_took_s = 0.0
        self.event_batches = 0

        self.waiting: OrderedDict[int, Issued] = OrderedDict()
        """Commands that have not ended, oldest first."""

    def happened(self, event: MemberEvent) -> None:
        """Move to the state that the table names."""
        self.state = MEMBER.after(self.state, event)

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
        """Whether an admin has ordered that no peers are sent to it."""
        return self.id in self._orders.drained

    @property
    def readable(self) -> bool:
        """Whether peers may be sent to it."""
        return (
            bool(self.told.peer_endpoint)
            and not self.draining
            and self.state in (MemberState.RESTORED, MemberState.LIVE)
        )


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
        self.ended: list[Issued] = []
        """Commands that have ended."""
        self.news: list[News] = []

    def say(self, kind: str, member: Member, **facts: Any) -> None:
        """Add an event of a member."""
        self.news.append(News(kind, member.id, facts))

    def clear(self) -> None:
        """Empty the outbox, after everything was carried out."""
        self.forgotten.clear()
        self.ended.clear()
        self.news.clear()
