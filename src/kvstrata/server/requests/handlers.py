"""The RPC boundary: one frame in, one reply out, whatever is in the frame.

    frame ─▶ decode ─▶ who may ask ─▶ outcome kept? ─▶ handler ─▶ reply
                │            │              │             └─ or a task, with the request's deadline
                └────────────┴── error ◀────┘

Rules:

1. Every message that has a return address gets one reply per arrival: its outcome, the outcome kept from
   before, or an error. A request that runs gets it when it ends or at its deadline, on every connection that
   asked.
2. ping and errors touch nothing but memory of this process.
3. Only here an unexpected exception becomes a reply (`internal`); the log has the trace.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import typing
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from kvstrata import __version__, failpoints
from kvstrata.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    KvstrataError,
    NotPermitted,
    Refused,
    UnknownSession,
    WrongVersion,
)
from kvstrata.native.hashing import storage_keys
from kvstrata.observability.logging import EventLog
from kvstrata.policy.misses import with_advice
from kvstrata.policy.processes import Member
from kvstrata.rpc.session import Address, Call, Effect, Verdict
from kvstrata.rpc.wire import (
    MAX_DEADLINE_MS,
    MAX_MESSAGE_BYTES,
    NO_SESSION,
    PROTOCOL_VERSION,
    Abort,
    AnyRequest,
    Cancel,
    Clear,
    Cleared,
    Commit,
    CommitOutcome,
    CommitReply,
    Corrupt,
    Document,
    Explain,
    Hello,
    HelloReply,
    Identify,
    IdentifyReply,
    Lookup,
    Ok,
    Ping,
    Pong,
    Prefetch,
    PrefetchReply,
    Quiesced,
    Release,
    Reply,
    Request,
    Reserve,
    ReserveOutcome,
    ReserveReply,
    Retrieve,
    RetrieveReply,
    Status,
    decode_request,
    encode,
    key_count,
)
from kvstrata.rpc.zmq_server import Address as ZmqAddress
from kvstrata.server.engine import MAX_SESSION_SHARE, Engine
from kvstrata.server.requests.effects import Lease, Reservation, nth_key
from kvstrata.server.requests.lookup import Lookups
from kvstrata.types import EXTENT, KEY_BYTES, MissReason

KEYS_ON_LOOP = 256
"""Keys of one reserve that the loop handles itself (about 0.1 ms when all evict); more go to a lane."""
RETRIEVE_ON_LOOP_BYTES = 128 << 10
MAX_UNKEPT_TASKS = 64
"""retrieve and similar requests under way at a time."""
UNREAD = "this connection leaves too many bytes of replies unread; read them, then ask again"
GRACE_S = 0.02
"""After a request's deadline, before the boundary answers in its place."""

KeptOutcome = tuple[Reply, Effect | None]
Kept = Callable[[Call, Member, Any], KeptOutcome | Coroutine[Any, Any, KeptOutcome]]
Unkept = Callable[[Any, Member | None], Reply | Coroutine[Any, Any, Reply]]

_REFUSALS = {
    ReserveOutcome.CHAIN_EXCEEDS_POOL,
    ReserveOutcome.POOL_PINNED,
    ReserveOutcome.SESSION_LIMIT,
    ReserveOutcome.QUOTA,
    ReserveOutcome.TOO_LARGE,
    ReserveOutcome.ENTRIES_FULL,
    ReserveOutcome.FROZEN,
    ReserveOutcome.PARENT_ABSENT,
}
_NO_EXTENT = bytes(EXTENT.size)


class Handlers:
    """Answers frames for one engine."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._lookups = Lookups(engine)
        self._log = EventLog("rpc")
        self._unkept_tasks = 0
        self._kept: dict[type[Request], Kept] = {
            Identify: self._identify,
            Lookup: self._lookup,
            Release: self._release,
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Cancel: self._cancel,
            Prefetch: self._prefetch,
            Clear: self._clear,
            Quiesced: self._quiesced,
            Corrupt: self._corrupt,
        }
        self._unkept: dict[type[Request], Unkept] = {
            Hello: self._hello,
            Retrieve: self._retrieve,
            Status: self._status,
            Explain: self._explain,
        }

    # --- frames --------------------------------------------------------------------------------

    def on_frame(self, address: ZmqAddress, frame: bytes) -> None:
        """Answer one frame through `engine.send`, now or when its work has ended."""
        try:
            request = decode_request(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._engine.send(address, self._undecodable(frame, error))
            return
        op = _OPS[type(request)]
        failpoints.hit(op, "received")
        try:
            reply = self._ping(request) if type(request) is Ping else self._dispatch(address, request, op)
        except KvstrataError as error:
            reply = self._engine.error_frame(request.seq, error)
        except Exception as error:
            reply = self._our_mistake(request.seq, error)
        if reply is not None and type(request) in self._unkept:
            self._send_unkept(op, address, request.seq, reply)
        elif reply is not None:
            self._send(op, [address], reply)

    def on_frame_count(self, address: ZmqAddress, count: int) -> bytes:
        """The error for a message that has not exactly one frame."""
        error = BadRequest(
            f"message: has {count} frames, must have 1; send from a DEALER socket without a delimiter",
            field="message",
        )
        return self._engine.error_frame(0, error)

    def _send(self, op: str, addresses: Iterable[Address], reply: bytes) -> None:
        failpoints.hit(op, "done")
        for address in addresses:
            self._engine.send(address, reply)
        failpoints.hit(op, "replied")

    def _send_unkept(self, op: str, address: Address, seq: int, reply: bytes) -> None:
        """An outcome that is kept is asked for again when its reply was dropped; of another one the asker is told."""
        failpoints.hit(op, "done")
        if self._engine.send(address, reply) is True:
            self._engine.send(address, self._engine.error_frame(seq, Refused(UNREAD)))
        failpoints.hit(op, "replied")

    def _dispatch(self, address: ZmqAddress, request: AnyRequest, op: str) -> bytes | None:
        engine = self._engine
        kind = type(request)
        counters = engine.counters.requests
        counters[op] = counters.get(op, 0) + 1
        answer = self._unkept.get(kind)
        if answer is not None:
            member = self._who(address, request, op)
            outcome = answer(request, member)
            if isinstance(outcome, Reply):
                return encode(outcome)
            if self._unkept_tasks >= MAX_UNKEPT_TASKS:
                outcome.close()
                raise Refused("too many requests of this kind are running; try again")
            engine.supervisor.spawn(self._run_unkept(op, address, request.seq, outcome), op)
            return None
        work = self._kept[kind]
        if request.session == NO_SESSION and isinstance(request, Clear) and address.local:
            engine.supervisor.spawn(self._run_unkept(op, address, request.seq, self._clear_all(request)), op)
            return None
        receipt = engine.sessions.request(
            request.session,
            request.seq,
            op,
            address,
            wanted_by_ping=kind is Lookup,
            takes=kind in (Lookup, Reserve),
        )
        if receipt.verdict is Verdict.REPLAY:
            return receipt.call.reply
        if receipt.verdict is Verdict.JOINED:
            return None
        call = receipt.call
        member = engine.peers.member(request.session)
        assert member is not None, "an open session without a member"
        try:
            result = work(call, member, request)
        except KvstrataError as error:
            return self._end(call, engine.error_frame(call.seq, error), None, address)
        except Exception as error:
            return self._end(call, self._our_mistake(call.seq, error), None, address)
        if isinstance(result, tuple):
            return self._end(call, encode(result[0]), result[1], address)
        deadline_ms = getattr(request, "deadline_ms", MAX_DEADLINE_MS)
        task = engine.supervisor.spawn(self._run(call, result, deadline_ms / 1000), op)
        engine.work[call] = task
        # Not at once: a task that is cancelled before its first step never enters its own `try`.
        call.stop = functools.partial(self._loop.call_soon, task.cancel)
        return None

    def _who(self, address: ZmqAddress, request: AnyRequest, op: str) -> Member | None:
        """The attached process behind an unkept request; None for a session-less one that is allowed."""
        if request.session == NO_SESSION:
            if op == "hello" or (address.local and op != "retrieve"):
                return None
            raise NotPermitted(f"session: {op} needs an attached session here", field="session")
        member = self._engine.peers.member(request.session)
        if member is None and op != "hello":
            raise UnknownSession(
                "session: not attached to this instance; attach, then send again", field="session"
            )
        return member

    # --- running requests --------------------------------------------------------------------------------

    async def _run(self, call: Call, work: Coroutine[Any, Any, KeptOutcome], deadline_s: float) -> None:
        """One request that takes time: its outcome goes out when it is there, or the deadline's error."""
        engine = self._engine
        overdue = self._loop.call_later(deadline_s + GRACE_S, self._expire, call)
        effect: Effect | None = None
        frame = b""
        try:
            reply, effect = await work
            frame = encode(reply)
        except KvstrataError as error:
            frame = engine.error_frame(call.seq, error)
        except asyncio.CancelledError:
            pass  # stopped by its owner: nobody waits, and what it did so far it has given back
        except Exception as error:
            frame = self._our_mistake(call.seq, error)
        finally:
            overdue.cancel()
            engine.work.pop(call, None)
            self._deliver(call, frame, effect)

    async def _run_unkept(
        self, op: str, address: Address, seq: int, work: Coroutine[Any, Any, Reply]
    ) -> None:
        self._unkept_tasks += 1
        try:
            async with asyncio.timeout(MAX_DEADLINE_MS / 1000):
                frame = encode(await work)
        except KvstrataError as error:
            frame = self._engine.error_frame(seq, error)
        except TimeoutError:
            frame = self._engine.error_frame(
                seq, DeadlineExceeded("no outcome in time; nothing was promised")
            )
        except Exception as error:
            frame = self._our_mistake(seq, error)
        finally:
            self._unkept_tasks -= 1
        self._send_unkept(op, address, seq, frame)

    def _expire(self, call: Call) -> None:
        frame = self._engine.error_frame(
            call.seq,
            DeadlineExceeded("no outcome before the deadline; nothing was promised", field="deadline_ms"),
        )
        self._send(call.op, self._engine.sessions.expire(call, frame), frame)
        if call.stop is not None:
            call.stop()

    def _end(self, call: Call, frame: bytes, effect: Effect | None, address: Address) -> bytes | None:
        """A request that ended at once: its reply goes back the way it came."""
        waiters, undo = self._engine.sessions.finish(call, frame, effect)
        if undo is not None:
            self._engine.undo(undo, kept=False)
        elif effect is not None:
            self._engine.keep(effect)
        return frame if address in waiters else None

    def _deliver(self, call: Call, frame: bytes, effect: Effect | None) -> None:
        if not frame:
            frame = self._engine.error_frame(call.seq, InternalError("the request was stopped; try again"))
        waiters, undo = self._engine.sessions.finish(call, frame, effect)
        if undo is not None:
            self._engine.undo(undo, kept=False)
        elif effect is not None:
            self._engine.keep(effect)
        self._send(call.op, waiters, frame)

    # --- operations --------------------------------------------------------------------------------

    def _ping(self, request: Ping) -> bytes:
        engine = self._engine
        if request.session == NO_SESSION:
            return encode(Pong(request.seq, engine.epoch))
        member = engine.peers.member(request.session)
        if member is None:
            raise UnknownSession(
                "session: not attached to this instance; attach, then send again", field="session"
            )
        if request.copies is not None:
            member.copies = msgspec.structs.asdict(request.copies)
        if request.live is not None:
            engine.carry_out(engine.sessions.ping(request.session, request.seq, request.live))
        leases = engine.leases
        pong = Pong(request.seq, engine.epoch, leases.orphans(member.row), leases.revoked(member.session))
        return encode(pong)

    def _hello(self, request: Hello, member: Member | None) -> Reply:
        engine = self._engine
        if request.protocol != PROTOCOL_VERSION:
            raise WrongVersion(
                f"protocol: peer speaks {request.protocol}, this server {PROTOCOL_VERSION}; upgrade "
                "the older side",
                field="protocol",
            )
        return HelloReply(
            seq=request.seq,
            epoch=engine.epoch,
            protocol=PROTOCOL_VERSION,
            server=f"kvstrata {__version__}",
            instance_id=engine.instance_id,
            chunk_tokens=engine.settings.chunk_size,
            socket_dir=str(engine.socket_dir),
            max_message_bytes=MAX_MESSAGE_BYTES,
            has_l2=engine.has_l2,
            max_reserved_bytes=engine.pool.extents_bytes // MAX_SESSION_SHARE,
        )

    def _identify(self, call: Call, member: Member, request: Identify) -> KeptOutcome:
        identity = self._engine.peers.identify(member, request.request)
        group = member.group
        reply = IdentifyReply(
            call.seq, self._engine.epoch, identity.number, identity.root, group.slices, group.complete
        )
        return reply, None

    def _lookup(
        self, call: Call, member: Member, request: Lookup
    ) -> KeptOutcome | Coroutine[Any, Any, KeptOutcome]:
        return self._lookups.start(call, member, request)

    def _release(self, call: Call, member: Member, request: Release) -> KeptOutcome:
        engine = self._engine
        found: list[Lease] = []
        for name in request.leases:
            lease = engine.leases.get(name)
            if lease is None:
                continue
            if lease.group != member.group.name:
                raise NotPermitted(
                    f"leases: ({name[0].hex()}, {name[1]}) belongs to another engine; nothing was released",
                    field="leases",
                )
            found.append(lease)
        count = 0
        for lease in found:
            if not lease.rows:
                continue  # named twice
            if request.group:
                engine.release_all(lease)
                count += 1
            else:
                count += engine.release_share(lease, member.row, own=lease.name[0] == member.session)
        return Ok(call.seq, engine.epoch, count), None

    def _reserve(
        self, call: Call, member: Member, request: Reserve
    ) -> KeptOutcome | Coroutine[Any, Any, KeptOutcome]:
        engine = self._engine
        identity = engine.peers.identity(member, request.identity_id)
        if not member.digest:
            raise BadRequest(
                "slice: this process declared none when it attached, so it stores nothing", field="slice"
            )
        n_chunks = _whole_keys(request.keys, "keys")
        if len(request.parent) not in (0, KEY_BYTES):
            raise BadRequest(
                f"parent: must be one {KEY_BYTES}-byte chain key or empty, found {len(request.parent)} bytes",
                field="parent",
            )
        if len(request.probe) not in (0, 8):
            raise BadRequest(f"probe: must be 0 or 8 bytes, found {len(request.probe)}", field="probe")
        if not _MIN_RECORD_BYTES < request.record_bytes <= engine.pool.extents_bytes:
            raise BadRequest(
                f"record_bytes: must be more than {_MIN_RECORD_BYTES} and at most the pool's "
                f"{engine.pool.extents_bytes}, found {request.record_bytes}",
                field="record_bytes",
            )
        keys = storage_keys(request.keys, member.digest)
        parent = storage_keys(request.parent, member.digest) if request.parent else b""
        arguments = (keys, parent, request.record_bytes, member.row, identity.root, identity.tenant)
        if not request.parent:
            engine.explainer.identities.stored(
                request.probe, identity.root, identity.layout, identity.request
            )
        if engine.frozen_by:
            outcomes = bytes([ReserveOutcome.FROZEN]) * n_chunks
            return self._reserved(call, keys, 0, outcomes, _NO_EXTENT * n_chunks)
        if n_chunks > KEYS_ON_LOOP:
            return self._reserve_on_lane(call, keys, arguments)
        return self._reserved(call, keys, *engine.pool.reserve(*arguments))

    async def _reserve_on_lane(self, call: Call, keys: bytes, arguments: tuple[Any, ...]) -> KeptOutcome:
        pool = self._engine.pool
        future = self._engine.lane.run(pool.reserve, *arguments)
        try:
            ticket, outcomes, extents = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: pool.abort(done.result()[0], None))
            raise
        return self._reserved(call, keys, ticket, outcomes, extents)

    def _reserved(self, call: Call, keys: bytes, ticket: int, outcomes: bytes, extents: bytes) -> KeptOutcome:
        engine = self._engine
        open_keys: dict[int, bytes] = {}
        counters = engine.counters.reserve_outcomes
        for index, code in enumerate(outcomes):
            if code == ReserveOutcome.RESERVED:
                open_keys[index] = nth_key(keys, index)
            elif code in _REFUSALS:
                name = ReserveOutcome(code).name.lower()
                engine.explainer.keys.note(
                    nth_key(keys, index), MissReason.REFUSED, with_advice(name), engine.clock.unix_ms()
                )
        for code in set(outcomes):
            name = ReserveOutcome(code).name.lower()
            counters[name] = counters.get(name, 0) + outcomes.count(code)
        effect = Reservation(ticket, open_keys) if open_keys else None
        return ReserveReply(call.seq, engine.epoch, outcomes, extents), effect

    def _commit(self, call: Call, member: Member, request: Commit) -> KeptOutcome:
        engine = self._engine
        reservation = self._reservation(member, request.reservation)
        outcomes = bytearray([CommitOutcome.NOT_RESERVED]) * len(request.indices)
        if reservation is None:
            return CommitReply(call.seq, engine.epoch, bytes(outcomes)), None
        wanted: dict[int, int] = {}
        for position, index in enumerate(request.indices):
            if index in reservation.open_keys and index not in wanted:
                wanted[index] = position
        codes = engine.pool.commit(reservation.ticket, list(wanted)) if wanted else b""
        done: list[bytes] = []
        for (index, position), code in zip(wanted.items(), codes, strict=True):
            outcomes[position] = code
            key = reservation.open_keys.pop(index)  # whatever the outcome, the item's reservation has ended
            engine.in_flight.remove([key])
            if code == CommitOutcome.COMMITTED:
                done.append(key)
            elif code == CommitOutcome.BAD_RECORD:
                engine.counters.bad_records += 1
        engine.committed(done)
        self._settle_if_over(member, request.reservation, reservation)
        return CommitReply(call.seq, engine.epoch, bytes(outcomes)), None

    def _abort(self, call: Call, member: Member, request: Abort) -> KeptOutcome:
        engine = self._engine
        reservation = self._reservation(member, request.reservation)
        if reservation is None:
            return Ok(call.seq, engine.epoch, 0), None
        indices = list(reservation.open_keys) if request.indices is None else request.indices
        given_back = list(dict.fromkeys(index for index in indices if index in reservation.open_keys))
        if given_back:
            engine.pool.abort(reservation.ticket, given_back)
            engine.in_flight.remove(reservation.open_keys.pop(index) for index in given_back)
        self._settle_if_over(member, request.reservation, reservation)
        return Ok(call.seq, engine.epoch, len(given_back)), None

    def _cancel(self, call: Call, member: Member, request: Cancel) -> KeptOutcome:
        engine = self._engine
        if request.target == call.seq:
            raise BadRequest("target: a cancel cannot cancel itself", field="target")
        count = engine.carry_out(engine.sessions.cancel(member.session, request.target))
        return Ok(call.seq, engine.epoch, count), None

    def _prefetch(self, call: Call, member: Member, request: Prefetch) -> KeptOutcome:
        identity = self._engine.peers.identity(member, request.identity_id)
        _whole_keys(request.keys, "keys")
        job = self._engine.start_prewarm(
            member.group, identity.root, identity.tenant, request.keys, request.budget_bytes, request.ttl_ms
        )
        return PrefetchReply(call.seq, self._engine.epoch, job), None

    async def _clear(self, call: Call, member: Member, request: Clear) -> KeptOutcome:
        if member.tenants is None:
            return await self._clear_all(request), None
        if request.tenant is not None and request.tenant not in member.tenants:
            raise NotPermitted(
                f"tenant: this process may not use tenant {request.tenant!r}; attach with its token",
                field="tenant",
            )
        tenants = member.tenants if request.tenant is None else {request.tenant}
        engine = self._engine
        done = [await engine.clear(request.tier, tenant, wait=request.wait) for tenant in sorted(tenants)]
        count, kept = sum(one.n_chunks for one in done), sum(one.kept for one in done)
        return Cleared(call.seq, engine.epoch, count, done[-1].held, done[-1].leased, kept), None

    async def _clear_all(self, request: Clear) -> Reply:
        """A clear by a process that may use every tenant, or by a local one that did not attach (an admin's tool)."""
        done = await self._engine.clear(request.tier, request.tenant, wait=request.wait)
        return Cleared(request.seq, self._engine.epoch, done.n_chunks, done.held, done.leased, done.kept)

    def _quiesced(self, call: Call, member: Member, request: Quiesced) -> KeptOutcome:
        self._engine.pool.row_quiesced(member.row)
        return Ok(call.seq, self._engine.epoch, 1), None

    async def _corrupt(self, call: Call, member: Member, request: Corrupt) -> KeptOutcome:
        engine = self._engine
        n_chunks = _whole_keys(request.keys, "keys")
        if not member.digest:
            raise BadRequest("slice: this process declared none when it attached", field="slice")
        keys = storage_keys(request.keys, member.digest)

        def check() -> int:
            return sum(engine.pool.mark_bad(nth_key(keys, index)) for index in range(n_chunks))

        return Ok(call.seq, engine.epoch, await asyncio.shield(engine.lane.run(check))), None

    def _retrieve(self, request: Retrieve, member: Member | None) -> Reply | Coroutine[Any, Any, Reply]:
        assert member is not None
        engine = self._engine
        engine.peers.identity(member, request.identity_id)
        hold = engine.pool.hold(storage_keys(request.key, request.slice_digest))
        if hold is None:
            return RetrieveReply(request.seq, engine.epoch, False, 0, b"")
        first = min(request.offset_bytes, hold.length)
        end = min(first + request.length_bytes, hold.length)

        def body() -> bytes:
            try:
                return bytes(hold.view()[first:end])
            finally:
                hold.drop()

        engine.counters.retrieved_bytes += end - first
        if end - first <= RETRIEVE_ON_LOOP_BYTES:
            return RetrieveReply(request.seq, engine.epoch, True, hold.length, body())
        return self._retrieve_on_lane(request, hold.length, body)

    async def _retrieve_on_lane(self, request: Retrieve, length: int, body: Callable[[], bytes]) -> Reply:
        content = await asyncio.shield(self._engine.lane.run(body))
        return RetrieveReply(request.seq, self._engine.epoch, True, length, content)

    def _status(self, request: Status, member: Member | None) -> Reply:
        engine = self._engine
        if request.job == 0:
            status = engine.status()
            if member is not None and member.tenants is not None:
                group = member.group.name.hex()
                status["peers"] = [peer for peer in status["peers"] if peer["group"] == group]
                status["tenants"] = [row for row in status["tenants"] if row["tenant"] in member.tenants]
                del status["jobs"]
            return Document(request.seq, engine.epoch, status)
        document = engine.job(request.job)
        if document is None:
            raise BadRequest(f"job: {request.job} is not among the recent ones", field="job")
        return Document(request.seq, engine.epoch, document)

    def _explain(self, request: Explain, member: Member | None) -> Reply:
        tenants = None if member is None else member.tenants
        return Document(
            request.seq, self._engine.epoch, self._engine.explainer.explain(request.request_id, tenants)
        )

    # --- helpers --------------------------------------------------------------------------------

    def _reservation(self, member: Member, seq: int) -> Reservation | None:
        session = self._engine.sessions.get(member.session)
        effect = None if session is None else session.effects.get(seq)
        return effect if isinstance(effect, Reservation) else None

    def _settle_if_over(self, member: Member, seq: int, reservation: Reservation) -> None:
        if not reservation.open_keys:
            self._engine.sessions.settle(member.session, seq)

    def _undecodable(self, frame: bytes, error: Exception) -> bytes:
        """The error for a frame that is no request, with the sender's seq where it can be made out."""
        seq, op = 0, ""
        try:
            head = msgspec.msgpack.decode(frame)
            if isinstance(head, list):
                op = head[0] if head and isinstance(head[0], str) else ""
                seq = head[2] if len(head) > 2 and type(head[2]) is int and 0 <= head[2] < 1 << 63 else 0
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        self._log.repeated(logging.WARNING, "undecodable", "bad_message", error=error, size_bytes=len(frame))
        fields = _FIELDS.get(op)
        if op and fields is None:
            known = ", ".join(sorted(_FIELDS))
            bad = BadRequest(f"op: {op[:40]!r} is unknown; this server knows {known}", field="op")
            return self._engine.error_frame(seq, bad)
        text, _, where = str(error).partition(" - at `$[")
        match = re.match(r"(\d+)\]([^`]*)", where)
        field = "message"
        if match and fields:
            index = int(match[1])
            field = ("op", *fields)[index] + match[2] if index <= len(fields) else "message"
        return self._engine.error_frame(seq, BadRequest(f"{field}: {text}", field=field))

    def _our_mistake(self, seq: int, error: Exception) -> bytes:
        logging.getLogger("kvstrata.rpc").error("request_failed", exc_info=error)
        return self._engine.error_frame(
            seq,
            InternalError(f"the server failed on this request ({type(error).__name__}); its log has details"),
        )


def _whole_keys(keys: bytes, field: str) -> int:
    count = key_count(keys)
    if count < 1:
        raise BadRequest(
            f"{field}: {len(keys)} bytes are not one or more {KEY_BYTES}-byte keys",
            field=field,
        )
    return count


_OPS: dict[type[Request], str] = {
    kind: str(kind.__struct_config__.tag) for kind in typing.get_args(AnyRequest)
}
OPERATIONS = frozenset(_OPS.values())
"""Names of all operations."""
_MIN_RECORD_BYTES = 4096
"""A record's header alone."""

_FIELDS: dict[str, tuple[str, ...]] = {op: kind.__struct_fields__ for kind, op in _OPS.items()}
"""Operation → names of its fields after the operation's name."""
