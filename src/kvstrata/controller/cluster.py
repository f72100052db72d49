"""The cluster as this controller knows it: carries out instances' messages and admins' orders, on one loop.

Messages (answers.py) and the HTTP API (app.py) both arrive here.  Only `outcome` waits for instances, for a bounded
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.clock import Clock
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.controller.commands import COMMAND_TTL_S, Commands
from kvstrata.controller.directory import Directory, Fill, SlotsExhausted
from kvstrata.controller.gateways import Gateways
from kvstrata.controller.history import Journal
from kvstrata.controller.instance_keys import InstanceKeys, Listed
from kvstrata.controller.leadership import Leadership
from kvstrata.controller.lookups import Lookups
from kvstrata.controller.member import Issued, Member, MemberState, Outbox, Sync
from kvstrata.controller.members import Members
from kvstrata.controller.orders import Orders
from kvstrata.controller.ranking import Ranking
from kvstrata.controller.sampling import Sampling
from kvstrata.controller.syncs import Syncs
from kvstrata.errors import NoSlots, NotLeading, Refused, SyncAgain
from kvstrata.native.core import Registry
from kvstrata.observability.numbers import Numbers, counter
from kvstrata.rpc.cluster_wire import (
    Change,
    Command,
    CommandKind,
    Events,
    Goodbye,
    Heartbeat,
    Register,
    Run,
    SyncBegin,
    SyncEnd,
    SyncPart,
)
from kvstrata.types import GB

if TYPE_CHECKING:  # importing it needs the client library of etcd
    from kvstrata.controller.election import Election

TICK_S = 0.25
NO_SLOTS_RETRY_S = 0.5
OF_EACH = frozenset({CommandKind.RESYNC})
"""Commands that every controller sends for its own directory, even if it does not lead."""
ONLY_ASKING = frozenset({CommandKind.RUNTIME, CommandKind.STATUS, CommandKind.CLAIMS})
"""Commands that change nothing; dashboards send them all the time, so their success is not an event."""


class Cluster(Numbers):
    """All that this controller knows of the cluster."""

    refused_requests = counter("Requests of instances that were refused.", "code")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: ControllerSettings,
        clock: Clock,
        orders: Orders,
        *,
        name: str,
        epoch: int,
        election: Election | None = None,
        listed: Callable[[], Listed | None] = lambda: None,
        nudge: Callable[[str], None] = lambda instance: None,
        drained: Callable[[], None] = lambda: None,
    ) -> None:
        """`listed`: see InstanceKeys.  `nudge` asks an instance for a heartbeat; `drained` is called when the directory
        accepts events again.
        """
        self.settings = settings
        self.name = name
        self.clock = clock
        self.epoch = epoch
        self.started_s = clock.monotonic_s()
        self.orders = orders
        self._nudge = nudge
        self.journal = Journal(clock, epoch * 1000)
        registry = Registry(max_bytes=int(settings.directory.max_gb * GB))
        self.lookups = Lookups(loop, registry)
        self.directory = Directory(loop, registry, self.lookups, failed=self._change_failed, drained=drained)
        self.leadership = Leadership(election, self.journal, retry_after_s=settings.etcd.ttl_s)
        self._outbox = Outbox()
        self.commands = Commands(self._outbox, epoch * 1000)
        self.syncs = Syncs(self.commands, self._outbox)
        self._keys = InstanceKeys(orders, lambda: clock.unix_ms() / 1000, listed)
        self.members = Members(
            self.commands,
            self.syncs,
            self._outbox,
            orders=orders,
            keys=self._keys,
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            now_s=self.started_s,
        )
        self.ranking = Ranking(clock, self.members, self.lookups)
        self.gateways = Gateways(clock, self.members, self.lookups, self._keys)
        self.sampling = Sampling(clock, self.members, self.directory, self.lookups, self.ranking)
        self._fills: dict[int, Fill] = {}
        """By group: the slots that its full sync under way fills."""
        self._outcomes: dict[int, asyncio.Future[None]] = {}
        self._ready = "starting"
        orders.changed = self._orders_changed

    # --- messages of instances, with the keys of their connections ------------------------------------------

    def register(self, told: Register, key: str) -> bool:
        """An instance registers; returns whether a full sync is wanted. Raises as `Members.register`."""
        member, sync = self.members.register(told, key, self._now())
        self._abandon(member)
        self.lookups.set_readable(member.group, member.readable)
        self.lookups.set_shared(member.group, told.media)
        self.settle()
        return sync

    def goodbye(self, told: Goodbye, key: str) -> None:
        """An instance leaves. Raises UnknownInstance, WrongKey."""
        self.members.goodbye(told, key, self._now())
        self.settle()

    def heartbeat(self, told: Heartbeat, key: str) -> list[Command]:
        """A heartbeat arrives; returns the commands for its answer. Raises UnknownInstance, Superseded, WrongKey."""
        leads = self.leadership.token is not None
        commands = self.members.heartbeat(told, key, self._now(), leads=leads)
        if not leads:
            commands = [command for command in commands if command.kind in OF_EACH]
        self.ranking.forget_referred(told.instance)
        member = self.members.get(told.instance)
        if member is not None:
            self.sampling.count_hits(member)
            self.leadership.check_obeys(member, told.obeys)
        self.settle()
        return commands

    def apply(self, told: Events, key: str) -> None:
        """Apply a batch of events, if it is the next one of a member."""
        member = self.members.get(told.instance)
        if self.syncs.events(member, told, key) and member is not None:
            try:
                self.directory.apply(member.group, member.told.tiers, told.runs)
                if member.told.media:
                    self._apply_to_sharers(member, told.runs)
            except SlotsExhausted:
                self.syncs.want(member, "no_slots")
        self.settle()

    def _apply_to_sharers(self, member: Member, runs: Sequence[Run]) -> None:
        """What one member no longer finds in a shared medium, no other one finds there."""
        for run in runs:
            medium = member.told.media.get(run.tier)
            if medium is None or run.change is Change.ADMIT:
                continue
            for other in self.members:
                for tier, its_medium in other.told.media.items():
                    known = self.lookups.slot(other.group, tier) is not None
                    if other is not member and its_medium == medium and known:
                        lost = Run(run.change, tier, run.tags)
                        self.directory.apply(other.group, other.told.tiers, [lost])

    def sync_begin(self, told: SyncBegin, key: str) -> None:
        """A full sync begins. Raises UnknownInstance, Superseded, WrongKey, BadSync, SyncAgain, NoSlots."""
        member = self.members.speaker(told.instance, told.incarnation, key, self._now())
        sync = self.syncs.begin(member, told, self._now())
        if sync is None:
            return
        self._abandon(member)
        try:
            self._fills[member.group] = self.directory.begin(member.group, member.told.tiers)
        except SlotsExhausted:
            self.syncs.failed(member, sync, "no_slots")
            raise NoSlots(
                "no slot is free until retired ones are swept; begin again", retry_after_s=NO_SLOTS_RETRY_S
            ) from None

    async def sync_part(self, told: SyncPart, key: str) -> None:
        """A part of a full sync arrives. Raises UnknownInstance, Superseded, WrongKey, BadSync, SyncAgain, Refused."""
        if self.directory.full:
            raise Refused("the controller is behind with full syncs; send the part again", retry_after_s=0.1)
        member = self.members.speaker(told.instance, told.incarnation, key, self._now())
        sync, fresh = self.syncs.part(member, told)
        fill = self._fills.get(member.group)
        if not fresh or fill is None:
            return
        wrong = await self.directory.fill(fill, told.tier, told.tags)
        if wrong:
            self._sync_failed(member, sync, wrong)
            raise Refused(
                f"the directory cannot take the part: {wrong}; see directory.max_gb",
                field="directory.max_gb",
                retry_after_s=self.settings.heartbeat_s,
            )

    async def sync_end(self, told: SyncEnd, key: str) -> None:
        """A full sync ends and is published. Raises UnknownInstance, Superseded, WrongKey, SyncAgain."""
        member = self.members.speaker(told.instance, told.incarnation, key, self._now())
        sync = self.syncs.end(member, told)
        if sync is None:
            await self.directory.idle()
            return
        fill = self._fills.pop(member.group, None)
        wrong = await self.directory.publish(fill) if fill is not None else "bad_slot"
        if wrong or not self.syncs.done(member, sync, self._now()):
            self._sync_failed(member, sync, wrong)
            raise SyncAgain(f"sync: {told.sync} was dropped before it was published; begin again")
        self.directory.forget_tiers_but(member.group, member.told.tiers)
        self.settle()

    # --- requests of admins ---------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and why not."""
        return not self._ready, self._ready

    def set_ready(self, why_not: str = "") -> None:
        """Serve requests; or, with `why_not`, refuse them for this reason."""
        self._ready = why_not

    def leadership_changed(self) -> None:
        """Another controller leads now, or none: end commands that only a leader may send."""
        self.leadership.changed()
        if self.leadership.token is None:
            self.commands.give_up(self.members, "this controller no longer leads", keep=OF_EACH)
            self.settle()

    def live(self) -> list[Member]:
        """Live members, which can get commands."""
        return [member for member in self.members if member.state is MemberState.LIVE]

    def issue_to_each(
        self, kind: CommandKind, asked: Iterable[tuple[Member, Sequence[dict[str, Any]]]]
    ) -> list[Issued]:
        """Issue commands to all these members, or to none. Raises NotLeading, Unavailable, Refused."""
        self.leadership.must_lead()
        rows = sorted(asked, key=lambda row: row[0].id)
        for member, arguments in rows:
            self.commands.check_room(member, len(arguments))
        return [self.issue(member, kind, argument) for member, arguments in rows for argument in arguments]

    def issue(
        self, member: Member, kind: CommandKind, argument: dict[str, Any], *, ttl_s: float = COMMAND_TTL_S
    ) -> Issued:
        """Issue a command to a member. Raises NotLeading, Unavailable, Refused."""
        self.leadership.must_lead()
        issued = self.commands.issue(member, kind, argument, self._now(), ttl_s=ttl_s)
        self._nudge(member.id)
        return issued

    async def outcome(self, issued: Sequence[Issued], wait_s: float) -> bool:
        """Wait until these commands have ended, at most `wait_s`; returns whether all have. The commands go on."""
        waits = [self._outcome(one) for one in issued if one.result is None]
        if waits and wait_s > 0:
            await asyncio.wait(waits, timeout=wait_s)
        return all(one.result is not None for one in issued)

    # --- periodic -------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Find dead members, end expired commands and add points to the series, until cancelled."""
        while True:
            now_s = self._now()
            self.members.tick(now_s)
            self.settle()
            self.sampling.sample(now_s)
            await asyncio.sleep(TICK_S)

    async def keep_orders(self) -> None:
        """Write keys that instances have shown, until cancelled."""
        while True:
            try:
                if self.leadership.token is not None:
                    await self.orders.write_keys()
                await self.orders.save()
            except NotLeading:
                pass  # the leader does it
            await asyncio.sleep(TICK_S)

    def settle(self) -> None:
        """Carry out the decisions in the outbox."""
        outbox = self._outbox
        for member in outbox.forgotten:
            self._abandon(member)
            self.directory.forget(member.group)
            self.sampling.forget(member)
            self.ranking.forget_referred(member.id)
        for issued in outbox.ended:
            waiting = self._outcomes.pop(issued.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
            assert issued.result is not None
            if issued.kind not in ONLY_ASKING or not issued.result.ok:
                self.journal.say("command", issued.instance, number=issued.number, command=str(issued.kind),
                                 ok=issued.result.ok, message=issued.result.message)  # fmt: skip
        for news in outbox.news:
            self.journal.say(news.kind, news.instance, **news.facts)
        outbox.clear()

    def close(self) -> None:
        """End the threads. The cluster must not be used afterwards."""
        self.directory.close()
        self.lookups.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self.clock.monotonic_s()

    def _outcome(self, issued: Issued) -> asyncio.Future[None]:
        future = self._outcomes.get(issued.number)
        if future is None:
            future = self._outcomes[issued.number] = asyncio.get_running_loop().create_future()
        return future

    def _orders_changed(self) -> None:
        """Apply changed orders to the members."""
        for member in self.members:
            if member.state is MemberState.DEAD:
                continue
            if member.id in self.orders.removed or not self._keys.fits(member.id, member.key):
                self.members.remove(member)
            else:
                self.lookups.set_readable(member.group, member.readable)
        self.settle()

    def _abandon(self, member: Member) -> None:
        fill = self._fills.pop(member.group, None)
        if fill is not None:
            self.directory.abandon(fill)

    def _sync_failed(self, member: Member, sync: Sync, reason: str) -> None:
        if member.sync is sync:
            self._abandon(member)
        self.syncs.failed(member, sync, reason)
        self.settle()

    def _change_failed(self, group: int, reason: str) -> None:
        """The directory had no room for some placements. Lookups miss these chunks; nothing else is affected."""
        self.journal.say("directory_full", reason=reason)
