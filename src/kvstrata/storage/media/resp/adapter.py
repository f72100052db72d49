"""The `resp` adapter: records in Redis or Valkey, one value each, shared by all instances with the same prefix.

    <key_prefix><64 hex digits of the key>  ->  the record, byte for byte as it lies in L1

A batch is cut into pieces by server and size, which run side by side in the lanes.  A piece is a pipeline over one
connection: values go straight from extents into the socket and back, with few bytes on the way at a time, so that the
server does not pile up answers.

Invariants
1. Only keys of exactly our form are ever read, written or removed.
2. A connection that breaks fails what was not answered yet; what was answered stands.
3. A put of what is there with the same length sends no payload.  Anything else under the key is replaced.
4. A value that is no record of its key, of the length that was asked for, is read again and removed in one transaction,
   so what somebody else has put meanwhile stays.
5. The server evicts, and says when it is full; nothing here deletes to make room.

Not here: what the servers keep when they end.  STORED means that the server has the record in its memory.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvstrata.errors import StorageError
from kvstrata.native.copying import CopyOutcome, verify_stored_record
from kvstrata.storage.base import (
    HEAD_BYTES,
    AdapterContext,
    Capabilities,
    Found,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.storage.lanes import Lane, Lanes
from kvstrata.storage.media.resp.connection import Buffer, Link, LinkLost, Reply, ServerError, command
from kvstrata.storage.media.resp.servers import Address, RespServers, Servers, fields_of, reason_of
from kvstrata.types import KEY_BYTES

T = TypeVar("T")

PIECE_BYTES = 16 << 20
"""Payload of a batch that goes over one connection."""
WINDOW_BYTES = 2 << 20
"""Bytes that are asked for or sent and not answered yet, unless one record is larger."""
BYTES_PER_TIMEOUT = 64 << 20
"""The time limit counts once, and again for so many bytes."""
LARGEST_VALUE_BYTES = 512 << 20
"""Of the servers, as they are delivered (proto-max-bulk-len)."""
SHORT_BYTES = 200
"""About what a command without a payload takes, with its answer."""
MAX_TURNS = 4
"""Servers that are asked for one key, as each says that another one has it."""
SCAN_COUNT = 1000
ROOM_HOLDS_S = 0.5


class RespSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked settings."""

    servers: RespServers
    key_prefix: str = "kvstrata:"
    ttl_ms: int = 0
    """From each put; 0: for ever."""
    capacity_bytes: int = 0
    """Of all servers' memory in use, above which nothing is put; 0: only what the servers themselves refuse."""
    request_timeout_s: float = 5.0
    num_workers: int = 8
    per_op_workers: dict[Lane, int] = {}


class _Bad:
    """Read, and not what was asked for."""

    def __init__(self, why: CopyOutcome | None = None) -> None:
        self.why = why


Answer = Reply | LinkLost | _Bad


class RespAdapter(StorageAdapter):
    """See the module."""

    def __init__(self, settings: RespSettings, *, name: str = "resp") -> None:
        self.name = name
        self.capabilities = Capabilities(persistent=False, shared=True, max_batch=64, has_heads=True)
        self.settings = settings
        self._prefix = settings.key_prefix.encode()
        self._servers = Servers(name, settings.servers)
        self._lanes = Lanes(name, num_workers=settings.num_workers, per_op_workers=settings.per_op_workers)
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = True
        self._room = (0.0, True)
        """Until when it holds whether there is room below our own cap."""
        self._full = 0
        self._bad_values = 0
        self._redirections = 0

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Reach every server. Raises StorageError that says what to change."""
        try:
            await self._in_lane(Lane.LOOKUP, self._servers.check)
        except StorageError:
            await self._lanes.close()
            raise
        self._closed = False

    async def close(self) -> None:
        """Wait for what is in flight, which ends by its time limit; close the connections. Idempotent."""
        self._closed = True
        while self._running:
            await asyncio.wait(set(self._running))
        await self._lanes.close()
        self._servers.close()

    def numbers(self) -> dict[str, int]:
        """See STATUS_NUMBERS."""
        return {
            "connections": self._servers.connections,
            "connections_lost": self._servers.lost,
            "full": self._full,
            "bad_values": self._bad_values,
            "redirections": self._redirections,
        }

    # -- the contract, on the event loop -------------------------------------------------------------------

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """STRLEN of each."""
        bad = Found(Presence.UNKNOWN, 0, "closed" if self._closed else "bad_item")
        return await self._own(
            self._batch(Lane.LOOKUP, keys, self._find, bad, Found(Presence.UNKNOWN, 0, "throttled"))
        )

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """The first bytes of each."""
        return await self._own(self._batch(Lane.LOOKUP, keys, self._read_heads, b"", b""))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """SET of what is not there."""
        bad = PutOutcome(PutStatus.FAILED, "closed" if self._closed else "bad_item")
        return await self._own(
            self._batch(Lane.PUT, items, self._put, bad, PutOutcome(PutStatus.THROTTLED, "queue_full"))
        )

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """GET into the extents."""
        bad = LoadOutcome(LoadStatus.FAILED, "closed" if self._closed else "bad_item")
        return await self._own(
            self._batch(Lane.LOAD, items, self._load, bad, LoadOutcome(LoadStatus.FAILED, "throttled"))
        )

    async def delete(self, keys: Sequence[bytes]) -> int:
        """UNLINK."""
        return sum(await self._own(self._batch(Lane.DELETE, keys, self._unlink, 0, 0)))

    async def clear(self) -> int:
        """Remove what has our prefix, found by SCAN. Raises StorageError where a server does not answer."""
        if self._closed:
            return 0
        return await self._own(self._in_lane(Lane.DELETE, self._clear))

    async def usage(self) -> Usage:
        """Of the servers as a whole: their memory in use and its bound, and keys of everybody in the database.

        To count our own among them, all would have to be read.
        """
        if self._closed:
            return Usage(0, 0, 0)
        return await self._own(self._in_lane(Lane.LOOKUP, self._usage))

    async def _own(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _batch(
        self, lane: Lane, asked: Sequence[Any], work: Callable[[Any], list[T]], bad: T, refused: T
    ) -> list[T]:
        """Outcomes of `work` on the pieces of a batch; `bad` for what is no item, `refused` where a lane is full."""
        outcomes = [bad] * len(asked)
        pieces: list[list[int]] = []
        filling: dict[Address | None, tuple[list[int], int]] = {}
        clustered = self.settings.servers.cluster
        for i, one in enumerate(asked):
            key = one if isinstance(one, bytes) else one.key
            if self._closed or len(key) != KEY_BYTES:
                _drop(one)
                continue
            length = 0 if one is key else one.hold.length
            server = self._servers.known(self._name_of(key)) if clustered else None
            piece, piece_bytes = filling.get(server, ([], 0))
            if not piece or piece_bytes + length > PIECE_BYTES:
                piece, piece_bytes = [], 0
                pieces.append(piece)
            piece.append(i)
            filling[server] = piece, piece_bytes + length
        waits = []
        for places in pieces:
            items = [asked[i] for i in places]
            wait = self._lanes.submit(lane, functools.partial(work, items), beyond_limit=lane is Lane.DELETE)
            if wait is None:
                for one in items:
                    _drop(one)
                for i in places:
                    outcomes[i] = refused
            else:
                waits.append((places, wait))
        for places, wait in waits:
            for i, outcome in zip(places, await wait, strict=True):
                outcomes[i] = outcome
        return outcomes

    async def _in_lane(self, lane: Lane, work: Callable[[], T]) -> T:
        done = self._lanes.submit(lane, work, beyond_limit=True)
        assert done is not None, "refused work that has no limit"
        return await done

    # -- in the lanes' threads -----------------------------------------------------------------------------

    def _find(self, keys: list[bytes]) -> list[Found]:
        return [_found(answer) for answer in self._lengths(keys)]

    def _lengths(self, keys: Sequence[bytes]) -> list[Answer]:
        return self._exchange(keys, self._about(b"STRLEN"))

    def _read_heads(self, keys: list[bytes]) -> list[bytes]:
        last = b"%d" % (HEAD_BYTES - 1)
        answers = self._exchange(
            keys,
            self._about(b"GETRANGE", b"0", last),
            [HEAD_BYTES + SHORT_BYTES] * len(keys),
        )
        return [answer if isinstance(answer, bytes) else b"" for answer in answers]

    def _unlink(self, keys: list[bytes]) -> list[int]:
        answers = self._exchange(keys, self._about(b"UNLINK"))
        return [answer if isinstance(answer, int) else 0 for answer in answers]

    def _put(self, items: list[PutItem]) -> list[PutOutcome]:
        try:
            return self._put_piece(items)
        finally:
            for item in items:
                item.hold.drop()

    def _put_piece(self, items: list[PutItem]) -> list[PutOutcome]:
        if not self._has_room():
            self._full += len(items)
            return [PutOutcome(PutStatus.THROTTLED, "full")] * len(items)
        outcomes = [PutOutcome(PutStatus.EXISTS)] * len(items)
        there = self._lengths([item.key for item in items])
        todo = []
        for i, (item, length) in enumerate(zip(items, there, strict=True)):
            if item.hold.length > LARGEST_VALUE_BYTES:
                outcomes[i] = PutOutcome(PutStatus.FAILED, "too_large")
            elif isinstance(length, LinkLost) or (
                isinstance(length, ServerError) and length.code != "WRONGTYPE"
            ):
                outcomes[i] = self._not_put(length)
            elif length != item.hold.length:
                todo.append(i)
        # Where nothing is, only the first of several at the same time stores; what is no record of ours is replaced.
        answers = self._set([items[i] for i in todo], [there[i] == 0 for i in todo])
        for i, answer in zip(todo, answers, strict=True):
            outcomes[i] = self._not_put(answer) if answer is not None else outcomes[i]
        beaten = [i for i, answer in zip(todo, answers, strict=True) if answer is None]
        if beaten:
            # Somebody was faster, or an empty value lies there, which is as long as none.
            there = self._lengths([items[i].key for i in beaten])
            again = [i for i, length in zip(beaten, there, strict=True) if length != items[i].hold.length]
            for i, answer in zip(
                again, self._set([items[i] for i in again], [False] * len(again)), strict=True
            ):
                outcomes[i] = self._not_put(answer)
        return outcomes

    def _set(self, items: Sequence[PutItem], only_new: Sequence[bool]) -> list[Answer]:
        words = [b"PX", b"%d" % self.settings.ttl_ms] if self.settings.ttl_ms else []

        def write(i: int, name: bytes) -> Sequence[Buffer]:
            hold = items[i].hold
            after = [*words, b"NX"] if only_new[i] else words
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

        return self._exchange([item.key for item in items], write, [item.hold.length for item in items])

    def _not_put(self, answer: Answer) -> PutOutcome:
        """The outcome of an answer to SET, or to what was asked before it."""
        if answer == b"OK":
            return PutOutcome(PutStatus.STORED)
        if isinstance(answer, LinkLost):
            return PutOutcome(PutStatus.FAILED, answer.reason)
        assert not isinstance(answer, _Bad)
        reason = reason_of(answer)
        if reason == "full":
            self._full += 1
            return PutOutcome(PutStatus.THROTTLED, reason)
        return PutOutcome(PutStatus.FAILED, reason)

    def _load(self, items: list[LoadItem]) -> list[LoadOutcome]:
        try:
            answers = self._exchange(
                [item.key for item in items],
                self._about(b"GET"),
                [item.hold.length for item in items],
                lambda link, i: self._read(link, items[i]),
            )
            return [self._loaded(item, answer) for item, answer in zip(items, answers, strict=True)]
        finally:
            for item in items:
                item.hold.drop()

    def _read(self, link: Link, item: LoadItem) -> Answer:
        """The answer to GET: the length of a record that is in its extent and was verified, or what else came."""
        length = link.value_length()
        if not isinstance(length, int):
            return _Bad() if isinstance(length, ServerError) and length.code == "WRONGTYPE" else length
        if length != item.hold.length:
            link.skip(length)
            return _Bad()
        with item.hold.view() as view:
            link.read_into(view)
        verified = CopyOutcome(verify_stored_record(item.hold.address, length, item.key))
        return length if verified is CopyOutcome.OK else _Bad(verified)

    def _loaded(self, item: LoadItem, answer: Answer) -> LoadOutcome:
        if isinstance(answer, _Bad) and answer.why is not CopyOutcome.MISMATCH:
            self._bad_values += 1
            try:
                answer = self._remove_bad(item)
            except LinkLost as lost:
                answer = lost
        match answer:
            case int():
                return LoadOutcome(LoadStatus.LOADED)
            case None:
                return LoadOutcome(LoadStatus.ABSENT)
            case _Bad(why=CopyOutcome.MISMATCH):
                return LoadOutcome(LoadStatus.FAILED, "mismatch")
            case _Bad():
                return LoadOutcome(LoadStatus.CORRUPT)
            case LinkLost():
                return LoadOutcome(LoadStatus.FAILED, answer.reason)
            case _:
                return LoadOutcome(LoadStatus.FAILED, reason_of(answer))

    def _remove_bad(self, item: LoadItem) -> Answer:
        """Read again under WATCH, and remove what is bad still. Somebody may have healed it: that is loaded."""
        name = self._name_of(item.key)
        with self._servers.link(self._servers.of(name), self._deadline_s(item.hold.length)) as link:
            link.send([command(b"WATCH", name), command(b"GET", name)])
            watched = link.reply()
            answer = self._read(link, item)
            if isinstance(watched, ServerError) or not isinstance(answer, _Bad):
                link.send([command(b"UNWATCH")])
                link.reply()
                return watched if isinstance(watched, ServerError) else answer
            link.send([command(b"MULTI"), command(b"UNLINK", name), command(b"EXEC")])
            replies = [link.reply() for _ in range(3)]
        wrong = [reply for reply in replies if isinstance(reply, ServerError)]
        return wrong[-1] if wrong else answer

    def _clear(self) -> int:
        pattern = self._prefix + b"?" * (2 * KEY_BYTES)
        ours = re.compile(re.escape(self._prefix) + rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
        removed = 0
        try:
            for address in self._servers.masters():
                cursor = b"0"
                while True:
                    with self._servers.link(address, self._deadline_s(0)) as link:
                        link.send([command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)])
                        reply = link.reply()
                        match reply:
                            case [bytes() as cursor, list() as names]:
                                pass
                            case _:
                                raise LinkLost(reason_of(reply), f"SCAN is answered with {reply!r:.80}")
                        chosen = [name for name in names if isinstance(name, bytes) and ours.fullmatch(name)]
                        link.send([command(b"UNLINK", name) for name in chosen])
                        removed += sum(reply for _ in chosen if isinstance(reply := link.reply(), int))
                    if cursor == b"0":
                        break
        except LinkLost as lost:
            raise StorageError(
                f"{self.name}: {removed} records were removed, then: {lost}", field=self.name
            ) from None
        return removed

    def _has_room(self) -> bool:
        """Below our own cap, where there is one; asked again after ROOM_HOLDS_S."""
        until_s, has_room = self._room
        if self.settings.capacity_bytes and time.monotonic() >= until_s:
            has_room = self._usage().used_bytes < self.settings.capacity_bytes
            self._room = time.monotonic() + ROOM_HOLDS_S, has_room
        return has_room

    def _usage(self) -> Usage:
        used_bytes = capacity_bytes = records = 0
        try:
            for address in self._servers.masters():
                with self._servers.link(address, self._deadline_s(0)) as link:
                    link.send([command(b"INFO", b"memory"), command(b"DBSIZE")])
                    memory, keys = link.reply(), link.reply()
                if isinstance(memory, bytes) and isinstance(keys, int):
                    fields = fields_of(memory)
                    used_bytes += int(fields.get("used_memory", 0))
                    capacity_bytes += int(fields.get("maxmemory", 0))
                    records += keys
        except LinkLost:
            return Usage(0, 0, 0)
        caps = [cap for cap in (capacity_bytes, self.settings.capacity_bytes) if cap]
        return Usage(used_bytes, min(caps, default=0), records)

    # -- pipelines -----------------------------------------------------------------------------------------

    def _name_of(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _about(self, verb: bytes, *after: bytes) -> Callable[[int, bytes], Sequence[Buffer]]:
        """What writes a command about one name: all names have the same length."""
        gap = b"?" * (len(self._prefix) + 2 * KEY_BYTES)
        before, _, behind = command(verb, gap, *after).partition(gap)
        return lambda i, name: (before + name + behind,)

    def _deadline_s(self, payload_bytes: int) -> float:
        return time.monotonic() + self.settings.request_timeout_s * (1 + payload_bytes / BYTES_PER_TIMEOUT)

    def _exchange(
        self,
        keys: Sequence[bytes],
        write: Callable[[int, bytes], Sequence[Buffer]],
        weights: Sequence[int] | None = None,
        read: Callable[[Link, int], Answer] | None = None,
    ) -> list[Answer]:
        """Send `write(i, name)` for each key to its server and read the answers, following the cluster's directions.

        `weights`: about how many bytes go there and back.  What was not answered is LinkLost.
        """
        answers: list[Answer] = [LinkLost("lost", "not asked")] * len(keys)
        clustered = self.settings.servers.cluster
        names = [self._name_of(key) for key in keys]
        weights = weights or [SHORT_BYTES] * len(keys)
        deadline_s = self._deadline_s(sum(weights))
        try:
            groups: Mapping[tuple[Address, bool], Sequence[int]] = {
                (address, False): places for address, places in self._servers.group(names).items()
            }
        except LinkLost as lost:
            return [lost] * len(keys)
        for _ in range(MAX_TURNS):
            directed: dict[tuple[Address, bool], list[int]] = {}
            for (address, asking), places in groups.items():
                pipeline = _Pipeline(names, places, write, weights, read, answers, asking)
                try:
                    with self._servers.link(address, deadline_s) as link:
                        pipeline.run(link)
                except LinkLost as lost:
                    for i in places[pipeline.answered :]:
                        answers[i] = lost
                for i in places:
                    answer = answers[i]
                    # Elsewhere nobody sends us on: the password is for the server that was named.
                    if (
                        clustered
                        and isinstance(answer, ServerError)
                        and (target := _directed(answer, address))
                    ):
                        directed.setdefault(target, []).append(i)
            for (address, asking), places in directed.items():
                self._redirections += len(places)
                if not asking:
                    self._servers.moved([names[i] for i in places], address)
            if not directed:
                break
            groups = directed
        return answers


class _Pipeline:
    """Commands of some keys over one connection, with at most WINDOW_BYTES not answered."""

    def __init__(
        self,
        names: Sequence[bytes],
        places: Sequence[int],
        write: Callable[[int, bytes], Sequence[Buffer]],
        weights: Sequence[int],
        read: Callable[[Link, int], Answer] | None,
        answers: list[Answer],
        asking: bool,
    ) -> None:
        self._names, self._places, self._write, self._weights = names, places, write, weights
        self._read, self._answers, self._asking = read, answers, asking
        self.answered = 0

    def run(self, link: Link) -> None:
        """Raises LinkLost; then `answered` of the places have an answer."""
        places, weights, count = self._places, self._weights, len(self._places)
        sent = open_bytes = 0
        while self.answered < count:
            buffers: list[Buffer] = []
            while sent < count and (
                sent == self.answered or open_bytes + weights[places[sent]] <= WINDOW_BYTES
            ):
                if self._asking:
                    buffers.append(command(b"ASKING"))
                buffers.extend(self._write(places[sent], self._names[places[sent]]))
                open_bytes += weights[places[sent]]
                sent += 1
            if buffers:
                link.send(buffers)
            i = places[self.answered]
            if self._asking:
                link.reply()
            answer = link.reply() if self._read is None else self._read(link, i)
            if isinstance(answer, ServerError) and answer.code == "READONLY":
                raise LinkLost("read_only", "the server takes no writes")
            self._answers[i] = answer
            open_bytes -= weights[i]
            self.answered += 1


def _directed(answer: ServerError, by: Address) -> tuple[Address, bool] | None:
    """Where a node of a cluster says that a key is, and whether only to those who ASK."""
    host, colon, port = answer.rest.partition(" ")[2].rpartition(":")
    if answer.code not in ("MOVED", "ASK") or not colon or not port.isdigit():
        return None
    return Address(host or by.host, int(port)), answer.code == "ASK"


_ABSENT = Found(Presence.ABSENT)


def _found(answer: Answer) -> Found:
    if isinstance(answer, int):
        return Found(Presence.PRESENT, answer) if 0 < answer <= LARGEST_VALUE_BYTES else _ABSENT
    if isinstance(answer, LinkLost):
        return Found(Presence.UNKNOWN, 0, answer.reason)
    assert not isinstance(answer, _Bad)
    if isinstance(answer, ServerError) and answer.code == "WRONGTYPE":
        return _ABSENT
    return Found(Presence.UNKNOWN, 0, reason_of(answer))


def _drop(one: Any) -> None:
    if not isinstance(one, bytes):
        one.hold.drop()
