"""Which of several controllers leads, by etcd: a lease for membership, a key for leadership, a token for every write.

    PREFIX/members/ID    what a controller is, as long as its lease lives
    PREFIX/leader        the member that leads, likewise

A controller that finds no leader writes the key in one transaction that demands its absence; the same transaction tells
it who leads otherwise.  The *token* of a leadership is the revision of etcd that created the key: each leadership has a
greater one than all before.

Invariants
1. `token` is 0 unless etcd surely keeps the lease: the time to live is counted from before the refresh was sent.  A
   process that was stopped and goes on later finds its time over before it can believe that it leads.
2. `write` changes nothing unless the key of the leadership is still the one that `token` names.
3. Instances keep the greatest token that they have seen and refuse commands with a smaller one.  So what a leader sent
   just before it was stopped, and what arrives late, does nothing either.
4. With etcd away nobody leads after one time to live; reads go on, and the next leader is found when it is back.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.config.model import EtcdSettings
from kvstrata.controller import etcd
from kvstrata.controller.etcd import Etcd, EtcdFailed
from kvstrata.errors import ConfigError, NotLeading
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.zmq_server import resolve

STEPS_PER_TTL = 9
"""Looks for a leader in one time to live; each third one refreshes the lease."""
REFRESH_STEPS = 3
CALLS_PER_TTL = 6
"""A call that takes more than this part of the time to live has failed."""


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

    def __init__(self, settings: EtcdSettings, me: Member, clock: Clock, changed: Callable[[], None]) -> None:
        """Raises ConfigError for endpoints or credentials that cannot be used."""
        etcd.check_credentials(settings)
        self._settings = settings
        self._me = me
        self._clock = clock
        self._changed = changed
        self._log = EventLog("election")
        self._endpoints = [etcd.read_endpoint(endpoint) for endpoint in settings.endpoints]
        self._next_endpoint = 0
        self._connection: Etcd | None = None
        self._lease = 0
        self._lease_until_s = float("-inf")
        self._token = 0
        self._told: tuple[Leader | None, int] = (None, 0)
        self._members: list[Member] = []
        self.leader: Leader | None = None
        """As last seen; None while nobody leads or etcd does not answer."""

    @property
    def token(self) -> int:
        """Of this controller's leadership; 0 while it does not lead, or cannot be sure that it does."""
        return self._token if self._clock.monotonic_s() < self._lease_until_s else 0

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
                self._log.repeated(logging.WARNING, "etcd", "etcd_failed", error=str(error))
                self.leader = None
                step = 0
                await self._disconnect()
            self._tell()
            await asyncio.sleep(pause_s)

    async def write(self, key: str, value: bytes) -> None:
        """Put PREFIX/KEY. Raises NotLeading, and changes nothing, unless this controller leads at that moment."""
        if not await self._transact([etcd.put(self._key(key), value)]):
            raise NotLeading("this controller does not lead; ask the one that does")

    async def read(self, key: str) -> bytes | None:
        """The value of PREFIX/KEY. Raises NotLeading where etcd does not answer."""
        try:
            answer = await self._connected().transact([], [etcd.read(self._key(key))])
        except EtcdFailed as error:
            raise NotLeading(f"etcd does not answer: {error}") from None
        found = answer.rows.get(self._key(key))
        return None if found is None else found.value

    async def close(self) -> None:
        """Leave: another controller may lead at once. Idempotent."""
        lease, self._lease, self._lease_until_s = self._lease, 0, float("-inf")
        if lease and self._connection is not None:
            try:
                await self._connection.revoke(lease)
            except EtcdFailed:
                pass  # it ends by its time to live
        await self._disconnect()

    async def _step(self, *, refresh: bool) -> None:
        connection = self._connected()
        if refresh or not self._lease:
            await self._refresh(connection)
        key, me = self._key("leader"), msgspec.json.encode(self._me)
        answer = await connection.transact(
            [etcd.created(key, 0)],
            [etcd.put(key, me, self._lease), etcd.read(key)],
            [etcd.read(key)],
        )
        found = answer.rows[key]
        self._token = found.create_revision if found.lease == self._lease else 0
        self.leader = Leader(_member(found.value), found.create_revision)
        if refresh:
            members = await connection.transact([], [etcd.read_all(self._key("members/"))])
            self._members = sorted(
                (_member(row.value) for row in members.rows.values()), key=lambda member: member.name
            )

    async def _refresh(self, connection: Etcd) -> None:
        """Keep the lease, or take one: counted from before it was asked for."""
        asked_s = self._clock.monotonic_s()
        if self._lease:
            ttl_s = await connection.keep_alive(self._lease)
            if ttl_s:
                self._lease_until_s = asked_s + ttl_s
                return
            self._lease, self._lease_until_s, self._token = 0, float("-inf"), 0
        asked_s = self._clock.monotonic_s()
        lease, ttl_s = await connection.grant(self._settings.ttl_s)
        key = self._key(f"members/{self._me.name}")
        await connection.transact([], [etcd.put(key, msgspec.json.encode(self._me), lease)])
        self._lease, self._lease_until_s = lease, asked_s + ttl_s

    async def _transact(self, operations: Sequence[Any]) -> bool:
        token = self.token
        if not token:
            return False
        try:
            answer = await self._connected().transact([etcd.created(self._key("leader"), token)], operations)
        except EtcdFailed as error:
            raise NotLeading(f"etcd does not answer: {error}") from None
        return answer.succeeded

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
        if now != self._told:
            self._told = now
            leader = self.leader.member.name if self.leader else ""
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


def _member(value: bytes) -> Member:
    """What somebody wrote; a name for what is none of ours."""
    try:
        return msgspec.json.decode(value, type=Member)
    except msgspec.MsgspecError:
        return Member(json.dumps(value.decode(errors="replace"))[:80], "")
