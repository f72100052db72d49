"""Members of the cluster: their incarnations, liveness, event numbers, full syncs and commands.  No I/O, no clock.

    (snapshot) ─▶ restored ─ register ─▶ live ─ silent for `dead_after_s` ─▶ dead ─ register ─▶ live
                     │ silent              │ goodbye, removed, superseded      │ too many dead
                     └───────────▶ (forgotten) ◀──────────────┴────────────────┘

1. One member an id.  Another incarnation of the same id takes over at once on the same host (a process that was
   restarted) and after the death of the old one elsewhere; what was superseded never comes back.
2. Placements belong to a `group`: one number for each time that an incarnation became a member.  What `forgotten`
   names has lost its placements.
3. Batches of events are applied once, in order.  A gap makes the member inexact: it is asked for a full sync, and is
   served as unconfirmed meanwhile.
4. A full sync counts only when all of its parts have come with the numbers that its end names.
5. A command is repeated in every answer to a heartbeat until its result has come or it has expired; each has one end.
6. Everything here is bounded: members, dead ones, parts ahead, waiting commands, ended commands.
7. Whether a member is drained is an order (orders.py), whether it obeys is told by its heartbeats: while they differ,
   it is told again.

Every method takes the time, in monotonic seconds.  What the caller has to do next is left in `forgotten`, `news` and
`ended`, which it empties.
"""

from __future__ import annotations

import enum
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvstrata.controller.orders import Orders
from kvstrata.errors import BadRequest, NotPermitted, Refused, WrongVersion
from kvstrata.native.copying import crc32c
from kvstrata.rpc.cluster_wire import (
    CLUSTER_PROTOCOL_VERSION,
    MAX_CLUSTER_MESSAGE_BYTES,
    MAX_COMMANDS,
    TAG_BYTES,
    Change,
    Command,
    CommandKind,
    CommandResult,
    Events,
    Goodbye,
    Heartbeat,
    Load,
    ModelInfo,
    Register,
    SyncBegin,
    SyncEnd,
    SyncPart,
)

MAX_GROUP = 65_535
MAX_DEAD = 256
"""Dead members that are still shown; the oldest is forgotten first."""
MAX_SUPERSEDED = 16
MAX_PARTS = 1 << 20
MAX_PARTS_AHEAD = 4_096
"""Parts of a sync that came before an earlier one did."""
MAX_WAITING = 256
"""Commands of one member that have not ended."""
MAX_ENDED = 1_024
MAX_BEAT_BYTES = MAX_CLUSTER_MESSAGE_BYTES // 2
"""Keys in the commands of one answer; the rest come with the next one."""
COMMAND_TTL_S = 600.0
LOST_EVENTS_S = 2.0
"""Events that a heartbeat told of and that did not come, with none before them coming either, are lost then."""
SYNC_AGAIN_S = 5.0
"""Between two requests for a full sync that has not begun."""
PAUSE_S = 5.0
"""A longer time between two ticks means that this process itself stood still."""
NO_LOAD = Load({}, {}, {}, {}, 0, 0, 0, 0)
_PEER_ENDPOINT = re.compile(r"tcp://[^\s/]+:\d{1,5}")


class MemberState(enum.StrEnum):
    """Where a member is in its life."""

    RESTORED = "restored"
    """Known from the snapshot only; it has not come back yet."""
    LIVE = "live"
    DEAD = "dead"


class Denied(Exception):
    """A request was refused and changed nothing; becomes a `Failure`."""

    def __init__(
        self, code: str, message: str, *, field: str = "", retryable: bool = False, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retryable = retryable
        self.retry_after_ms = round(1000 * retry_after_s)


class Sync:
    """A full sync under way."""

    def __init__(self, number: int, events_seq: int, now_s: float) -> None:
        self.number = number
        self.events_seq = events_seq
        self.begun_s = now_s
        self.parts = 0
        """Parts that came without one missing before them."""
        self.tags: dict[str, int] = {}
        self.ending = False
        self._ahead: set[int] = set()

    def has(self, index: int) -> bool:
        """Whether this part has come."""
        return index < self.parts or index in self._ahead

    def take(self, part: SyncPart) -> None:
        """A part has come that had not. Raises Denied when it is too far ahead."""
        if part.index >= MAX_PARTS or len(self._ahead) >= MAX_PARTS_AHEAD:
            raise Denied("bad_sync", f"index: part {part.index} is too far ahead: part {self.parts} is missing",
                         field="index")  # fmt: skip
        self._ahead.add(part.index)
        while self.parts in self._ahead:
            self._ahead.remove(self.parts)
            self.parts += 1
        self.tags[part.tier] = self.tags.get(part.tier, 0) + len(part.tags) // TAG_BYTES

    @property
    def missing(self) -> bool:
        """Whether a part is missing before one that has come."""
        return bool(self._ahead)


class Member:
    """One instance, as it is known."""

    def __init__(self, group: int, told: Register, state: MemberState, now_s: float, orders: Orders) -> None:
        self._orders = orders
        self.group = group
        self.told = told
        self.state = state
        self.joined_s = now_s
        self.heard_s = now_s
        self.ended_s = 0.0
        """When it died."""
        self.reported = "ready"
        """Its own state, as heartbeats tell it."""
        self.load = NO_LOAD
        self.obeys = (0, 0)
        """The greatest (cluster id, token) that it has seen."""
        self.models: list[ModelInfo] = []
        self.confirmed = False
        """A full sync has ended and every event since then was applied."""
        self.applied_seq = told.last_event
        self.told_seq = told.last_event
        self.lacking_since_s: float | None = None
        self.sync: Sync | None = None
        self.sync_wanted = ""
        """Why a full sync is wanted; empty: it is not."""
        self.sync_asked_s = -SYNC_AGAIN_S
        self.synced_number = -1
        self.synced_s: float | None = None
        self.sync_count = 0
        self.sync_took_s = 0.0
        self.event_batches = 0
        self.admitted = 0
        self.evicted = 0
        self.superseded: deque[int] = deque(maxlen=MAX_SUPERSEDED)
        self.waiting: OrderedDict[int, Issued] = OrderedDict()

    @property
    def id(self) -> str:
        """Its name in the cluster."""
        return self.told.instance

    @property
    def incarnation(self) -> int:
        """Names this run of its process."""
        return self.told.incarnation

    @property
    def draining(self) -> bool:
        """Whether peers are not to be sent to it."""
        return self.id in self._orders.drained

    @property
    def readable(self) -> bool:
        """Whether peers may be sent to it."""
        return bool(self.told.peer_endpoint) and not self.draining and self.state is not MemberState.DEAD


class Issued:
    """A command and what came of it."""

    def __init__(
        self,
        number: int,
        instance: str,
        kind: CommandKind,
        argument: dict[str, Any],
        now_s: float,
        ttl_s: float,
    ) -> None:
        self.command = Command(number, kind, argument)
        self.number = number
        self.instance = instance
        self.kind = kind
        self.issued_s = now_s
        self.expires_s = now_s + ttl_s
        self.sent = False
        self.result: CommandResult | None = None
        self.answered = False
        """The result is the member's own word, not what became of a command without an answer."""


class News(NamedTuple):
    """Something that an operator wants to see."""

    kind: str
    instance: str
    facts: dict[str, Any]


class Members:
    """All of them."""

    def __init__(
        self,
        *,
        orders: Orders,
        heartbeat_s: float,
        dead_after_s: float,
        max_instances: int,
        first_command: int,
        now_s: float,
    ) -> None:
        """`first_command` is greater than the number of any command before."""
        self._orders = orders
        self.heartbeat_s = heartbeat_s
        self.dead_after_s = dead_after_s
        self._max_instances = max_instances
        self._by_id: dict[str, Member] = {}
        self._by_group: dict[int, Member] = {}
        self._next_group = 0
        self._next_command = first_command
        self._commands: OrderedDict[int, Issued] = OrderedDict()
        self._ticked_s = now_s
        self.forgotten: list[Member] = []
        self.news: list[News] = []
        self.ended: list[Issued] = []
        self.dropped: dict[str, int] = {}
        """Batches of events that were not applied, by reason."""

    # --- looking ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, instance: str) -> Member | None:
        """The member of this id, whatever its state."""
        return self._by_id.get(instance)

    def of_group(self, group: int) -> Member | None:
        """The member whose placements have this group."""
        return self._by_group.get(group)

    def command(self, number: int) -> Issued | None:
        """A recent command."""
        return self._commands.get(number)

    def commands(self) -> list[Issued]:
        """Recent ones, oldest first."""
        return list(self._commands.values())

    # --- membership ---------------------------------------------------------------------------------------

    def register(self, told: Register, now_s: float) -> tuple[Member, bool]:
        """The member, and whether a full sync is wanted. Raises Denied."""
        _check_register(told)
        if told.instance in self._orders.removed:
            raise Denied(NotPermitted.code, f"instance: {told.instance} was removed by an admin; let it in again with "
                         f"`kvstrata ctl cluster allow {told.instance}`", field="instance")  # fmt: skip
        known = self._by_id.get(told.instance)
        if (
            known is not None
            and known.incarnation == told.incarnation
            and known.state is not MemberState.DEAD
        ):
            return self._register_again(known, told, now_s)
        superseded: Iterable[int] = ()
        if known is not None:
            if told.incarnation in known.superseded:
                raise self._superseded(known)
            if known.state is MemberState.LIVE and not _same_host(known.told, told):
                raise Denied(
                    "instance_id_taken",
                    f"instance: {told.instance} lives on {known.told.host or 'another host'} "
                    f"(process {known.told.pid}); "
                    "give each instance a name of its own (--instance-id)",
                    field="instance",
                    retryable=True,
                    retry_after_s=max(0.1, known.heard_s + self.dead_after_s - now_s),
                )
            superseded = known.superseded
            if known.incarnation != told.incarnation:
                superseded = [*superseded, known.incarnation]
            self._forget(known, "superseded" if known.state is MemberState.LIVE else "came_back")
        elif (
            sum(member.state is not MemberState.DEAD for member in self._by_id.values())
            >= self._max_instances
        ):
            raise Denied(Refused.code, f"max_instances: {self._max_instances} instances are registered already",
                         field="max_instances", retryable=True, retry_after_s=self.heartbeat_s)  # fmt: skip
        member = self._add(told, MemberState.LIVE, now_s)
        member.superseded.extend(superseded)
        member.sync_wanted = "registered"
        self._say("joined", member, host=told.host, incarnation=told.incarnation, version=told.version)
        return member, True

    def restore(self, told: Register, *, now_s: float) -> Member | None:
        """A member out of the snapshot; None when its id is taken."""
        if told.instance in self._by_id or len(self._by_id) >= self._max_instances:
            return None
        return self._add(told, MemberState.RESTORED, now_s)

    def goodbye(self, told: Goodbye, now_s: float) -> None:
        """It leaves. Repeated, nothing happens. Raises Denied."""
        member = self._by_id.get(told.instance)
        if member is None or told.incarnation in member.superseded:
            return
        self._forget(self._speaker(told.instance, told.incarnation, now_s), "left")

    def remove(self, member: Member) -> None:
        """An admin has removed it."""
        self._forget(member, "removed")

    def tick(self, now_s: float) -> None:
        """Look who has died and which commands have expired.

        When this process itself stood still, nobody is blamed for that time: what was sent meanwhile waits to be read.
        """
        stood_still_s = now_s - self._ticked_s
        self._ticked_s = now_s
        if stood_still_s > PAUSE_S:
            for member in self._by_id.values():
                member.heard_s = min(now_s, member.heard_s + stood_still_s)
            self._happened("clock", "", stood_still_s=round(stood_still_s, 1))
            return
        for member in list(self._by_id.values()):
            if member.state is MemberState.DEAD:
                continue
            for issued in [issued for issued in member.waiting.values() if now_s >= issued.expires_s]:
                self._end(member, issued, CommandResult(issued.number, False, "no answer before it expired"))
            if now_s - member.heard_s < self.dead_after_s:
                continue
            if member.state is MemberState.RESTORED:
                self._forget(member, "did_not_come_back")
            else:
                self._die(member, now_s)

    # --- heartbeats and commands --------------------------------------------------------------------------

    def heartbeat(self, told: Heartbeat, now_s: float, *, leads: bool = True) -> list[Command]:
        """It lives; the commands that have not ended. Raises Denied."""
        member = self._speaker(told.instance, told.incarnation, now_s)
        member.load = told.load
        member.models = told.models
        if member.reported != told.state:
            self._say("state", member, was=member.reported, now=told.state)
            member.reported = told.state
        for result in told.results:
            issued = member.waiting.get(result.number)
            if issued is not None:
                issued.answered = True
                self._end(member, issued, result)
        if leads:
            self._tell_whether_drained(member, told, now_s)
        self._look_for_lost_events(member, told.last_event, now_s)
        self._ask_for_sync(member, now_s)
        commands: list[Command] = []
        n_bytes = 0
        for issued in list(member.waiting.values())[:MAX_COMMANDS]:
            n_bytes += sum(
                len(value) for value in issued.command.argument.values() if isinstance(value, bytes)
            )
            if commands and n_bytes > MAX_BEAT_BYTES:
                break
            issued.sent = True
            commands.append(issued.command)
        return commands

    def issue(
        self,
        member: Member,
        kind: CommandKind,
        argument: dict[str, Any],
        now_s: float,
        *,
        ttl_s: float = COMMAND_TTL_S,
    ) -> Issued:
        """Ask something of a member that lives. Raises Denied when it does not, or when too much waits already."""
        self.check_room(member, 1)
        issued = Issued(self._next_command, member.id, kind, argument, now_s, ttl_s)
        self._next_command += 1
        member.waiting[issued.number] = issued
        self._commands[issued.number] = issued
        while len(self._commands) > MAX_ENDED:
            oldest = next((number for number, old in self._commands.items() if old.result is not None), None)
            if oldest is None:
                break
            del self._commands[oldest]
        return issued

    def check_room(self, member: Member, count: int) -> None:
        """Raises Denied where a member that does not live, or has too many waiting, cannot be asked so many."""
        if member.state is not MemberState.LIVE:
            raise Denied("unavailable", f"instance: {member.id} is {member.state}; only one that lives can be asked",
                         field="instance", retryable=True)  # fmt: skip
        if len(member.waiting) + count > MAX_WAITING:
            raise Denied(Refused.code, f"instance: {len(member.waiting)} commands wait for {member.id}, {count} more "
                         f"would be over {MAX_WAITING}; ask for fewer chunks, or try again",
                         field="instance", retryable=True)  # fmt: skip

    def give_up(self, why: str, *, keep: frozenset[CommandKind]) -> None:
        """Commands that wait end, but for those of the kinds in `keep`."""
        for member in self._by_id.values():
            for issued in [one for one in member.waiting.values() if one.kind not in keep]:
                self._end(member, issued, CommandResult(issued.number, False, why))

    # --- events -------------------------------------------------------------------------------------------

    def events(self, told: Events) -> Member | None:
        """The member to whose placements the batch is to be applied; None where it is dropped (and counted)."""
        member = self._by_id.get(told.instance)
        if member is None:
            return self._drop("unknown_instance")
        if told.incarnation != member.incarnation:
            return self._drop("superseded")
        if member.state is not MemberState.LIVE:
            return self._drop(f"{member.state}_instance")
        if any(len(run.tags) % TAG_BYTES or (run.change is Change.CLEAR and run.tags) for run in told.runs):
            self.want_sync(member, "bad_events")
            return self._drop("bad_tags")
        if any(run.tier not in member.told.tiers for run in told.runs):
            self.want_sync(member, "bad_events")
            return self._drop("unknown_tier")
        if told.seq <= member.applied_seq:
            return self._drop("repeated")
        if member.sync is not None and (member.sync.ending or told.seq > member.sync.events_seq):
            # Contained in what comes into force, or sent too early; a batch that is missing then is a gap.
            return self._drop("during_sync")
        if told.seq > member.applied_seq + 1:
            self.want_sync(member, "gap", expected=member.applied_seq + 1, got=told.seq)
        member.applied_seq = told.seq
        member.lacking_since_s = None
        member.event_batches += 1
        for run in told.runs:
            count = len(run.tags) // TAG_BYTES
            if run.change is Change.ADMIT:
                member.admitted += count
            else:
                member.evicted += count
        return member

    def want_sync(self, member: Member, reason: str, **facts: Any) -> None:
        """What is known of its chunks is not exact any more."""
        if member.confirmed or not member.sync_wanted:
            self._say("resync", member, reason=reason, **facts)
        member.confirmed = False
        member.sync_wanted = reason

    # --- full syncs ---------------------------------------------------------------------------------------

    def sync_begin(self, told: SyncBegin, now_s: float) -> tuple[Member, Sync | None]:
        """The member, and its sync; None when the begin is a repetition. Raises Denied."""
        member = self._speaker(told.instance, told.incarnation, now_s)
        sync = member.sync
        if sync is not None and sync.number == told.sync:
            if sync.events_seq != told.events_seq:
                raise Denied("bad_sync", f"events_seq: sync {told.sync} began at {sync.events_seq}, not at "
                             f"{told.events_seq}; begin another one", field="events_seq")  # fmt: skip
            return member, None
        if sync is not None and sync.ending:
            raise Denied("bad_sync", f"sync: {sync.number} is coming into force; begin another when it was answered",
                         field="sync", retryable=True, retry_after_s=0.1)  # fmt: skip
        if told.sync <= member.synced_number:
            raise Denied("bad_sync", f"sync: {told.sync} is not greater than {member.synced_number}, the last that "
                         "ended; begin one with a greater number", field="sync")  # fmt: skip
        member.sync = Sync(told.sync, told.events_seq, now_s)
        return member, member.sync

    def sync_part(self, told: SyncPart, now_s: float) -> tuple[Member, Sync, bool]:
        """The member, its sync, and whether the part is taken (False: a repetition). Raises Denied."""
        member = self._speaker(told.instance, told.incarnation, now_s)
        sync = self._sync(member, told.sync)
        if sync.has(told.index):
            return member, sync, False
        if told.tier not in member.told.tiers:
            raise Denied(
                "bad_sync", f"tier: {told.tier!r} is none of {', '.join(member.told.tiers)}", field="tier"
            )
        if len(told.tags) % TAG_BYTES:
            raise Denied(
                "bad_sync", f"tags: {len(told.tags)} bytes are no multiple of {TAG_BYTES}", field="tags"
            )
        if crc32c(told.tags) != told.crc:
            raise Denied("bad_sync", f"crc: that of part {told.index} is {crc32c(told.tags)}, not {told.crc}; send it "
                         "again", field="crc", retryable=True)  # fmt: skip
        if sync.ending:
            raise Denied(
                "bad_sync", f"index: sync {told.sync} has ended without part {told.index}", field="index"
            )
        sync.take(told)
        return member, sync, True

    def sync_end(self, told: SyncEnd, now_s: float) -> tuple[Member, Sync | None]:
        """The member, and the sync to be published; None for a repetition. Raises Denied."""
        member = self._speaker(told.instance, told.incarnation, now_s)
        if told.sync == member.synced_number:
            return member, None
        sync = self._sync(member, told.sync)
        if sync.ending:
            return member, None
        tags = {tier: count for tier, count in told.tags.items() if count}
        ours = {tier: count for tier, count in sync.tags.items() if count}
        if sync.missing or sync.parts != told.parts or ours != tags:
            member.sync = None
            self.want_sync(member, "bad_counts")
            raise Denied("bad_sync", f"parts: {sync.parts} of {told.parts} parts came without a hole, with "
                         f"{ours} tags for {tags}; begin again", field="parts", retryable=True)  # fmt: skip
        sync.ending = True
        return member, sync

    def sync_done(self, member: Member, sync: Sync, now_s: float) -> bool:
        """What the sync told is what is known now; False where that came too late."""
        if member.sync is not sync or self._by_id.get(member.id) is not member:
            return False
        member.sync = None
        member.synced_number = sync.number
        member.synced_s = now_s
        member.sync_took_s = now_s - sync.begun_s
        member.sync_count += 1
        member.applied_seq = sync.events_seq
        member.lacking_since_s = None
        member.confirmed = True
        member.sync_wanted = ""
        for issued in list(member.waiting.values()):
            if issued.kind is CommandKind.RESYNC and issued.issued_s <= sync.begun_s:
                self._end(member, issued, CommandResult(issued.number, True, ""))
        self._say("synced", member, tags=dict(sync.tags), took_s=round(member.sync_took_s, 3))
        return True

    def sync_failed(self, member: Member, sync: Sync, reason: str) -> None:
        """It could not be taken in."""
        if member.sync is sync:
            member.sync = None
            self.want_sync(member, reason)

    # --- inside -------------------------------------------------------------------------------------------

    def _speaker(self, instance: str, incarnation: int, now_s: float) -> Member:
        """The live member that says so of itself, heard now. Raises Denied."""
        member = self._by_id.get(instance)
        if member is not None and incarnation in member.superseded:
            raise self._superseded(member)
        if member is None or member.state is not MemberState.LIVE or member.incarnation != incarnation:
            raise Denied("unknown_instance", f"instance: {instance} (incarnation {incarnation}) is not registered; "
                         "register first", field="instance", retryable=True)  # fmt: skip
        member.heard_s = max(member.heard_s, now_s)
        return member

    def _superseded(self, member: Member) -> Denied:
        return Denied(
            "superseded",
            f"instance: another process has registered as {member.id} since (on {member.told.host or 'its host'}, "
            f"process {member.told.pid}); give each instance a name of its own (--instance-id)",
            field="instance",
        )

    def _sync(self, member: Member, number: int) -> Sync:
        if member.sync is None or member.sync.number != number:
            raise Denied(
                "bad_sync", f"sync: {number} is not under way; begin one", field="sync", retryable=True
            )
        return member.sync

    def _register_again(self, member: Member, told: Register, now_s: float) -> tuple[Member, bool]:
        """The connection is new, or this controller is."""
        restored = member.state is MemberState.RESTORED
        if told.tiers != member.told.tiers:
            self.want_sync(member, "tiers_changed")
        member.told = told
        member.state = MemberState.LIVE
        member.heard_s = now_s
        member.sync = None
        if restored:
            member.sync_wanted = "restored"
            self._say("came_back", member, incarnation=member.incarnation)
        elif told.last_event != member.applied_seq and member.confirmed:
            self.want_sync(member, "gap", expected=told.last_event, got=member.applied_seq)
        return member, not member.confirmed

    def _add(self, told: Register, state: MemberState, now_s: float) -> Member:
        while self._next_group in self._by_group:
            self._next_group = (self._next_group + 1) % MAX_GROUP
        member = Member(self._next_group, told, state, now_s, self._orders)
        self._next_group = (self._next_group + 1) % MAX_GROUP
        self._by_id[told.instance] = member
        self._by_group[member.group] = member
        return member

    def _forget(self, member: Member, kind: str) -> None:
        if member.state is not MemberState.DEAD:
            self._lose(member, f"{member.id} is a member no more")
        del self._by_id[member.id]
        self._by_group.pop(member.group, None)
        self._say(kind, member)

    def _die(self, member: Member, now_s: float) -> None:
        self._lose(member, f"{member.id} is dead")
        member.state = MemberState.DEAD
        member.ended_s = now_s
        self._by_group.pop(member.group, None)
        self._say("died", member, silent_s=round(now_s - member.heard_s, 1))
        dead = sorted(
            (m for m in self._by_id.values() if m.state is MemberState.DEAD), key=lambda m: m.ended_s
        )
        for old in dead[: max(0, len(dead) - MAX_DEAD)]:
            del self._by_id[old.id]

    def _lose(self, member: Member, why: str) -> None:
        """Its placements, its sync and its commands end."""
        self.forgotten.append(member)
        member.sync = None
        member.confirmed = False
        for issued in list(member.waiting.values()):
            self._end(member, issued, CommandResult(issued.number, False, why))

    def _end(self, member: Member, issued: Issued, result: CommandResult) -> None:
        issued.result = result
        del member.waiting[issued.number]
        self.ended.append(issued)

    def _look_for_lost_events(self, member: Member, told_seq: int, now_s: float) -> None:
        member.told_seq = told_seq
        if told_seq <= member.applied_seq or member.sync is not None or not member.confirmed:
            member.lacking_since_s = None
        elif member.lacking_since_s is None:
            member.lacking_since_s = now_s
        elif now_s - member.lacking_since_s >= LOST_EVENTS_S:
            self.want_sync(member, "lost_events", expected=told_seq, got=member.applied_seq)
            member.lacking_since_s = None

    def _tell_whether_drained(self, member: Member, told: Heartbeat, now_s: float) -> None:
        """Whatever became of earlier commands: it was cut off, or is another process."""
        if told.draining == member.draining or told.state == "stopping" or len(member.waiting) >= MAX_WAITING:
            return
        if not any(issued.kind is CommandKind.DRAIN for issued in member.waiting.values()):
            self.issue(member, CommandKind.DRAIN, {"on": member.draining}, now_s)

    def _ask_for_sync(self, member: Member, now_s: float) -> None:
        if not member.sync_wanted or member.sync is not None or now_s - member.sync_asked_s < SYNC_AGAIN_S:
            return
        if any(issued.kind is CommandKind.RESYNC for issued in member.waiting.values()):
            return
        if member.sync_wanted in ("registered", "restored") and now_s - member.joined_s < SYNC_AGAIN_S:
            return  # its registration was answered with the request
        member.sync_asked_s = now_s
        if len(member.waiting) < MAX_WAITING:
            self.issue(member, CommandKind.RESYNC, {"freeze_ms": 0}, now_s)

    def _drop(self, reason: str) -> Member | None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        return None

    def _say(self, kind: str, member: Member, **facts: Any) -> None:
        self._happened(kind, member.id, **facts)

    def _happened(self, kind: str, instance: str, **facts: Any) -> None:
        self.news.append(News(kind, instance, facts))


def _same_host(old: Register, new: Register) -> bool:
    return bool(new.host) and old.host == new.host


def _check_register(told: Register) -> None:
    if told.protocol != CLUSTER_PROTOCOL_VERSION:
        raise Denied(WrongVersion.code, f"protocol: {told.protocol}, this controller speaks "
                     f"{CLUSTER_PROTOCOL_VERSION}; upgrade one side", field="protocol")  # fmt: skip
    if told.tiers[0] != "l1" or len(set(told.tiers)) != len(told.tiers):
        raise Denied(
            BadRequest.code,
            f"tiers: {told.tiers}: must begin with 'l1' and name each tier once",
            field="tiers",
        )
    if told.peer_endpoint and not _PEER_ENDPOINT.fullmatch(told.peer_endpoint):
        raise Denied(BadRequest.code, f"peer_endpoint: {told.peer_endpoint!r}: must be tcp://host:port, or empty",
                     field="peer_endpoint")  # fmt: skip
