"""This controller's state of the cluster: handles instances' messages and admins' orders on one event loop.

Messages (answers.py) and the HTTP API (admin.py) both arrive here.  Only `register` and `outcome` wait for instances,
for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvstrata.clock import Clock
from kvstrata.cluster.follow import Listener
from kvstrata.cluster.followers import Followers
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.controller.commands import COMMAND_TTL_S, MAX_WAITING, Command, Commands
from kvstrata.controller.copies import Copies
from kvstrata.controller.gateways import Gateways
from kvstrata.controller.history import Journal
from kvstrata.controller.instance_keys import InstanceKeys, Listed
from kvstrata.controller.leadership import Leadership
from kvstrata.controller.member import Member, MemberState, Outbox
from kvstrata.controller.members import Members
from kvstrata.controller.orders import Orders
from kvstrata.controller.planning import Planning
from kvstrata.controller.ranking import Ranking
from kvstrata.errors import ClusterFailure, NotLeading, Unavailable, UnreachableInstance
from kvstrata.observability.numbers import Numbers, counter
from kvstrata.patience import patience
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import (
    AskClaims,
    AskShared,
    AskStatus,
    Changed,
    Changes,
    Condition,
    Drain,
    Goodbye,
    Operation,
    Register,
)
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import AskLink
from kvstrata.types import GB

if TYPE_CHECKING:  # importing it needs the client library of etcd
    from kvstrata.controller.election import Election

TICK_S = 0.25
REACH_S = 2.0
"""Maximum time for a registering instance to answer at its control port."""
ONLY_ASKING = (AskStatus, AskClaims, AskShared)
"""Operations that change nothing; they are sent often, so their success is not recorded as an event."""


class Cluster(Numbers):
    """The state of the cluster, as this controller knows it. Belongs to the event loop."""

    hits_total = counter(
        "Chunks that lookups at instances asked for, by the source that had them, or `miss`.",
        "source",
        name="hit_chunks",
    )

    def __init__(
        self,
        settings: ControllerSettings,
        clock: Clock,
        orders: Orders,
        *,
        name: str,
        epoch: int,
        supervisor: Supervisor,
        keys: ClusterKeys,
        election: Election | None = None,
        listed: Callable[[], Listed | None] = lambda: None,
    ) -> None:
        """`listed`: see InstanceKeys. `keys`: this controller's keys for connections to instances."""
        self.settings = settings
        self.name = name
        self.clock = clock
        self.epoch = epoch
        self.started_s = clock.monotonic_s()
        self.orders = orders
        self._own_keys = keys
        self._resume: dict[int, int] = {}
        """By group: the cursor from which following a member of the snapshot continues."""
        self.journal = Journal(clock, epoch * 1000)
        self._followers = Followers(
            supervisor,
            max_bytes=int(settings.directory.max_gb * GB),
            beat_s=settings.heartbeat_s,
            promises=True,
            failed=self._change_failed,
        )
        self.lookups, self.directory = self._followers.lookups, self._followers.directory
        self.leadership = Leadership(election, self.journal, retry_after_s=settings.etcd.ttl_s)
        self._outbox = Outbox()
        self.commands = Commands(epoch * 1000, lambda: self.leadership.proof, self._command_ended)
        self._keys = InstanceKeys(orders, lambda: clock.unix_ms() / 1000, listed)
        self.members = Members(
            self._outbox,
            orders=orders,
            keys=self._keys,
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            now_s=self.started_s,
        )
        self.ranking = Ranking(clock, self.members, self.lookups)
        self.gateways = Gateways(clock, self.members, self._keys)
        self.copies = Copies(self)
        self.planning = Planning(self)
        self._ready = "starting"
        orders.changed = self._orders_changed

    # --- messages of instances, with the keys of their connections ------------------------------------------

    async def register(self, told: Register, key: str) -> None:
        """Register an instance, or update its registration; a new control port must answer first.

        Raises as `Members.check`, and UnreachableInstance.
        """
        told = msgspec.structs.replace(told, seq=0)
        link = None
        try:
            member = self.members.check(told, key, self._now())
            if member is not None and member.told == told:
                return
            known = member is not None and member.told.control_endpoint == told.control_endpoint
            link = self._link(told, key) if known else await self._reach(told, key)
            member = self.members.register(told, key, self._now())
            self.lookups.set_readable(member.group, member.readable)
            self._follow(member, link)
            link = None
        finally:
            if link is not None:
                link.close()
            self.settle()

    def goodbye(self, told: Goodbye, key: str) -> None:
        """Remove an instance that leaves. Raises UnknownInstance, WrongKey."""
        self.members.goodbye(told, key)
        self.settle()

    # --- following ------------------------------------------------------------------------------------------

    def _link(self, told: Register, key: str) -> AskLink:
        return self._followers.links.ask(told.control_endpoint, keys=self._own_keys.to(key), few=True)

    async def _reach(self, told: Register, key: str) -> AskLink:
        """Connect to an instance's control port, and check that the instance answers. Raises UnreachableInstance."""
        try:
            link = self._link(told, key)
        except Unavailable as error:
            raise UnreachableInstance(
                f"control_endpoint: {error.message}", field="control_endpoint"
            ) from None
        try:
            reply = await link.ask(Changes(0, -1), Changed, patience(REACH_S))
            if reply.epoch == told.incarnation:
                return link
            why = "another process answers there"
        except (Unavailable, ClusterFailure) as error:
            why = error.message
        link.close()
        raise UnreachableInstance(
            f"control_endpoint: the controller cannot reach {told.instance} at {told.control_endpoint}: {why}; open "
            "this port to the controller's host, and check p2p.listen, p2p.advertise and the keys of both",
            field="control_endpoint",
        )

    def _follow(self, member: Member, link: AskLink) -> None:
        """Follow a member over this link; if the directory has its contents already, only the changes since."""
        member.follower = self._followers.follow(
            member.group, member.told, link, _Heard(self, member),
            before=member.follower, cursor=self._resume.pop(member.group, None),
        )  # fmt: skip

    def cursors(self) -> dict[int, int]:
        """By group, for confirmed members: the number of the first change that the directory does not have."""
        found = {one.group: one.follower.cursor for one in self.members if one.follower and one.confirmed}
        return {group: cursor for group, cursor in found.items() if cursor is not None}

    def resume(self, instance: str, cursor: int) -> None:
        """Set the cursor from which a member of the snapshot is followed when it registers."""
        member = self.members.get(instance)
        if member is not None:
            self._resume[member.group] = cursor

    def list_restored(self) -> None:
        """List all members anew that were followed from the snapshot, since its placements are incomplete."""
        self._resume.clear()
        for member in self.live():
            if member.follower is not None and not member.follower.lists:
                member.follower.list_anew("snapshot_ignored")

    def heard(self, member: Member, condition: Condition | None) -> None:
        """Handle a member's answer; `condition`: None if it is unchanged."""
        before = member.condition.load.hits_total
        self.members.heard(member, condition, self._now())
        if condition is not None:
            self.ranking.forget_referred(member.id)
            for source, count in member.condition.load.hits_total.items():
                # The first condition of a member may have counts from long before; only growth counts here.
                self.hits_total[source] += max(0, count - before.get(source, count))
            self.leadership.check_obeys(member, condition.obeys)
        self.settle()

    def list_anew(self, member: Member) -> None:
        """List a member's chunks again, for an admin. Raises Unavailable."""
        if member.follower is None or member.state is not MemberState.LIVE:
            raise Unavailable(
                f"instance: {member.id} is {member.state}; only a live instance can be listed",
                field="instance",
            )
        member.follower.list_anew("asked")

    # --- requests of admins ---------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, the reason."""
        return not self._ready, self._ready

    def set_ready(self, why_not: str = "") -> None:
        """Serve requests; or, with `why_not`, refuse them for this reason."""
        self._ready = why_not

    def leadership_changed(self) -> None:
        """Handle a change of the leader; without the lead, end all commands, which only a leader may send."""
        self.leadership.changed()
        if self.leadership.token is None:
            for member in self.members:
                self.commands.end_all(member, "this controller no longer leads")
            self.settle()

    def live(self) -> list[Member]:
        """The live members, to which commands can be sent."""
        return [member for member in self.members if member.state is MemberState.LIVE]

    def issue_to_each(self, asked: Iterable[tuple[Member, Sequence[Operation]]]) -> list[Command]:
        """Issue commands to all these members, or to none. Raises NotLeading, Unavailable, Refused."""
        self.leadership.must_lead()
        rows = sorted(asked, key=lambda row: row[0].id)
        for member, operations in rows:
            self.commands.check_room(member, len(operations))
        return [self.issue(member, operation) for member, operations in rows for operation in operations]

    def issue(
        self, member: Member, operation: Operation, *, ttl_s: float = COMMAND_TTL_S, quiet: bool = False
    ) -> Command:
        """Issue a command to a member; the success of a `quiet` one is not recorded as an event.

        Raises NotLeading, Unavailable, Refused.
        """
        self.leadership.must_lead()
        quiet = quiet or isinstance(operation, ONLY_ASKING)
        return self.commands.issue(member, operation, self._now(), ttl_s, quiet=quiet)

    async def outcome(self, issued: Sequence[Command], wait_s: float) -> bool:
        """Wait up to `wait_s` until these commands have ended; returns whether all have. The others continue."""
        try:
            async with asyncio.timeout(wait_s):
                for one in issued:
                    await one.ended.wait()
        except TimeoutError:
            pass
        return all(one.result is not None for one in issued)

    # --- periodic -------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Find dead members every TICK_S, until cancelled."""
        while True:
            self.members.tick(self._now())
            self.settle()
            await asyncio.sleep(TICK_S)

    async def keep_orders(self) -> None:
        """Write newly learnt keys and changed orders every TICK_S, until cancelled."""
        while True:
            try:
                if self.leadership.token is not None:
                    await self.orders.write_keys()
                await self.orders.save()
            except NotLeading:
                pass  # the leader writes them
            await asyncio.sleep(TICK_S)

    def settle(self) -> None:
        """Carry out the decisions in the outbox."""
        outbox = self._outbox
        for member in outbox.forgotten:
            self.commands.end_all(member, f"{member.id} is no longer a member, or is dead")
            self._followers.forget(member.group, member.follower)
            self._resume.pop(member.group, None)
            self.ranking.forget_referred(member.id)
            self.copies.wake.set()
        for member in outbox.drained_otherwise:
            ordered = any(isinstance(one.operation, Drain) for one in member.waiting.values())
            able = member.state is MemberState.LIVE and len(member.waiting) < MAX_WAITING
            if self.leadership.token is not None and able and not ordered:
                self.issue(member, Drain(member.draining))
        for news in outbox.news:
            self.journal.say(news.kind, news.instance, **news.facts)
        outbox.clear()

    async def close(self) -> None:
        """Stop following all members, and end the threads. The cluster must not be used afterwards."""
        await self._followers.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self.clock.monotonic_s()

    def _command_ended(self, command: Command) -> None:
        assert command.result is not None
        if not (command.quiet and command.result.ok):
            self.journal.say("command", command.member.id, number=command.number, command=command.operation.kind,
                             ok=command.result.ok, message=command.result.message)  # fmt: skip

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

    def _change_failed(self, group: int, reason: str) -> None:
        """Record that the directory is full. Lookups miss the placements left out; nothing else is affected."""
        self.journal.say("directory_full", reason=reason)


class _Heard(Listener):
    """Receives one member's answers from its follower."""

    def __init__(self, cluster: Cluster, member: Member) -> None:
        self._cluster, self._member = cluster, member

    def heard(self, condition: Condition | None) -> None:
        self._cluster.heard(self._member, condition)

    def listed(self, took_s: float) -> None:
        self._cluster.journal.say("listed", self._member.id, took_s=round(took_s, 3))

    def lost(self, reason: str) -> None:
        self._cluster.journal.say("list_again", self._member.id, reason=reason)
