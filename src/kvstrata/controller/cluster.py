"""The cluster as this controller knows it: members, directory, events and numbers in one place, on one loop.

Messages (links.py) and the HTTP API (app.py) both go through here.  Nothing here waits for an instance except
`outcome`, which is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.clock import Clock
from kvstrata.config.model import ControllerSettings
from kvstrata.controller.directory import Directory, Fill, Found, SlotsExhausted
from kvstrata.controller.history import SAMPLE_S, EventTail, Point, Series
from kvstrata.controller.members import Denied, Issued, Member, Members, MemberState, Sync
from kvstrata.controller.orders import Orders, Pin
from kvstrata.errors import NotLeading
from kvstrata.observability.logging import EventLog
from kvstrata.observability.metrics import Histogram
from kvstrata.process.keeper import NOT_RESTARTED
from kvstrata.rpc.cluster_wire import (
    MAX_OWNERS,
    CommandKind,
    Events,
    Goodbye,
    Heartbeat,
    Owner,
    Register,
    SyncBegin,
    SyncEnd,
    SyncPart,
    Where,
)

if TYPE_CHECKING:
    from kvstrata.controller.election import Election

GB = 1 << 30
TICK_S = 0.25
SLOW_START_S = 30.0
"""A new instance is asked by peers like the others only after so long."""
NO_SLOTS_RETRY_S = 0.5
CANDIDATES = 2 * MAX_OWNERS
OF_EACH = frozenset({CommandKind.RESYNC})
"""Commands that concern the directory of the controller that sends them, whether it leads or not."""
ONLY_ASKING = frozenset({CommandKind.EXPLAIN, CommandKind.RUNTIME, CommandKind.STATUS})
"""Commands that change nothing: whoever watches an instance asks them again and again."""
LOUD = frozenset(
    {
        "died",
        "superseded",
        "obeys_others",
        "resync",
        "directory_full",
        "clock",
        "snapshot_ignored",
        "snapshot_failed",
    }
)


class Cluster:
    """Everything that this controller knows."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, settings: ControllerSettings, clock: Clock, *, name: str
    ) -> None:
        self.settings = settings
        self.name = name
        self.clock = clock
        self.epoch = clock.unix_ms()
        self.started_s = clock.monotonic_s()
        self.restarts = NOT_RESTARTED
        """Of this process, by its keeper."""
        self.http_stats: Callable[[], dict[str, int]] = dict
        """Counts of the HTTP port, once it is served."""
        self.directory = Directory(
            loop, max_bytes=int(settings.directory.max_gb * GB), failed=self._change_failed
        )
        self.orders = Orders(clock, self._orders_changed)
        self._ended_pins: set[str] = set()
        """Claims of instances that have left."""
        self.members = Members(
            orders=self.orders,
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            max_instances=settings.max_instances,
            first_command=self.epoch * 1000,
            now_s=self.started_s,
        )
        self.events = EventTail(self.epoch * 1000)
        self.series = Series()
        self.nudge: Callable[[str], None] = lambda instance: None
        """Sends an instance a Nudge; set by links.py."""
        self.lookup = Histogram()
        self.lookup_hits = 0
        self.lookup_keys = 0
        self.ports: dict[str, int] = {}
        """Of the sockets for instances, by name; filled by links.py."""
        self.denied: dict[str, int] = {}
        """Refused requests of instances, by code."""
        self._fills: dict[int, Fill] = {}
        """Slots of syncs under way, by group."""
        self._referred: dict[str, int] = {}
        """Times that readers were sent to an instance since its last heartbeat."""
        self._outcomes: dict[int, asyncio.Future[None]] = {}
        self._log = EventLog("controller")
        self._sampled: tuple[float, dict[str, int], int, int, int] = (self.started_s, {}, 0, 0, 0)
        self._hits: dict[int, dict[str, int]] = {}
        """Hits that members told last, by group: they restart with their process."""
        self.hits_total: dict[str, int] = {}
        """Chunks that lookups of instances found while this controller ran, by source."""
        self.sync_keys = 0
        self.election: Election | None = None
        """None where this is the only controller."""
        self.snapshot: dict[str, Any] = {}
        """What snapshot.py tells of itself; empty without a snapshot."""
        self._ready = "starting"

    # --- messages of instances ----------------------------------------------------------------------------

    def register(self, told: Register) -> bool:
        """Whether a full sync is wanted. Raises Denied."""
        member, sync = self.members.register(told, self._now())
        self._abandon(member)
        self.directory.set_readable(member.group, member.readable)
        self.settle()
        return sync

    def goodbye(self, told: Goodbye) -> None:
        """Raises Denied."""
        self.members.goodbye(told, self._now())
        self._ended_pins.update(
            pin.claim
            for pin in self.orders.pins()
            if (pin.instance, pin.incarnation) == (told.instance, told.incarnation)
        )
        self.settle()

    def heartbeat(self, told: Heartbeat) -> list[Any]:
        """Commands that have not ended. Raises Denied."""
        commands = self.members.heartbeat(told, self._now(), leads=self.token is not None)
        if self.token is None:
            commands = [command for command in commands if command.kind in OF_EACH]
        self._referred.pop(told.instance, None)
        member = self.members.get(told.instance)
        if member is not None:
            self._count_hits(member)
            self._look_whom_it_obeys(member, told.obeys)
        self.settle()
        return commands

    def apply(self, told: Events) -> None:
        """A batch of events."""
        member = self.members.events(told)
        if member is not None:
            try:
                self.directory.apply(member.group, member.told.tiers, told.runs)
            except SlotsExhausted:
                self.members.want_sync(member, "no_slots")
        self.settle()

    def sync_begin(self, told: SyncBegin) -> None:
        """Raises Denied."""
        member, sync = self.members.sync_begin(told, self._now())
        if sync is None:
            return
        self._abandon(member)
        try:
            self._fills[member.group] = self.directory.begin(member.group, member.told.tiers)
        except SlotsExhausted:
            self.members.sync_failed(member, sync, "no_slots")
            raise Denied("no_slots", "no slot is free until retired ones are swept; begin again", retryable=True,
                         retry_after_s=NO_SLOTS_RETRY_S) from None  # fmt: skip

    async def sync_part(self, told: SyncPart) -> None:
        """Raises Denied."""
        if self.directory.full:
            raise Denied("refused", "the controller is behind with full syncs; send the part again", retryable=True,
                         retry_after_s=0.1)  # fmt: skip
        member, sync, fresh = self.members.sync_part(told, self._now())
        fill = self._fills.get(member.group)
        if not fresh or fill is None:
            return
        wrong = await self.directory.fill(fill, told.tier, told.tags)
        if wrong:
            self._sync_failed(member, sync, wrong)
            raise Denied("refused", f"the directory cannot take the part: {wrong}; see directory.max_gb",
                         field="directory.max_gb", retryable=True, retry_after_s=self.settings.heartbeat_s)  # fmt: skip
        self.sync_keys += len(told.tags) // 8

    async def sync_end(self, told: SyncEnd) -> None:
        """Raises Denied."""
        member, sync = self.members.sync_end(told, self._now())
        if sync is None:
            await self.directory.idle()
            return
        fill = self._fills.pop(member.group, None)
        wrong = await self.directory.publish(fill) if fill is not None else "bad_slot"
        if wrong or not self.members.sync_done(member, sync, self._now()):
            self._sync_failed(member, sync, wrong)
            raise Denied(
                "bad_sync", f"sync: {told.sync} was ended from elsewhere; begin again", retryable=True
            )
        self.directory.forget_tiers_but(member.group, member.told.tiers)
        self.settle()

    def where_now(self, told: Where) -> list[Owner]:
        """Who holds the longest beginning: best first."""
        asker = self.members.get(told.asker)
        group = asker.group if asker is not None else None
        return self._ranked(told, asker, self.directory.longest(told.tags, told.n_slices, group, CANDIDATES))

    async def where(self, told: Where) -> list[Owner]:
        """The same for more tags than the loop has time for."""
        asker = self.members.get(told.asker)
        group = asker.group if asker is not None else None
        found = await self.directory.longest_on_thread(told.tags, told.n_slices, group, CANDIDATES)
        return self._ranked(told, asker, found)

    # --- what admins ask ------------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""
        return not self._ready, self._ready

    def set_ready(self, why_not: str = "") -> None:
        """Empty: requests are served."""
        self._ready = why_not

    @property
    def token(self) -> int | None:
        """What commands are sent with: 0 for the only controller, None for one that does not lead."""
        return 0 if self.election is None else self.election.token or None

    def leadership_changed(self) -> None:
        """Who leads is another one now, or nobody."""
        assert self.election is not None
        leader = self.election.leader
        self.say("leadership", leader=leader.member.name if leader else "", leads=self.token is not None)
        if self.token is None:
            self.members.give_up("this controller does not lead any more", keep=OF_EACH)
            self.settle()

    def must_lead(self) -> None:
        """Raises Denied unless this controller may send commands."""
        if self.token is None:
            assert self.election is not None
            leader = self.election.leader
            who = f"{leader.member.name} does, at {leader.member.http_url}" if leader else "nobody does now"
            raise Denied(NotLeading.code, f"this controller does not lead; {who}", retryable=True,
                         retry_after_s=self.settings.etcd.ttl_s)  # fmt: skip

    def live(self) -> list[Member]:
        """Members that can be asked."""
        return [member for member in self.members if member.state is MemberState.LIVE]

    def issue_all(
        self, member: Member, kind: CommandKind, arguments: Sequence[dict[str, Any]]
    ) -> list[Issued]:
        """Ask several things of a member, or none of them. Raises Denied."""
        self.must_lead()
        self.members.check_room(member, len(arguments))
        return [self.issue(member, kind, argument) for argument in arguments]

    def issue(
        self, member: Member, kind: CommandKind, argument: dict[str, Any], *, ttl_s: float = 600.0
    ) -> Issued:
        """Ask something of a member. Raises Denied."""
        self.must_lead()
        issued = self.members.issue(member, kind, argument, self._now(), ttl_s=ttl_s)
        self.nudge(member.id)
        return issued

    async def drain(self, instance: str, on: bool) -> Issued | None:
        """Peers are sent to it no more, or again. The command that tells it; None where it is told when it comes back.

        Raises Denied, Refused, NotLeading.
        """
        self.must_lead()
        await self.orders.drain(instance, on)
        self.say("draining" if on else "undrained", instance)
        member = self.members.get(instance)
        if member is None or member.state is not MemberState.LIVE:
            return None
        return self.issue(member, CommandKind.DRAIN, {"on": on})

    async def remove(self, member: Member) -> None:
        """Forget a member; one that lives is not let in again until it is allowed.

        Raises Denied, Refused, NotLeading.
        """
        self.must_lead()
        await self.orders.remove(member.id, bar=member.state is not MemberState.DEAD)
        if self.members.get(member.id) is member:
            self.members.remove(member)
        self.settle()

    def _orders_changed(self) -> None:
        """Carry out what this concerns here."""
        for member in self.members:
            if member.state is MemberState.DEAD:
                continue
            if member.id in self.orders.removed:
                self.members.remove(member)
            else:
                self.directory.set_readable(member.group, member.readable)
        self.settle()

    async def outcome(self, issued: Sequence[Issued], wait_s: float) -> bool:
        """Whether all have ended within `wait_s`."""
        waits = [self._outcome(one) for one in issued if one.result is None]
        if waits and wait_s > 0:
            await asyncio.wait(waits, timeout=wait_s)
        return all(one.result is not None for one in issued)

    def _outcome(self, issued: Issued) -> asyncio.Future[None]:
        future = self._outcomes.get(issued.number)
        if future is None:
            future = self._outcomes[issued.number] = asyncio.get_running_loop().create_future()
        return future

    # --- snapshot -------------------------------------------------------------------------------------------

    def restore_member(self, told: Register) -> tuple[Member, dict[str, int]] | None:
        """A member out of a snapshot and the slots of its tiers; None where it is here already or there is no room."""
        member = self.members.restore(told, now_s=self._now())
        if member is None:
            return None
        self.directory.set_readable(member.group, member.readable)
        try:
            return member, self.directory.restore_slots(member.group, told.tiers)
        except SlotsExhausted:
            return None

    async def restore(self, tags: array[int], slots: array[int], slot_of: array[int]) -> str:
        """Placements of a snapshot; what went wrong, empty for nothing."""
        return await self.directory.restore(tags, slots, slot_of)

    # --- periodic -------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Deaths, expired commands and points of the series, for as long as it runs."""
        while True:
            now_s = self._now()
            self.members.tick(now_s)
            self.settle()
            if now_s - self._sampled[0] >= SAMPLE_S:
                self._sample(now_s)
            await asyncio.sleep(TICK_S)

    async def keep_orders(self) -> None:
        """Take pins away that keep nothing any more, for as long as it runs."""
        while True:
            over = [pin.claim for pin in self.orders.all_pins() if self._keeps_nothing(pin)]
            self._ended_pins.intersection_update(pin.claim for pin in self.orders.all_pins())
            try:
                if over and self.token is not None:
                    await self.orders.end_pins(*over)
                await self.orders.save()
            except NotLeading:
                pass  # whoever leads does it
            await asyncio.sleep(TICK_S)

    def _keeps_nothing(self, pin: Pin) -> bool:
        """Its time is over, or the process that kept its chunks is."""
        if self.orders.is_over(pin) or pin.claim in self._ended_pins:
            return True
        member = self.members.get(pin.instance)
        if member is None or member.state is not MemberState.LIVE or not pin.incarnation:
            return False
        return member.incarnation != pin.incarnation

    def settle(self) -> None:
        """Carry out what the members have decided."""
        members = self.members
        for member in members.forgotten:
            self._abandon(member)
            self.directory.forget(member.group)
            self._hits.pop(member.group, None)
            self._referred.pop(member.id, None)
        members.forgotten.clear()
        for issued in members.ended:
            waiting = self._outcomes.pop(issued.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
            assert issued.result is not None
            if issued.kind in ONLY_ASKING and issued.result.ok:
                continue
            self.say("command", issued.instance, number=issued.number, command=str(issued.kind), ok=issued.result.ok,
                     message=issued.result.message)  # fmt: skip
        members.ended.clear()
        for news in members.news:
            self.say(news.kind, news.instance, **news.facts)
        members.news.clear()

    def say(self, kind: str, instance: str = "", **facts: Any) -> None:
        """An event: to the tail, and to the log."""
        self.events.add(self.clock.unix_ms(), kind, instance, facts)
        level = logging.WARNING if kind in LOUD else logging.INFO
        self._log.repeated(
            level, f"{kind} {instance}", kind, **({"instance": instance} if instance else {}), **facts
        )

    def close(self) -> None:
        """Nothing is asked of it any more."""
        self.directory.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self.clock.monotonic_s()

    def _abandon(self, member: Member) -> None:
        fill = self._fills.pop(member.group, None)
        if fill is not None:
            self.directory.abandon(fill)

    def _sync_failed(self, member: Member, sync: Sync, reason: str) -> None:
        if member.sync is sync:
            self._abandon(member)
        self.members.sync_failed(member, sync, reason)
        self.settle()

    def _change_failed(self, group: int, reason: str) -> None:
        """Admits found no room: what is known is less than what is there, which is a miss and nothing worse."""
        self.say("directory_full", reason=reason)

    def _ranked(self, told: Where, asker: Member | None, found: list[Found]) -> list[Owner]:
        now_s = self._now()
        zone = asker.told.zone if asker is not None else ""
        rows: list[tuple[tuple[int, bool, bool, float], Member, int]] = []
        for group, n_chunks in found:
            member = self.members.of_group(group)
            if member is None or not member.readable or member.id == told.asker:
                continue
            load = member.load.peer_leased_bytes / max(1, member.told.l1_bytes // 4)
            load += 0.01 * self._referred.get(member.id, 0)
            load += 0.5 * max(0.0, 1.0 - (now_s - member.joined_s) / SLOW_START_S)
            far = bool(zone) and member.told.zone != zone
            rows.append(((-n_chunks, not member.confirmed, far, load), member, n_chunks))
        rows.sort(key=lambda row: row[0])
        owners = []
        for _, member, n_chunks in rows[: told.max_owners]:
            owners.append(
                Owner(
                    member.id,
                    member.incarnation,
                    member.told.peer_endpoint,
                    n_chunks * told.n_slices,
                    member.confirmed,
                )
            )
        if owners:
            self._referred[owners[0].instance] = self._referred.get(owners[0].instance, 0) + 1
        self.lookup_hits += bool(owners)
        self.lookup_keys += len(told.tags) // 8
        return owners

    def _look_whom_it_obeys(self, member: Member, obeys: tuple[int, int]) -> None:
        """An instance that has seen a greater leadership than ours refuses our commands."""
        election = self.election
        if election is None:
            if obeys[1] and member.obeys != obeys:
                self.say("obeys_others", member.id, reason="it has had commands of controllers that share an etcd and "
                         "refuses those of a controller without; restart it, or give this one --etcd")  # fmt: skip
        elif election.token and obeys > (election.cluster_id, election.token):
            election.outbid(obeys[0])
        member.obeys = obeys

    def _count_hits(self, member: Member) -> None:
        before = self._hits.get(member.group, {})
        for source, count in member.load.hits_total.items():
            gained = max(0, count - before[source]) if source in before else 0
            if source in self.hits_total or len(self.hits_total) < 16:
                self.hits_total[source] = self.hits_total.get(source, 0) + gained
        self._hits[member.group] = dict(member.load.hits_total)

    def _sample(self, now_s: float) -> None:
        then_s, hits, event_keys, sync_keys, lookups = self._sampled
        seconds = max(now_s - then_s, 0.001)
        applied = self.directory.admitted_keys + self.directory.evicted_keys
        n_lookups = sum(self.lookup.counts)
        keys: dict[str, int] = {}
        for place, count in self.directory.keys().items():
            keys[place.tier] = keys.get(place.tier, 0) + count
        used: dict[str, int] = {}
        states = [member.state for member in self.members]
        for member in self.live():
            for tier, n_bytes in member.load.used_bytes.items():
                used[tier] = used.get(tier, 0) + n_bytes
        self.series.add(
            Point(
                self.clock.unix_ms(),
                states.count(MemberState.LIVE),
                states.count(MemberState.DEAD),
                keys,
                used,
                {word: (count - hits.get(word, 0)) / seconds for word, count in self.hits_total.items()},
                (applied - event_keys) / seconds,
                (self.sync_keys - sync_keys) / seconds,
                (n_lookups - lookups) / seconds,
                self.directory.usage().bytes,
            )
        )
        self._sampled = (now_s, dict(self.hits_total), applied, self.sync_keys, n_lookups)
