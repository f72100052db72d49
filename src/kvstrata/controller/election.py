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
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.config.model import EtcdSettings
from kvstrata.config.private_file import read_private_file
from kvstrata.errors import ConfigError, NotLeading
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.zmq_server import resolve

if TYPE_CHECKING:
    import aetcd

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
        """Raises ConfigError for an endpoint or password file that cannot be used, ImportError without the library."""
        import aetcd

        self._make_client = aetcd.Client
        self._failures = (aetcd.exceptions.ClientError, OSError, TimeoutError)
        self._settings = settings
        self._me = me
        self._clock = clock
        self._changed = changed
        self._log = EventLog("election")
        self._endpoints = [read_endpoint(endpoint) for endpoint in settings.endpoints]
        self._password = _password(settings)
        self._next_endpoint = 0
        self._client: aetcd.Client | None = None
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
            except self._failures as error:
                self._log.repeated(
                    logging.WARNING, "etcd", "etcd_failed", error=str(error) or type(error).__name__
                )
                self.leader = None
                step = 0
                await self._disconnect()
            self._tell()
            await asyncio.sleep(pause_s)

    async def write(self, key: str, value: bytes) -> None:
        """Put PREFIX/KEY. Raises NotLeading, and changes nothing, unless this controller leads at that moment."""
        if not await self._transact(lambda client: [client.transactions.put(self._key(key), value)]):
            raise NotLeading("this controller does not lead; ask the one that does")

    async def read(self, key: str) -> bytes | None:
        """The value of PREFIX/KEY. Raises NotLeading where etcd does not answer."""
        try:
            found = await self._call(self._connected().get(self._key(key)))
        except self._failures as error:
            raise NotLeading(f"etcd does not answer: {error}") from None
        return None if found is None else bytes(found.value)

    async def close(self) -> None:
        """Leave: another controller may lead at once. Idempotent."""
        lease, self._lease, self._lease_until_s = self._lease, 0, float("-inf")
        if lease and self._client is not None:
            try:
                await self._call(self._client.revoke_lease(lease))
            except self._failures:
                pass  # it ends by its time to live
        await self._disconnect()

    async def _step(self, *, refresh: bool) -> None:
        client = self._connected()
        if refresh or not self._lease:
            await self._refresh(client)
        transactions = client.transactions
        key, me = self._key("leader"), msgspec.json.encode(self._me)
        won, answers = await self._call(
            client.transaction(
                compare=[transactions.create(key) == 0],
                success=[transactions.put(key, me, lease=self._lease), transactions.get(key)],
                failure=[transactions.get(key)],
            )
        )
        (_, found), *_ = answers[-1]
        self._token = found.create_revision if won or found.lease == self._lease else 0
        self.leader = Leader(_member(found.value), found.create_revision)
        if refresh:
            rows = await self._call(client.get_prefix(self._key("members/")))
            self._members = sorted((_member(row.value) for row in rows), key=lambda member: member.name)

    async def _refresh(self, client: aetcd.Client) -> None:
        """Keep the lease, or take one: counted from before it was asked for."""
        asked_s = self._clock.monotonic_s()
        if self._lease:
            kept = await self._call(client.refresh_lease(self._lease))
            if kept is not None and kept.TTL > 0:
                self._lease_until_s = asked_s + kept.TTL
                return
            self._lease, self._lease_until_s, self._token = 0, float("-inf"), 0
        asked_s = self._clock.monotonic_s()
        lease = await self._call(client.lease(self._settings.ttl_s))
        await self._call(
            client.put(self._key(f"members/{self._me.name}"), msgspec.json.encode(self._me), lease.id)
        )
        self._lease, self._lease_until_s = lease.id, asked_s + lease.ttl

    async def _transact(self, operations: Callable[[aetcd.Client], Sequence[Any]]) -> bool:
        token = self.token
        if not token:
            return False
        client = self._connected()
        try:
            done, _ = await self._call(
                client.transaction(
                    compare=[client.transactions.create(self._key("leader")) == token],
                    success=operations(client),
                    failure=[],
                )
            )
        except self._failures as error:
            raise NotLeading(f"etcd does not answer: {error}") from None
        return bool(done)

    async def _call(self, operation: Any) -> Any:
        try:
            async with asyncio.timeout(self._settings.ttl_s / CALLS_PER_TTL):
                return await operation
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC's word for it: another call found etcd away, and closed the connection of both.
            raise ConnectionError("the connection was closed") from None

    def _connected(self) -> aetcd.Client:
        if self._client is None:
            host, port = self._endpoints[self._next_endpoint % len(self._endpoints)]
            self._next_endpoint += 1
            self._client = self._make_client(
                host, port, self._settings.user or None, self._password, timeout=self._settings.ttl_s
            )
        return self._client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                await self._call(client.close())
            except self._failures:
                pass

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
    for endpoint in settings.endpoints:
        host, _ = read_endpoint(endpoint)
        address, _ = resolve(host, "etcd.endpoints")
        if not ipaddress.ip_address(address).is_loopback and not insecure:
            raise ConfigError(
                f"etcd.endpoints: {endpoint}: is on another machine, and what goes there is not encrypted; use an "
                "etcd proxy on this host, or allow it with --insecure",
                field="etcd.endpoints",
            )
    _password(settings)


def _password(settings: EtcdSettings) -> str | None:
    file = settings.password_file
    password = read_private_file(file, "etcd.password_file").strip() if file else None
    if bool(settings.user) != bool(password):
        raise ConfigError(
            "etcd: user and password_file belong together; give both or none", field="etcd.user"
        )
    return password


def read_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT` or `http://HOST:PORT`. Raises ConfigError."""
    field = "etcd.endpoints"
    if endpoint.startswith("https://"):
        raise ConfigError(
            f"{field}: {endpoint!r}: the client library speaks no TLS; use a proxy of etcd on this host "
            "(`etcd grpc-proxy`) and http://",
            field=field,
        )
    host, colon, port = endpoint.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{field}: {endpoint!r}: write HOST:PORT, for example 127.0.0.1:2379", field=field)
    return host.strip("[]"), int(port)


def _member(value: bytes) -> Member:
    """What somebody wrote; a name for what is none of ours."""
    try:
        return msgspec.json.decode(value, type=Member)
    except msgspec.MsgspecError:
        return Member(json.dumps(value.decode(errors="replace"))[:80], "")
