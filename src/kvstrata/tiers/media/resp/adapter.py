"""The `resp` adapter: records as values in Redis or Valkey, shared by all instances with the same prefix.

    <key_prefix><64 hex digits of the key>  ->  the record, byte for byte as it lies in L1

A batch is cut into pieces by server and size, which run concurrently in the lanes.  A piece is a pipeline over one
connection: values go straight from extents into the socket and back.  Only WINDOW_BYTES are under way at a time, so
that the server does not have to buffer many answers.

Invariants
1. Only keys of exactly this form are read, written or removed.
2. When a connection breaks, the items that are not answered yet fail; answers that have arrived remain valid.
3. A put sends no payload where a value of the same length exists.  It replaces a value of another length.
4. A value that is not a record of its key, or is longer than its extent, is read again and removed in one transaction,
   so that a good value that another client has put meanwhile stays.
5. The server evicts, and says when it is full; nothing here deletes records to make room.

STORED means that the server has the record in its memory.  Whether the record survives the server's end depends on how
the server is configured.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvstrata.errors import ConfigError, StorageError
from kvstrata.keys.batch import split
from kvstrata.native.core import CopyOutcome, verify_stored_record
from kvstrata.patience import patience
from kvstrata.text import one_line
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    Outcome,
    Presence,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.media.resp.connection import (
    LARGEST_NUMBER,
    MAX_VALUE_BYTES,
    Buffer,
    Link,
    LinkLost,
    Reply,
    ServerError,
    command,
)
from kvstrata.tiers.media.resp.pipeline import Answer, BadValue, Pipelines
from kvstrata.tiers.media.resp.replies import fields_of, number_in, reason_of
from kvstrata.tiers.media.resp.servers import Address, RespServers, Servers
from kvstrata.tiers.media.shared import medium_name
from kvstrata.tiers.reasons import FULL, MISMATCH, QUEUE_FULL, THROTTLED, TOO_LARGE
from kvstrata.tiers.work import Work
from kvstrata.types import GB, KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.tiers.media.resp.config import RespConfig

T = TypeVar("T")
log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Maximum payload bytes of one piece of a batch."""
SCAN_COUNT = 1000
DEADLINE_MS = 5_000
CLEAR_S = 120.0
"""Maximum time of a clear; a server may answer SCAN without end."""
ROOM_HOLDS_S = 0.5


class RespAdapter(StorageAdapter):
    """The `resp` adapter."""

    def __init__(self, config: RespConfig, servers: RespServers, *, name: str = "resp") -> None:
        """`config`: checked fields of an entry; `servers`: the servers that it names."""
        self.name = name
        self.config = config
        self.servers = servers
        self.capabilities = Capabilities(
            persistent=False,
            shared=True,
            medium=medium_name(
                "resp",
                config.key_prefix,
                servers.database,
                servers.master_name,
                hosts=map(str, servers.addresses),
            ),
            max_batch=64,
        )
        self.timeout_s = config.request_timeout or (config.deadline_ms or patience(DEADLINE_MS)) / 1000
        """Limit of one request."""
        self._ttl_ms = int(config.ttl_seconds * 1000)
        self._capacity_bytes = int(config.max_capacity_gb * GB)
        """Memory of all servers together above which puts are refused; 0: no limit but the servers' own."""
        self._prefix = config.key_prefix.encode()
        self._servers = Servers(name, servers)
        self._pipelines = Pipelines(
            self._servers, self._prefix, clustered=servers.cluster, timeout_s=self.timeout_s
        )
        self._lanes = Lanes(name, num_workers=config.num_workers, per_op_workers=config.per_op_workers)
        self._work = Work(name)
        self._room = (0.0, True)
        """Monotonic time until which the last answer of `_has_room` is reused, and that answer."""
        self._full = 0
        self._bad_values = 0
        self._refusal = ServerError("")
        """The servers' last error reply, until a put is stored again."""

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Check that every server answers and can be used. Raises StorageError, ConfigError."""
        try:
            await self._lanes.run(Lane.LOOKUP, self._servers.check)
        except (StorageError, ConfigError):
            await self._lanes.close()
            raise

    async def close(self) -> None:
        """Wait for the operations in flight, which their time limits end; close the connections. Idempotent."""
        await self._work.ended()
        await self._lanes.close()
        self._servers.close()

    def numbers(self) -> dict[str, int]:
        """Counters since the start."""
        return {
            "connections": self._servers.connections,
            "connections_lost": self._servers.lost,
            "full": self._full,
            "bad_values": self._bad_values,
            "redirections": self._pipelines.redirections,
        }

    def remarks(self) -> dict[str, str]:
        """The servers' last error reply, verbatim; empty when a later put was stored."""
        return {"refusal": one_line(f"{self._refusal.text:.200}")}

    # -- the contract, on the event loop -------------------------------------------------------------------

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """Ask for the STRLEN of each key."""
        found: dict[bytes, tuple[Presence, str]] = {}
        asked = split(keys)
        for part in await self._work.own(self._batch(Lane.LOOKUP, asked, self._find)):
            found.update(part)
        words = [found.get(key, (Presence.UNKNOWN, THROTTLED)) for key in asked]
        ask.reason = next((reason for _, reason in words if reason), "")
        return bytes([presence for presence, _ in words])

    async def put(self, items: Sequence[Item]) -> None:
        """SET the records that are absent."""
        full = Outcome.THROTTLED, QUEUE_FULL
        await self._work.own(self._batch(Lane.PUT, items, self._put, full))

    async def load(self, items: Sequence[Item]) -> None:
        """GET the values into the extents."""
        full = Outcome.FAILED, THROTTLED
        await self._work.own(self._batch(Lane.LOAD, items, self._load, full))

    async def delete(self, keys: bytes) -> int:
        """UNLINK."""
        return sum(await self._work.own(self._batch(Lane.DELETE, split(keys), self._unlink)))

    async def clear(self) -> int:
        """Remove the records under our prefix, which SCAN finds. Raises StorageError if a server does not answer."""
        return await self._work.own(self._lanes.run(Lane.DELETE, self._clear))

    async def usage(self) -> Usage:
        """The memory that the servers use, its limit, and all keys of the database, including those of other programs.

        Only reading all keys could show which are ours.
        """
        return await self._work.own(self._lanes.run(Lane.LOOKUP, self._usage))

    async def _batch(
        self,
        lane: Lane,
        asked: Sequence[Any],
        work: Callable[[Any], T],
        full: tuple[Outcome, str] = (Outcome.FAILED, THROTTLED),
    ) -> list[T]:
        """The results of `work` on pieces of a batch of keys or items. A piece that finds the lane full has none.

        Its items are settled as `full`.
        """
        pieces: list[list[Any]] = []
        filling: dict[Address | None, tuple[list[Any], int]] = {}
        clustered = self.servers.cluster
        for one in asked:
            key = one if isinstance(one, bytes) else one.key
            length = 0 if one is key else one.hold.length
            server = self._servers.known(self._pipelines.name_of(key)) if clustered else None
            piece, piece_bytes = filling.get(server, ([], 0))
            if not piece or piece_bytes + length > PIECE_BYTES:
                piece, piece_bytes = [], 0
                pieces.append(piece)
            piece.append(one)
            filling[server] = piece, piece_bytes + length
        waits = []
        for piece in pieces:
            wait = self._lanes.submit(lane, functools.partial(work, piece), beyond_limit=lane is Lane.DELETE)
            if wait is not None:
                waits.append(wait)
                continue
            for one in piece:
                if isinstance(one, Item):
                    one.settle(*full)
        return [await wait for wait in waits]

    # -- in the lanes' threads -----------------------------------------------------------------------------

    def _find(self, keys: list[bytes]) -> dict[bytes, tuple[Presence, str]]:
        return {key: self._found(answer) for key, answer in zip(keys, self._lengths(keys), strict=True)}

    def _found(self, answer: Answer) -> tuple[Presence, str]:
        if isinstance(answer, int):
            return (Presence.PRESENT if 0 < answer <= MAX_VALUE_BYTES else Presence.ABSENT), ""
        if isinstance(answer, LinkLost):
            return Presence.UNKNOWN, answer.reason
        assert not isinstance(answer, BadValue)
        if isinstance(answer, ServerError) and answer.code == "WRONGTYPE":
            return Presence.ABSENT, ""
        return Presence.UNKNOWN, self._refused(answer)

    def _lengths(self, keys: Sequence[bytes]) -> list[Answer]:
        return self._pipelines.exchange(keys, self._pipelines.about(b"STRLEN"))

    def _unlink(self, keys: list[bytes]) -> int:
        answers = self._pipelines.exchange(keys, self._pipelines.about(b"UNLINK"))
        for answer in answers:
            if isinstance(answer, ServerError):
                self._refused(answer)
        return sum([answer for answer in answers if isinstance(answer, int)])

    def _put(self, items: list[Item]) -> None:
        if not self._has_room():
            self._full += len(items)
            for item in items:
                item.settle(Outcome.THROTTLED, FULL)
            return
        # Of simultaneous puts of an absent key only the first stores; a value that is not our record is replaced.
        beaten = self._set([(item, length == 0) for item, length in self._lacking(items)])
        # Another server was faster, or the value is empty, which to STRLEN looks like an absent one.
        for item in self._set([(item, False) for item, _ in self._lacking(beaten)]):
            self._not_put(item, None)

    def _lacking(self, items: list[Item]) -> list[tuple[Item, Answer]]:
        """The items without a value of their length, with the length found; settles the others."""
        lacking: list[tuple[Item, Answer]] = []
        for item, length in zip(items, self._lengths([item.key for item in items]), strict=True):
            if item.hold.length > MAX_VALUE_BYTES:
                item.settle(Outcome.FAILED, TOO_LARGE)
            elif length == item.hold.length:
                item.settle(Outcome.EXISTS)
            elif isinstance(length, LinkLost) or (
                isinstance(length, ServerError) and length.code != "WRONGTYPE"
            ):
                self._not_put(item, length)
            else:
                lacking.append((item, length))
        return lacking

    def _set(self, items: Sequence[tuple[Item, bool]]) -> list[Item]:
        """SET these values, flagged ones only if absent. Returns those that were not absent; settles the others."""
        if not items:
            return []
        words = [b"PX", b"%d" % self._ttl_ms] if self._ttl_ms else []

        def write(i: int, name: bytes) -> Sequence[Buffer]:
            hold, only_new = items[i][0].hold, items[i][1]
            after = [*words, b"NX"] if only_new else words
            head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
                3 + len(after),
                len(name),
                name,
                hold.length,
            )
            return (
                head,
                hold.view(),
                b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in after),
            )

        answers = self._pipelines.exchange(
            [item.key for item, _ in items], write, [item.hold.length for item, _ in items]
        )
        beaten = []
        for (item, _), answer in zip(items, answers, strict=True):
            if answer is None:
                beaten.append(item)
            else:
                self._not_put(item, answer)
        return beaten

    def _not_put(self, item: Item, answer: Answer) -> None:
        """Settle a put whose SET, or the STRLEN before it, got this answer."""
        if answer == b"OK":
            self._refusal = ServerError("")
            item.settle(Outcome.STORED)
        elif isinstance(answer, LinkLost):
            item.settle(Outcome.FAILED, answer.reason)
        else:
            assert not isinstance(answer, BadValue)
            reason = self._refused(answer)
            self._full += reason == FULL
            item.settle(Outcome.THROTTLED if reason == FULL else Outcome.FAILED, reason)

    def _refused(self, reply: Reply) -> str:
        """The reason code for an error reply; the server's own words go to log and status."""
        if isinstance(reply, ServerError):
            before, self._refusal = self._refusal, reply
            if before.code != reply.code:
                log.warning("%s: the server answers: %s", self.name, one_line(f"{reply.text:.200}"))
        return reason_of(reply)

    def _load(self, items: list[Item]) -> None:
        answers = self._pipelines.exchange(
            [item.key for item in items],
            self._pipelines.about(b"GET"),
            [item.hold.length for item in items],
            lambda link, i: self._read(link, items[i]),
        )
        for item, answer in zip(items, answers, strict=True):
            self._loaded(item, answer)

    def _read(self, link: Link, item: Item) -> Answer:
        """The answer to GET: the length of a record that now lies verified in its extent, or any other answer."""
        length = link.value_length()
        if not isinstance(length, int):
            return BadValue() if isinstance(length, ServerError) and length.code == "WRONGTYPE" else length
        if length > item.hold.length:
            link.skip(length)
            return BadValue()
        with item.hold.view() as view:
            link.read_into(view[:length])
        verified = CopyOutcome(verify_stored_record(item.hold.address, length, item.key))
        return length if verified is CopyOutcome.OK else BadValue(verified)

    def _loaded(self, item: Item, answer: Answer) -> None:
        if isinstance(answer, BadValue) and answer.why is not CopyOutcome.MISMATCH:
            self._bad_values += 1
            self._unlink([item.key])
        match answer:
            case int():
                item.settle(Outcome.LOADED)
            case None:
                item.settle(Outcome.ABSENT)
            case BadValue(why=CopyOutcome.MISMATCH):
                item.settle(Outcome.FAILED, MISMATCH)
            case BadValue():
                item.settle(Outcome.CORRUPT)
            case LinkLost():
                item.settle(Outcome.FAILED, answer.reason)
            case _:
                item.settle(Outcome.FAILED, self._refused(answer))

    def _scan(self, most_s: float) -> Iterator[tuple[Address, list[bytes]]]:
        """The names of our records, in pages, each with its server. Raises LinkLost, also after `most_s`."""
        pattern = self._prefix + b"?" * (2 * KEY_BYTES)
        ours = re.compile(re.escape(self._prefix) + rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
        until_s = time.monotonic() + most_s
        for address in self._servers.masters():
            cursor, seen = b"0", set[bytes]()
            while cursor not in seen and time.monotonic() < until_s:
                seen.add(cursor)
                with self._servers.link(address, self._pipelines.deadline_s(0)) as link:
                    link.send([command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)])
                    reply = link.reply()
                match reply:
                    case [bytes() as cursor, list() as names]:
                        pass
                    case _:
                        raise LinkLost(reason_of(reply), f"SCAN is answered with {reply!r:.80}")
                yield address, [name for name in names if isinstance(name, bytes) and ours.fullmatch(name)]
            if cursor != b"0":
                why = f"did not end within {most_s:g} s" if cursor not in seen else "repeated a cursor"
                raise LinkLost("protocol", f"incomplete: SCAN of {address} {why}")

    def _clear(self) -> int:
        removed = 0
        try:
            for address, chosen in self._scan(CLEAR_S):
                with self._servers.link(address, self._pipelines.deadline_s(0)) as link:
                    link.send([command(b"UNLINK", name) for name in chosen])
                    replies = [link.reply() for _ in chosen]
                removed += replies.count(1)
                for reply in replies:
                    if isinstance(reply, ServerError):
                        raise LinkLost(
                            self._refused(reply), f"{address} answers UNLINK with {reply.text:.200}"
                        )
        except LinkLost as lost:
            raise StorageError(
                f"{self.name}: not cleared: {removed} records were removed, then: {lost}", field=self.name
            ) from None
        return removed

    def _has_room(self) -> bool:
        """Whether the servers use less than our own cap; the answer is reused for ROOM_HOLDS_S."""
        until_s, has_room = self._room
        if self._capacity_bytes and time.monotonic() >= until_s:
            has_room = self._usage().used_bytes < self._capacity_bytes
            self._room = time.monotonic() + ROOM_HOLDS_S, has_room
        return has_room

    def _usage(self) -> Usage:
        used_bytes = capacity_bytes = records = 0
        try:
            for address in self._servers.masters():
                with self._servers.link(address, self._pipelines.deadline_s(0)) as link:
                    link.send([command(b"INFO", b"memory"), command(b"DBSIZE")])
                    memory, keys = link.reply(), link.reply()
                if isinstance(memory, bytes) and isinstance(keys, int):
                    fields = fields_of(memory)
                    used_bytes += number_in(fields, "used_memory")
                    capacity_bytes += number_in(fields, "maxmemory")
                    records += max(0, keys)
        except LinkLost:
            return Usage(0, 0, 0)
        caps = [cap for cap in (min(capacity_bytes, LARGEST_NUMBER), self._capacity_bytes) if cap]
        return Usage(min(used_bytes, LARGEST_NUMBER), min(caps, default=0), min(records, LARGEST_NUMBER))
