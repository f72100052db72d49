"""Decides which incarnation of an instance is a member of the cluster, and which members are alive.  No I/O, no clock.

1. An id belongs to a key (instance_keys.py).  Only messages over a connection with a member's key count as the
   member's, and only a process with its secret key can answer the controller.
2. An id has one member.  Another incarnation of the same id and key takes over at once on the same host (a restarted
   process), and on another host after the death of the old one.  A superseded incarnation is refused as long as its
   successor lives; after the successor's death it may register again.
3. Placements belong to a `group`, a number that is new each time that an incarnation becomes a member.  When the outbox
   names a member in `forgotten`, its placements are dropped.
4. Members, dead members, and remembered incarnations are bounded.
5. An order says whether a member is to drain (orders.py), and its condition says whether it drains (leases nothing to
   peers).  As long as the two differ, the command is sent again.
6. A member is alive as long as it answers polls (cluster/follow.py); its repeated registrations do not count.

The states of a member are a table in member.py.  Every method takes the time, in monotonic seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvstrata.controller.instance_keys import InstanceKeys
from kvstrata.controller.member import Member, MemberEvent, MemberState, News, Outbox
from kvstrata.controller.orders import Orders
from kvstrata.errors import (
    BadRequest,
    InstanceIdTaken,
    KvstrataError,
    NotPermitted,
    Refused,
    Superseded,
    UnknownInstance,
    WrongKey,
)
from kvstrata.rpc.cluster_wire import (
    Condition,
    Goodbye,
    Register,
)

MAX_GROUP = 65_535
MAX_INSTANCES = 1_000
"""Maximum number of members that are not dead; further ones are refused."""
MAX_DEAD = 256
"""Maximum number of dead members that are still shown; the oldest is forgotten first."""
PAUSE_S = 5.0
"""Maximum time between two ticks; after a longer one, this process counts as having been stopped meanwhile."""
_ENDPOINT = re.compile(r"tcp://[^\s/]+:\d{1,5}")


class Members:
    """All members of the cluster."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        orders: Orders,
        keys: InstanceKeys,
        heartbeat_s: float,
        dead_after_s: float,
        max_instances: int = MAX_INSTANCES,
        now_s: float,
    ) -> None:
        self._outbox = outbox
        self._orders = orders
        self._keys = keys
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._max_instances = max_instances
        self._by_id: dict[str, Member] = {}
        self._by_group: dict[int, Member] = {}
        self._next_group = 0
        self._ticked_s = now_s

    # --- finding --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, instance: str) -> Member | None:
        """The member with this id, in any state; None: unknown."""
        return self._by_id.get(instance)

    def of_group(self, group: int) -> Member | None:
        """The member whose placements have this group; None: unknown."""
        return self._by_group.get(group)

    def speaker(self, instance: str, incarnation: int, key: str) -> Member:
        """The live member that sent a message with this key. Raises UnknownInstance, Superseded, WrongKey."""
        member = self._by_id.get(instance)
        if member is not None and member.key != key:
            raise WrongKey(
                f"instance: {instance} has registered with another key than that of this connection",
                field="instance",
            )
        if member is not None and member.state is MemberState.LIVE and incarnation in member.superseded:
            raise _superseded(member)
        if member is None or member.state is not MemberState.LIVE or member.incarnation != incarnation:
            raise UnknownInstance(
                f"instance: {instance} (incarnation {incarnation}) is not registered; register first",
                field="instance",
            )
        return member

    # --- coming and going -----------------------------------------------------------------------------------

    def check(self, told: Register, key: str, now_s: float) -> Member | None:
        """Check whether an instance may register with this key; returns its live member if it has one, else None.

        Raises BadRequest, NotPermitted, WrongKey, Superseded, InstanceIdTaken or Refused.  A member whose
        key may not use its id any more is forgotten.
        """
        _check_register(told)
        known = self._by_id.get(told.instance)
        try:
            self._keys.check(told.instance, key, told.host)
        except NotPermitted:
            if known is not None and known.key == key and known.state is not MemberState.DEAD:
                self._forget(known, MemberEvent.REMOVED, "removed")
            raise
        if told.instance in self._orders.removed:
            raise NotPermitted(
                f"instance: {told.instance} was removed by an admin; let it in again with "
                f"`kvstrata ctl cluster allow {told.instance}`",
                field="instance",
            )
        if known is None or known.state is MemberState.DEAD:
            self._check_room()
            return None
        if known.incarnation == told.incarnation:
            return known if known.state is MemberState.LIVE else None
        self._check_takeover(known, told, now_s)
        return None

    def register(self, told: Register, key: str, now_s: float) -> Member:
        """Register an instance with this key, or update its registration; returns its member. Raises as `check`."""
        self.check(told, key, now_s)
        self._keys.learn(told.instance, key, self._by_id.__contains__)
        known = self._by_id.get(told.instance)
        if (
            known is not None
            and known.state is not MemberState.DEAD
            and known.incarnation == told.incarnation
        ):
            restored = known.state is MemberState.RESTORED
            known.told, known.key = told, key
            known.on_event(MemberEvent.REGISTERED)
            if restored:
                known.heard_s = now_s
                self._outbox.say("came_back", known, incarnation=str(known.incarnation))
            return known
        superseded: list[int] = []
        if known is not None:
            superseded = [one for one in (*known.superseded, known.incarnation) if one != told.incarnation]
            lived = known.state is MemberState.LIVE
            self._forget(known, MemberEvent.REPLACED, "superseded" if lived else "came_back")
        member = self._add(told, key, MemberEvent.REGISTERED, now_s)
        member.superseded.extend(superseded)
        self._outbox.say(
            "joined", member, host=told.host, incarnation=str(told.incarnation), version=told.version
        )
        return member

    def restore(self, told: Register, key: str, *, now_s: float) -> Member | None:
        """Add a member of the snapshot; returns None if its id is taken or has another key, or the cluster is full."""
        full = len(self._by_id) >= self._max_instances
        if told.instance in self._by_id or full or not self._keys.fits(told.instance, key):
            return None
        try:
            self._keys.learn(told.instance, key, self._by_id.__contains__)
        except Refused:
            return None
        return self._add(told, key, MemberEvent.READ, now_s)

    def goodbye(self, told: Goodbye, key: str) -> None:
        """Remove an instance that leaves; a repeated goodbye has no effect. Raises UnknownInstance, WrongKey."""
        member = self._by_id.get(told.instance)
        if member is None or told.incarnation in member.superseded:
            return
        self._forget(self.speaker(told.instance, told.incarnation, key), MemberEvent.LEFT, "left")

    def remove(self, member: Member) -> None:
        """Forget a member that an admin has removed."""
        self._forget(member, MemberEvent.REMOVED, "removed")

    def tick(self, now_s: float) -> None:
        """Find members that have died.

        Time in which this process was stopped does not count as members' silence, since their answers wait to be read.
        """
        stood_still_s = now_s - self._ticked_s
        self._ticked_s = now_s
        if stood_still_s > PAUSE_S:
            for member in self._by_id.values():
                member.heard_s = min(now_s, member.heard_s + stood_still_s)
            self._outbox.news.append(News("clock", "", {"stood_still_s": round(stood_still_s, 1)}))
            return
        for member in list(self._by_id.values()):
            if member.state is MemberState.DEAD:
                continue
            if now_s - member.heard_s < self._dead_after_s:
                continue
            if member.state is MemberState.RESTORED:
                self._forget(member, MemberEvent.SILENT, "did_not_come_back")
            else:
                self._die(member, now_s)

    # --- answers --------------------------------------------------------------------------------------------

    def heard(self, member: Member, condition: Condition | None, now_s: float) -> None:
        """Record a member's answer, and its condition if it has one."""
        if member.state is not MemberState.LIVE:
            return
        member.heard_s = max(member.heard_s, now_s)
        if condition is None:
            return
        was, member.condition = member.condition.state, condition
        if was != condition.state:
            self._outbox.say("state", member, was=was, now=condition.state)
        # An earlier command may not have reached it, or may have reached an earlier process of the instance.
        if condition.draining != member.draining and condition.state != "stopping":
            self._outbox.drained_otherwise.append(member)

    # --- inside ---------------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        if sum(one.state is not MemberState.DEAD for one in self._by_id.values()) >= self._max_instances:
            raise Refused(
                f"{self._max_instances} instances are registered, the maximum",
                retry_after_s=self._heartbeat_s,
            )

    def _check_takeover(self, known: Member, told: Register, now_s: float) -> None:
        """Raise Superseded or InstanceIdTaken unless this process may take over the id."""
        if told.incarnation in known.superseded:
            raise _superseded(known)
        if known.state is MemberState.LIVE and not (told.host and known.told.host == told.host):
            raise InstanceIdTaken(
                f"instance: {told.instance} is live on {known.told.host or 'another host'} (process "
                f"{known.told.pid}); give each instance its own name (--instance-id)",
                field="instance",
                retry_after_s=max(0.1, known.heard_s + self._dead_after_s - now_s),
            )

    def _add(self, told: Register, key: str, first: MemberEvent, now_s: float) -> Member:
        while self._next_group in self._by_group:
            self._next_group = (self._next_group + 1) % MAX_GROUP
        member = Member(self._next_group, told, key, first, now_s, self._orders)
        self._next_group = (self._next_group + 1) % MAX_GROUP
        self._by_id[told.instance] = member
        self._by_group[member.group] = member
        return member

    def _forget(self, member: Member, event: MemberEvent, kind: str) -> None:
        if member.state is not MemberState.DEAD:
            self._lose(member)
        member.on_event(event)
        del self._by_id[member.id]
        self._by_group.pop(member.group, None)
        self._outbox.say(kind, member)

    def _die(self, member: Member, now_s: float) -> None:
        self._lose(member)
        member.on_event(MemberEvent.SILENT)
        member.ended_s = now_s
        self._by_group.pop(member.group, None)
        self._outbox.say("died", member, silent_s=round(now_s - member.heard_s, 1))
        dead = sorted(
            (one for one in self._by_id.values() if one.state is MemberState.DEAD),
            key=lambda one: one.ended_s,
        )
        for old in dead[: max(0, len(dead) - MAX_DEAD)]:
            old.on_event(MemberEvent.CROWDED_OUT)
            del self._by_id[old.id]

    def _lose(self, member: Member) -> None:
        """Have the caller drop the member's placements, end its commands, and stop following it."""
        self._keys.seen(member.id)
        self._outbox.forgotten.append(member)


def _superseded(member: Member) -> KvstrataError:
    return Superseded(
        f"instance: another process has since registered as {member.id} (on {member.told.host or 'its host'}, "
        f"process {member.told.pid}); give each instance its own name (--instance-id)",
        field="instance",
    )


def _check_register(told: Register) -> None:
    if told.tiers[0] != "l1" or len(set(told.tiers)) != len(told.tiers):
        raise BadRequest(f"tiers: {told.tiers}: must begin with 'l1' and name each tier once", field="tiers")
    if unknown := told.media.keys() - set(told.tiers[1:]):
        raise BadRequest(f"media: {sorted(unknown)}: must be among tiers, and not l1", field="media")
    if not _ENDPOINT.fullmatch(told.control_endpoint):
        raise BadRequest(
            f"control_endpoint: {told.control_endpoint!r:.80}: must be tcp://host:port",
            field="control_endpoint",
        )
