"""Elects the leader among several controllers, with keys and leases in etcd.

    PREFIX/members/LEASE  a controller that takes part, as long as its lease lives
    PREFIX/leader         the controller that leads, as long as its lease lives
    PREFIX/cluster-id     a number that grows whenever etcd has lost its data
    PREFIX/orders/NAME    an order of an admin (orders.py)
    PREFIX/orders-version a new random word with each order, so that one read shows whether any order has changed

Each *step* is one transaction, which reads all of these, and writes the leader's key if it is absent; every third step
then refreshes the lease.  The *token* of a leadership is the revision of etcd that created the leader's key, so tokens
grow from one leadership to the next as long as etcd keeps its data.  For the case that etcd loses its data, the
*cluster id* is compared before the token: the leader writes a greater cluster id if the key is absent, if etcd's
revision has gone back, or if an instance has seen a greater token.

Invariants
1. `token` is 0 unless etcd is certain to keep the lease: the time to live is counted from before the refresh was sent.
   A process that was stopped and continues later finds its lease expired before it can believe that it leads.
2. The lease is refreshed only after a transaction that succeeded.  So a controller that has lost its rights in etcd is
   neither member nor leader after one time to live.
3. Only the leader writes orders, in transactions that require the leader's key to be the one that `token` names; all
   controllers read them.  If etcd has no orders, the leader writes the ones that it has.
4. Instances keep the greatest (cluster id, token) that they have seen, and refuse commands with a smaller pair.  So
   commands that a leader sent just before it was stopped, or that arrive late, have no effect.
5. While etcd is unreachable, no controller leads after one time to live; reads continue, and a leader is elected when
   etcd is back.
6. If the lease of the leader's key is not that of a living member, the key is removed, unless it was written again
   meanwhile, and the next step elects.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.config.controller_model import EtcdSettings
from kvstrata.controller import etcd
from kvstrata.controller.etcd import Etcd, EtcdFailed
from kvstrata.controller.orders import Orders
from kvstrata.errors import ConfigError, NotLeading
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience
from kvstrata.process.ports import resolve
from kvstrata.rpc.cluster_wire import MAX_CLUSTER_ID

STEPS_PER_TTL = 9
"""Steps in one time to live; every third step refreshes the lease."""
REFRESH_STEPS = 3
MAX_WRITES = 100
"""Most orders in one transaction; etcd accepts 128 operations."""
WRITE_TRIES = 3
"""How often orders are written before writes that were given up, and are carried out late, make the order fail."""
CALLS_PER_TTL = 6
"""A call may take the time to live divided by this; a login may take longer."""


class Candidate(msgspec.Struct, frozen=True):
    """A controller that takes part in the election, as it describes itself to the others."""

    name: str
    http_url: str
    """URL of its API and dashboard."""


class Leader(NamedTuple):
    """The controller that leads, and its token."""

    member: Candidate
    token: int


class Election:
    """This controller's part in the election."""

    def __init__(self, settings: EtcdSettings, me: Candidate, clock: Clock) -> None:
        """The controller takes part once `run` is called. Raises ConfigError for unusable endpoints or credentials."""
        etcd.check_credentials(settings)
        self._settings = settings
        self._me = me
        self._clock = clock
        self._orders_version = b""
        """PREFIX/orders-version of the loaded orders: a backup that is restored may have the same revision as what it
        replaces, and other orders."""
        self._orders_revision = 0
        """Revision of etcd up to which our orders are complete."""
        self._written_version = 0
        """Revision of etcd that last wrote PREFIX/orders-version, as far as this controller's writes know."""
        self._writing = asyncio.Lock()
        self._log = EventLog("election")
        self._endpoints = [etcd.read_endpoint(endpoint) for endpoint in settings.endpoints]
        self._next_endpoint = 0
        self._connection: Etcd | None = None
        self._lease = 0
        self._lease_ends_s = float("-inf")
        """Time until which etcd keeps the lease, unless it is revoked."""
        self._sure_until_s = float("-inf")
        """`_lease_ends_s` as of the last complete step."""
        self._token = 0
        self._told: tuple[Leader | None, int] = (None, 0)
        self._members: list[Candidate] = []
        self._leader: Leader | None = None
        self._leader_seen_s = clock.monotonic_s()
        self._revision = 0
        """The greatest revision of etcd in its answers; a later answer with a smaller one shows a loss."""
        self._least_id = 1
        """Least cluster id that this controller may lead with."""
        self.cluster_id = 0
        """The cluster id as last seen; not 0 while this controller leads."""
        self.problem = ""
        """Why the last step failed; empty if it succeeded."""
        self.failures = 0
        """Number of failed steps."""

    @property
    def token(self) -> int:
        """Token of this controller's leadership; 0 while it does not lead, or cannot be sure that it does."""
        return self._token if self._clock.monotonic_s() < self._sure_until_s else 0

    @property
    def leader(self) -> Leader | None:
        """The leader as last seen; None while none leads or etcd does not answer."""
        return None if self._token and not self.token else self._leader

    @property
    def no_leader_s(self) -> float:
        """Time since this controller last knew of a leader; 0 while it knows of one."""
        return 0.0 if self.leader is not None else max(0.0, self._clock.monotonic_s() - self._leader_seen_s)

    @property
    def members(self) -> list[Candidate]:
        """The controllers that live, by name, as last seen in etcd."""
        return list(self._members)

    async def run(self, orders: Orders, changed: Callable[[], None]) -> None:
        """Take part until cancelled; etcd may fail and come back.

        `orders` is kept equal to the orders in etcd.  `changed` is called when `leader` or `token` has changed.
        """
        pause_s = self._settings.ttl_s / STEPS_PER_TTL
        step = 0
        while True:
            try:
                await self._step(orders, refresh=step % REFRESH_STEPS == 0)
                step += 1
            except EtcdFailed as error:
                self._step_failed(error)
                step = 0
                if not error.refused:
                    await self._disconnect()
            except NotLeading:
                step = 0
            self._tell(changed)
            await asyncio.sleep(pause_s)

    def outbid(self, cluster_id: int) -> None:
        """Lead only with a cluster id above this one, which an instance has seen: etcd has lost its data."""
        self._least_id = max(self._least_id, min(cluster_id + 1, MAX_CLUSTER_ID))

    async def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Write orders (None: delete). Raises NotLeading if this controller does not lead, or etcd does not answer.

        If etcd does not answer, or more than MAX_WRITES orders were to be written, etcd may have written some of them
        nevertheless; the next step loads these.
        """
        token = self.token
        if not token:
            raise NotLeading("this controller is not the leader; ask the leader")
        try:
            await self._write_orders(self._connected(), token, changes)
        except EtcdFailed as error:
            raise NotLeading(f"etcd does not answer: {error}") from None

    async def close(self) -> None:
        """Leave the election, so that another controller may lead at once. Idempotent."""
        await self._give_up_lease()
        await self._disconnect()

    async def _step(self, orders: Orders, *, refresh: bool) -> None:
        """Find the leader, or begin to lead; then refresh the lease if `refresh`. Raises EtcdFailed."""
        if self._clock.monotonic_s() >= self._lease_ends_s:
            await self._give_up_lease()
        connection = self._connected()
        if not self._lease:
            asked_s = self._clock.monotonic_s()
            self._lease, ttl_s = await connection.grant(round(patience(self._settings.ttl_s)))
            self._lease_ends_s = asked_s + ttl_s
        key, members, me = self._key("leader"), self._key("members/"), msgspec.json.encode(self._me)
        mine = b"%s%x" % (members, self._lease)
        cluster_id_key, version_key = self._key("cluster-id"), self._key("orders-version")
        reads = [*map(etcd.read, (key, cluster_id_key, version_key)), etcd.read_all(members)]
        known_revision = self._revision
        answer = await connection.transact(
            [etcd.created(key, 0)],
            [etcd.put(mine, me, self._lease), etcd.put(key, me, self._lease), *reads],
            reads,
        )
        if mine not in answer.rows:
            await connection.transact([], [etcd.put(mine, me, self._lease)])
        if key not in answer.rows:
            raise EtcdFailed(f"the answer of etcd lacks {key.decode()}, which was just written")
        found, told_id = answer.rows.pop(key), answer.rows.pop(cluster_id_key, None)
        version = answer.rows.pop(version_key, None)
        if found.lease not in {self._lease, *(row.lease for row in answer.rows.values() if row.lease)}:
            await self._remove_leader(connection, key, found)
            return
        if answer.revision < known_revision:
            self.outbid(self.cluster_id)
            self._orders_version, self._orders_revision, self._revision = b"", 0, 0
        self._revision = max(self._revision, answer.revision)
        cluster_id = await self._settled_cluster_id(connection, found, told_id)
        if cluster_id != self.cluster_id:
            # etcd has lost its data, and may have reached the revisions from before again.
            self._orders_version, self._orders_revision = b"", 0
        await self._take_orders(connection, orders, version, found)
        if refresh:
            asked_s = self._clock.monotonic_s()
            ttl_s = await connection.keep_alive(self._lease)
            if not ttl_s:
                raise EtcdFailed("the lease has ended", refused=True, lease_lost=True)
            self._lease_ends_s = asked_s + ttl_s
        self._token = found.create_revision if found.lease == self._lease and cluster_id else 0
        self.cluster_id = cluster_id
        self._sure_until_s = self._lease_ends_s
        self._leader = Leader(_candidate(found.value), found.create_revision)
        self._members = sorted(
            {_candidate(row.value) for row in answer.rows.values()}, key=lambda one: one.name
        )
        self.problem = ""

    async def _remove_leader(self, connection: Etcd, key: bytes, found: etcd.Row) -> None:
        """Remove a leader's key that names no living controller; the next step elects."""
        self._leader, self._token = None, 0
        self.problem = f"{key.decode()} named no living controller: {_candidate(found.value).name}"
        self._log.warning("leader_key_removed", key=key.decode(), value=found.value.decode(errors="replace"),
                          lease=found.lease)  # fmt: skip
        await connection.transact([etcd.modified(key, found.mod_revision)], [etcd.delete(key)])

    async def _settled_cluster_id(self, connection: Etcd, leader: etcd.Row, told: etcd.Row | None) -> int:
        """The cluster id; a leader whose id is too small writes a greater one. 0: this controller lost the lead."""
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

    async def _take_orders(
        self, connection: Etcd, orders: Orders, version: etcd.Row | None, leader: etcd.Row
    ) -> None:
        """Load the orders if they have changed; if etcd has none and this controller leads, write ours."""
        if version is None:
            if leader.lease == self._lease:
                ours = orders.entries()
                await self._write_orders(connection, leader.create_revision, ours, first=True)
                self._log.info("orders_written", count=len(ours))
        elif version.value != self._orders_version:
            prefix = self._key("orders/")
            answer = await connection.transact([], [etcd.read_all(prefix)])
            self._revision = max(self._revision, answer.revision)
            if answer.revision >= self._orders_revision:
                self._orders_revision = answer.revision
                orders.load(
                    {
                        key.removeprefix(prefix).decode(errors="replace"): row.value
                        for key, row in answer.rows.items()
                    }
                )
            self._orders_version = version.value

    async def _write_orders(
        self, connection: Etcd, token: int, changes: Mapping[str, bytes | None], *, first: bool = False
    ) -> None:
        """Write orders, at most MAX_WRITES in one transaction; with `first` only while etcd has none.

        A write that was given up may be carried out late.  Each write therefore requires that no other one came after
        the write before it, and so never undoes a newer order.  Raises NotLeading, EtcdFailed.
        """
        leader_key, version_key = self._key("leader"), self._key("orders-version")
        rows = list(changes.items())
        async with self._writing:
            if first:
                self._written_version = 0
            for at in range(0, max(1, len(rows)), MAX_WRITES):
                keys = [(self._key(f"orders/{name}"), value) for name, value in rows[at : at + MAX_WRITES]]
                writes = [etcd.delete(key) if value is None else etcd.put(key, value) for key, value in keys]
                last = at + MAX_WRITES >= len(rows)
                if last:
                    writes.append(etcd.put(version_key, secrets.token_hex(8).encode()))
                for _ in range(WRITE_TRIES):
                    version = etcd.modified(version_key, self._written_version)
                    answer = await connection.transact(
                        [*self._while_leading(token), version],
                        writes,
                        [*map(etcd.read, (leader_key, version_key))],
                    )
                    self._revision = max(self._revision, answer.revision)
                    if answer.succeeded:
                        break
                    leader, found = answer.rows.get(leader_key), answer.rows.get(version_key)
                    if (
                        first
                        or leader is None
                        or (leader.create_revision, leader.lease) != (token, self._lease)
                    ):
                        raise NotLeading("this controller no longer leads; ask the leader")
                    self._written_version = found.mod_revision if found else 0
                else:
                    raise NotLeading("etcd is busy with earlier orders; try again")
                self._orders_revision = max(self._orders_revision, answer.revision)
                if last:
                    self._written_version = answer.revision

    def _while_leading(self, token: int) -> list[Any]:
        """Comparisons that hold only while this controller leads with this token."""
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
        """Revoke the lease; if that fails, it ends by its time to live."""
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

    def _tell(self, changed: Callable[[], None]) -> None:
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
            changed()


def check(settings: EtcdSettings, *, insecure: bool) -> None:
    """Raise ConfigError for endpoints or credentials that cannot be used."""
    for text in settings.endpoints:
        endpoint = etcd.read_endpoint(text)
        address, _ = resolve(endpoint.host, "etcd.endpoints")
        if not endpoint.tls and not ipaddress.ip_address(address).is_loopback and not insecure:
            raise ConfigError(
                f"etcd.endpoints: {text}: is on another machine, and the connection is not encrypted; write "
                f"https://{text.removeprefix('http://')} if that etcd speaks TLS, or allow it with --insecure",
                field="etcd.endpoints",
            )
    etcd.check_credentials(settings)
    if settings.endpoints and not (settings.user or settings.cert_file or insecure):
        raise ConfigError(
            "etcd.user: is missing: anyone who can reach an etcd without users can remove instances and lead the "
            "cluster; set etcd.user and etcd.password_file, or a client certificate (etcd.cert_file), or allow it with "
            "--insecure",
            field="etcd.user",
        )


def _number(value: bytes) -> int:
    """The cluster id in a value; 0 if it is not a number."""
    return int(value) if value.isdigit() and len(value) < 20 and int(value) <= MAX_CLUSTER_ID else 0


def _candidate(value: bytes) -> Candidate:
    """The controller that wrote this value; an invalid value becomes its name."""
    try:
        return msgspec.json.decode(value, type=Candidate)
    except msgspec.MsgspecError:
        return Candidate(json.dumps(value.decode(errors="replace"))[:80], "")
