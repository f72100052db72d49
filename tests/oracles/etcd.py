"""An etcd in memory on the running loop's time; `EtcdInMemory.connect` makes what `kvstrata.controller.etcd.Etcd` is.

It keeps its promises to the letter and no more: a lease ends exactly after its time to live, an answer may be late or
lost, and a request may be carried out long after its sender has given up, but not by another process than the one that
it was sent to.  tests/integration/controller/test_etcd.py compares its answers with those of a real etcd.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstrata.config.controller_model import EtcdSettings
from kvstrata.controller.etcd import Answer, Endpoint, EtcdFailed, Row

MIN_TTL_S = 2
"""etcd grants no shorter lease."""
LEASE_NOT_FOUND = "requested lease not found"


@dataclass
class Lease:
    ttl_s: int
    ends_s: float = 0.0


@dataclass
class Data:
    """What etcd keeps on disk."""

    revision: int = 1
    rows: dict[bytes, Row] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)


class EtcdInMemory:
    """One server. Clients are told apart by the endpoint under which they know it."""

    def __init__(self) -> None:
        self.data = Data()
        self.is_away = False
        """No process listens."""
        self.kills = 0
        """A request that travels when the process is killed ends with its connection."""
        self.requests_lost: set[str] = set()
        """Endpoints whose requests do not arrive."""
        self.answers_lost: set[str] = set()
        self.denied: set[str] = set()
        """Endpoints whose clients have no rights on any key."""
        self.delay_s: Callable[[], float] = lambda: 0.001
        """How long the next request or answer travels."""
        self.frozen: list[Callable[[], None]] | None = None
        """While the server is stopped: the requests that have arrived."""
        self._next_lease = 1

    def connect(self, endpoint: Endpoint, settings: EtcdSettings, call_s: float) -> Connection:
        return Connection(self, endpoint.target, call_s)

    def freeze(self) -> None:
        """Stop the server."""
        self.frozen = self.frozen or []

    def thaw(self) -> None:
        """Let the server go on, with the requests that have arrived meanwhile."""
        arrived, self.frozen = self.frozen or (), None
        self._end_leases()
        for carry_out in arrived:
            carry_out()

    def kill(self) -> None:
        """End the process, and with it what it had not carried out."""
        self.is_away, self.frozen = True, None
        self.kills += 1

    def start(self, data: Data | None = None) -> None:
        """Start it again, with its data or with these; leases begin anew."""
        self.is_away, self.frozen = False, None
        self.data = copy.deepcopy(data or self.data)
        for lease in self.data.leases.values():
            self._begin(lease)

    def transact(
        self, client: str, compare: Sequence[Any], success: Sequence[Any], failure: Sequence[Any]
    ) -> Answer:
        """Carry out a transaction. Raises EtcdFailed."""
        if client in self.denied:
            raise EtcdFailed("permission denied", refused=True)
        succeeded = all(self._holds(one) for one in compare)
        operations = [(one.WhichOneof("request"), one) for one in (success if succeeded else failure)]
        for kind, one in operations:
            if kind == "request_put" and one.request_put.lease not in {0, *self.data.leases}:
                raise EtcdFailed(LEASE_NOT_FOUND, refused=True, lease_lost=True)
        found: dict[bytes, Row] = {}
        now, rows = self.data.revision + 1, self.data.rows
        for kind, one in operations:
            asked = getattr(one, kind)
            if kind == "request_put":
                before = rows.get(asked.key)
                rows[asked.key] = Row(
                    asked.value, before.create_revision if before else now, now, asked.lease
                )
                self.data.revision = now
            elif kind == "request_delete_range":
                if rows.pop(asked.key, None) is not None:
                    self.data.revision = now
            else:
                end = asked.range_end or asked.key + b"\0"
                found |= {key: row for key, row in sorted(rows.items()) if asked.key <= key < end}
        return Answer(succeeded, self.data.revision, found)

    def _holds(self, compare: Any) -> bool:
        row = self.data.rows.get(compare.key, Row(b"", 0, 0, 0))
        name = compare.WhichOneof("target_union")
        return bool({"lease": row.lease}.get(name, getattr(row, name, 0)) == getattr(compare, name))

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """Make a lease."""
        self._next_lease += 1
        self.data.leases[self._next_lease] = lease = Lease(max(ttl_s, MIN_TTL_S))
        self._begin(lease)
        return self._next_lease, lease.ttl_s

    def keep_alive(self, lease: int) -> int:
        kept = self.data.leases.get(lease)
        if kept is None:
            return 0
        self._begin(kept)
        return kept.ttl_s

    def revoke(self, lease: int) -> None:
        """End a lease. Raises EtcdFailed."""
        if self.data.leases.pop(lease, None) is None:
            raise EtcdFailed(LEASE_NOT_FOUND, refused=True, lease_lost=True)
        gone = [key for key, row in self.data.rows.items() if row.lease == lease]
        self.data.revision += bool(gone)
        for key in gone:
            del self.data.rows[key]

    def _begin(self, lease: Lease) -> None:
        lease.ends_s = _now_s() + lease.ttl_s
        asyncio.get_running_loop().call_at(lease.ends_s, self._end_leases)

    def _end_leases(self) -> None:
        """End the leases whose time is over."""
        if self.is_away or self.frozen is not None:
            return
        for lease in [lease for lease, kept in self.data.leases.items() if kept.ends_s <= _now_s()]:
            self.revoke(lease)


class Connection:
    """A client's connection: requests and answers travel for a while, or for ever."""

    def __init__(self, server: EtcdInMemory, client: str, call_s: float) -> None:
        self._server, self._client, self._call_s = server, client, call_s
        self._waiting: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def transact(
        self, compare: Sequence[Any], success: Sequence[Any], failure: Sequence[Any] = ()
    ) -> Answer:
        answer: Answer = await self._ask(
            lambda: self._server.transact(self._client, compare, success, failure)
        )
        return answer

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        lease: tuple[int, int] = await self._ask(lambda: self._server.grant(ttl_s))
        return lease

    async def keep_alive(self, lease: int) -> int:
        return int(await self._ask(lambda: self._server.keep_alive(lease)))

    async def revoke(self, lease: int) -> None:
        await self._ask(lambda: self._server.revoke(lease))

    async def close(self) -> None:
        self._closed = True
        for answer in self._waiting:
            _settle(answer, None, EtcdFailed("the connection was closed"))

    async def _ask(self, operation: Callable[[], Any]) -> Any:
        if self._closed:
            raise EtcdFailed("the connection was closed")
        loop, server, kills = asyncio.get_running_loop(), self._server, self._server.kills
        answer: asyncio.Future[Any] = loop.create_future()

        def arrives() -> None:
            if server.is_away or server.kills != kills:
                _settle(answer, None, EtcdFailed("failed to connect"))
            elif self._client in server.requests_lost:
                pass
            elif server.frozen is not None:
                server.frozen.append(carry_out)
            else:
                carry_out()

        def carry_out() -> None:
            result, error = None, None
            try:
                result = operation()
            except EtcdFailed as refusal:
                error = refusal
            if self._client not in server.answers_lost:
                loop.call_later(server.delay_s(), _settle, answer, result, error)

        loop.call_later(server.delay_s(), arrives)
        self._waiting.add(answer)
        try:
            async with asyncio.timeout(self._call_s):
                return await answer
        except TimeoutError:
            raise EtcdFailed(f"{self._client} did not answer in time") from None
        finally:
            self._waiting.discard(answer)


def _settle(answer: asyncio.Future[Any], result: Any, error: EtcdFailed | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
