"""Which of several controllers leads, by etcd: a lease for membership, a key for leadership, a token for every write.

    PREFIX/members/LEASE  what a controller is, as long as its lease lives
    PREFIX/leader         the member that leads, likewise
    PREFIX/cluster-id     a number that grows whenever etcd has lost what it knew
    PREFIX/orders/NAME    what admins have ordered (orders.py)
    PREFIX/orders-version written with each of them, so that one look tells whether they are others than before

Each *step* is one transaction, which reads all of this and writes the leader's key where there is none; each third step
then refreshes the lease.  The *token* of a leadership is the revision of etcd that created the key: each leadership has
a greater one than all before, as long as etcd keeps its data.  So the *cluster id* comes before it: the leader writes a
greater one when it finds none, when etcd's revision has gone back, or when an instance has seen a greater token.

Invariants
1. `token` is 0 unless etcd surely keeps the lease: the time to live is counted from before the refresh was sent.  A
   process that was stopped and goes on later finds its time over before it can believe that it leads.
2. The lease is refreshed only by a step whose transaction succeeded.  A controller that has lost its rights, while etcd
   would still keep its lease, is no member and no leader after one time to live.
3. Orders are written by the leader, in transactions that demand that the key of the leadership is still the one that
   `token` names, and read by all.  An etcd without any gets those that the leader knows.
4. Instances keep the greatest (cluster id, token) that they have seen and refuse commands with a smaller one.  So what
   a leader sent just before it was stopped, and what arrives late, does nothing either.
5. With etcd away nobody leads after one time to live; reads go on, and the next leader is found when it is back.
6. A leader's key whose lease is not that of a living member is nobody's: it is removed, unless it was written again
   meanwhile, and the next step elects.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.config.model import EtcdSettings
from kvstrata.controller import etcd
from kvstrata.controller.etcd import Etcd, EtcdFailed
from kvstrata.controller.orders import Orders
from kvstrata.errors import ConfigError, NotLeading
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.cluster_wire import MAX_CLUSTER_ID
from kvstrata.rpc.zmq_server import resolve

STEPS_PER_TTL = 9
"""Looks for a leader in one time to live; each third one refreshes the lease."""
REFRESH_STEPS = 3
MAX_WRITES = 100
"""Orders in one transaction; etcd takes 128 operations."""
CALLS_PER_TTL = 6
"""A call that takes more than this part of the time to live has failed; a login may take longer."""


class Member(msgspec.Struct, frozen=True):
    """What one controller tells the others."""

    name: str
    http_url: str
    """Where its API and dashboard are."""


class Leader(NamedTuple):
    """The member that leads, and its token."""

    member: Member
    token: int


class Election:
    """This controller's part in the election.  `changed` is called on the loop when `leader` or `token` changed."""

    def __init__(
        self, settings: EtcdSettings, me: Member, clock: Clock, changed: Callable[[], None], orders: Orders
    ) -> None:
        """`orders` is kept as etcd has it. Raises ConfigError for endpoints or credentials that cannot be used."""
        etcd.check_credentials(settings)
        self._settings = settings
        self._me = me
        self._clock = clock
        self._changed = changed
        self._orders = orders
        self._orders_version = 0
        """Revision of etcd at which the orders that are loaded were written last."""
        self._orders_revision = 0
        """Revision of etcd that our orders are as new as."""
        self._log = EventLog("election")
        self._endpoints = [etcd.read_endpoint(endpoint) for endpoint in settings.endpoints]
        self._next_endpoint = 0
        self._connection: Etcd | None = None
        self._lease = 0
        self._lease_ends_s = float("-inf")
        """Until then etcd keeps the lease, unless somebody revokes it."""
        self._sure_until_s = float("-inf")
        """The same, as of the last step that succeeded as a whole."""
        self._token = 0
        self._told: tuple[Leader | None, int] = (None, 0)
        self._members: list[Member] = []
        self._leader: Leader | None = None
        self._leader_seen_s = clock.monotonic_s()
        self._revision = 0
        """Of etcd, when it answered last."""
        self._least_id = 1
        """The cluster id must not be less, once this controller leads."""
        self.cluster_id = 0
        """As last seen; not 0 while this controller leads."""
        self.problem = ""
        """Why the last step failed; empty: it did not."""
        self.failures = 0
        """Steps that failed."""

    @property
    def token(self) -> int:
        """Of this controller's leadership; 0 while it does not lead, or cannot be sure that it does."""
        return self._token if self._clock.monotonic_s() < self._sure_until_s else 0

    @property
    def leader(self) -> Leader | None:
        """As last seen; None while nobody leads or etcd does not answer."""
        return None if self._token and not self.token else self._leader

    @property
    def no_leader_s(self) -> float:
        """For how long this controller has known of no leader; 0 while it knows of one."""
        return 0.0 if self.leader is not None else max(0.0, self._clock.monotonic_s() - self._leader_seen_s)

    @property
    def members(self) -> list[Member]:
        """The controllers that etcd knows to live, by name, as last seen."""
        return list(self._members)

    async def run(self) -> None:
        """Take part until cancelled; etcd may come and go."""
        pause_s = self._settings.ttl_s / STEPS_PER_TTL
        step = 0
        while True:
            try:
                await self._step(refresh=step % REFRESH_STEPS == 0)
                step += 1
            except EtcdFailed as error:
                self._step_failed(error)
                step = 0
                if not error.refused:
                    await self._disconnect()
            except NotLeading:
                step = 0
            self._tell()
            await asyncio.sleep(pause_s)

    def outbid(self, cluster_id: int) -> None:
        """An instance obeys a leadership of this cluster id that is greater than ours: etcd has lost what it knew."""
        self._least_id = max(self._least_id, min(cluster_id + 1, MAX_CLUSTER_ID))

    async def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Write orders (None: delete). Raises NotLeading where this controller does not lead, and changes nothing then.

        It also raises NotLeading where etcd does not answer; what it has written then is loaded with the next step.
        """
        token = self.token
        if not token:
            raise NotLeading("this controller does not lead; ask the one that does")
        try:
            await self._write_orders(self._connected(), token, changes)
        except EtcdFailed as error:
            raise NotLeading(f"etcd does not answer: {error}") from None

    async def close(self) -> None:
        """Leave: another controller may lead at once. Idempotent."""
        await self._give_up_lease()
        await self._disconnect()

    async def _step(self, *, refresh: bool) -> None:
        """Look who leads, or begin to; then refresh the lease, if that is due. Raises EtcdFailed."""
        if self._clock.monotonic_s() >= self._lease_ends_s:
            await self._give_up_lease()
        connection = self._connected()
        if not self._lease:
            asked_s = self._clock.monotonic_s()
            self._lease, ttl_s = await connection.grant(self._settings.ttl_s)
            self._lease_ends_s = asked_s + ttl_s
        key, members, me = self._key("leader"), self._key("members/"), msgspec.json.encode(self._me)
        mine = b"%s%x" % (members, self._lease)
        cluster_id_key, version_key = self._key("cluster-id"), self._key("orders-version")
        reads = [*map(etcd.read, (key, cluster_id_key, version_key)), etcd.read_all(members)]
        answer = await connection.transact(
            [etcd.created(key, 0)],
            [etcd.put(mine, me, self._lease), etcd.put(key, me, self._lease), *reads],
            reads,
        )
        if mine not in answer.rows:
            await connection.transact([], [etcd.put(mine, me, self._lease)])
        found, told_id = answer.rows.pop(key), answer.rows.pop(cluster_id_key, None)
        version = answer.rows.pop(version_key, None)
        if found.lease not in {self._lease, *(row.lease for row in answer.rows.values() if row.lease)}:
            await self._remove_leader(connection, key, found)
            return
        if answer.revision < self._revision:
            self.outbid(self.cluster_id)
            self._orders_version = self._orders_revision = 0
        self._revision = answer.revision
        cluster_id = await self._settled_cluster_id(connection, found, told_id)
        await self._take_orders(connection, version, found)
        if refresh:
            asked_s = self._clock.monotonic_s()
            ttl_s = await connection.keep_alive(self._lease)
            if not ttl_s:
                raise EtcdFailed("the lease has ended", refused=True, lease_lost=True)
            self._lease_ends_s = asked_s + ttl_s
        self._token = found.create_revision if found.lease == self._lease and cluster_id else 0
        self.cluster_id = cluster_id
        self._sure_until_s = self._lease_ends_s
        self._leader = Leader(_member(found.value), found.create_revision)
        self._members = sorted({_member(row.value) for row in answer.rows.values()}, key=lambda one: one.name)
        self.problem = ""

    async def _remove_leader(self, connection: Etcd, key: bytes, found: etcd.Row) -> None:
        """The key names nobody who lives; the next step elects."""
        self._leader, self._token = None, 0
        self.problem = f"{key.decode()} named no living controller: {_member(found.value).name}"
        self._log.warning("leader_key_removed", key=key.decode(), value=found.value.decode(errors="replace"),
                          lease=found.lease)  # fmt: skip
        await connection.transact([etcd.modified(key, found.mod_revision)], [etcd.delete(key)])

    async def _settled_cluster_id(self, connection: Etcd, leader: etcd.Row, told: etcd.Row | None) -> int:
        """The cluster id, made great enough where this controller leads; 0: it does not lead any more."""
        there = _number(told.value) if told is not None else 0
        if there < self.cluster_id:
            self.outbid(self.cluster_id)
        if leader.lease != self._lease or there >= self._least_id:
            return there
        fresh = max(self._least_id, self._clock.unix_ms())
        key = self._key("cluster-id")
        answer = await connection.transact(
            [
                *self._while_leading(leader.create_revision),
                etcd.modified(key, told.mod_revision if told else 0),
            ],
            [etcd.put(key, str(fresh).encode())],
        )
        if not answer.succeeded:
            return 0
        self._log.info("cluster_id", was=there, now=fresh)
        return fresh

    async def _take_orders(self, connection: Etcd, version: etcd.Row | None, leader: etcd.Row) -> None:
        """Load the orders where they are others than before; give ours to an etcd that has none."""
        if version is None:
            if leader.lease == self._lease:
                ours = self._orders.entries()
                await self._write_orders(connection, leader.create_revision, ours)
                self._log.info("orders_written", count=len(ours))
        elif version.mod_revision != self._orders_version:
            prefix = self._key("orders/")
            answer = await connection.transact([], [etcd.read_all(prefix)])
            if answer.revision >= self._orders_revision:
                self._orders_revision = answer.revision
                self._orders.load(
                    {
                        key.removeprefix(prefix).decode(errors="replace"): row.value
                        for key, row in answer.rows.items()
                    }
                )
            self._orders_version = version.mod_revision

    async def _write_orders(self, connection: Etcd, token: int, changes: Mapping[str, bytes | None]) -> None:
        """Some at a time. Raises NotLeading, EtcdFailed."""
        rows = list(changes.items())
        for at in range(0, max(1, len(rows)), MAX_WRITES):
            keys = [(self._key(f"orders/{name}"), value) for name, value in rows[at : at + MAX_WRITES]]
            writes = [etcd.delete(key) if value is None else etcd.put(key, value) for key, value in keys]
            if at + MAX_WRITES >= len(rows):
                writes.append(etcd.put(self._key("orders-version"), b"1"))
            answer = await connection.transact(self._while_leading(token), writes)
            if not answer.succeeded:
                raise NotLeading("this controller does not lead any more; ask the one that does")
            self._orders_revision = max(self._orders_revision, answer.revision)

    def _while_leading(self, token: int) -> list[Any]:
        """Comparisons that hold while this controller leads."""
        key = self._key("leader")
        return [etcd.created(key, token), etcd.owned(key, self._lease)]

    def _step_failed(self, error: EtcdFailed) -> None:
        self.problem = str(error)
        self.failures += 1
        self._log.repeated(logging.WARNING, "etcd", "etcd_failed", error=self.problem)
        if error.lease_lost:
            self._lease, self._lease_ends_s, self._sure_until_s = 0, float("-inf"), float("-inf")
        if not self.token:
            self._leader = None

    async def _give_up_lease(self) -> None:
        """End the lease, or leave it to its time to live."""
        lease, self._lease = self._lease, 0
        self._lease_ends_s = self._sure_until_s = float("-inf")
        if lease and self._connection is not None:
            try:
                await self._connection.revoke(lease)
            except EtcdFailed:
                pass

    def _connected(self) -> Etcd:
        if self._connection is None:
            endpoint = self._endpoints[self._next_endpoint % len(self._endpoints)]
            self._next_endpoint += 1
            self._connection = Etcd(endpoint, self._settings, self._settings.ttl_s / CALLS_PER_TTL)
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _key(self, name: str) -> bytes:
        return f"{self._settings.prefix}/{name}".encode()

    def _tell(self) -> None:
        now = (self.leader, self.token)
        if self.leader is not None:
            self._leader_seen_s = self._clock.monotonic_s()
        elif self.no_leader_s >= self._settings.ttl_s:
            self._log.repeated(
                logging.WARNING, "no_leader", "no_leader", for_s=round(self.no_leader_s), reason=self.problem
            )
        if now != self._told:
            self._told = now
            leader = now[0].member.name if now[0] else ""
            self._log.info("leadership", leader=leader, token=now[1], leads=bool(now[1]))
            self._changed()


def check(settings: EtcdSettings, *, insecure: bool) -> None:
    """Raises ConfigError for endpoints or credentials that cannot be used."""
    for text in settings.endpoints:
        endpoint = etcd.read_endpoint(text)
        address, _ = resolve(endpoint.host, "etcd.endpoints")
        if not endpoint.tls and not ipaddress.ip_address(address).is_loopback and not insecure:
            raise ConfigError(
                f"etcd.endpoints: {text}: is on another machine, and what goes there is not encrypted; write "
                f"https://{text.removeprefix('http://')} if that etcd speaks TLS, or allow it with --insecure",
                field="etcd.endpoints",
            )
    etcd.check_credentials(settings)


def _number(value: bytes) -> int:
    """A cluster id; 0 for what is none."""
    return int(value) if value.isdigit() and len(value) < 20 and int(value) <= MAX_CLUSTER_ID else 0


def _member(value: bytes) -> Member:
    """What somebody wrote; a name for what is none of ours."""
    try:
        return msgspec.json.decode(value, type=Member)
    except msgspec.MsgspecError:
        return Member(json.dumps(value.decode(errors="replace"))[:80], "")
