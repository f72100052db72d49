"""Answers requests: each message gets one reply, whatever its content.

    message ─▶ decode ─▶ verb ─▶ reply
                  │        └─▶ a task, with the request's deadline ─▶ reply
                  └─▶ error

Rules:

1. Every message gets one reply: its outcome or an error.  A request that takes time is answered when it ends, when its
   process cancels it, or at its deadline.
2. The connection identifies the sender (server/listener.py).  A connection without a row is answered by plain.py.
3. A process numbers its requests upwards, so that the number of a lookup or reserve is the name of its lease or
   reservation.  A request that fails or was cancelled leaves no grant under its number.
4. A ping or an error touches only memory of this process.
5. Only here does an unexpected exception become a reply (`internal`); the log has the trace.
6. When `on_gone` returns, the process has no running request, no reservation, and no share of a lease.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import typing
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvstrata import failpoints
from kvstrata.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    KvstrataError,
    NotPermitted,
    Refused,
)
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience
from kvstrata.rpc.wire import (
    MAX_DEADLINE_MS,
    MAX_SEQ,
    Abort,
    AnyRequest,
    Cancel,
    Commit,
    Corrupt,
    Error,
    Identify,
    IdentifyReply,
    Lookup,
    Ok,
    Ping,
    Pong,
    Promise,
    Quiesced,
    Release,
    Reply,
    Request,
    Reserve,
    Resume,
    Retrieve,
    check_keys,
    decode_request,
    encode,
)
from kvstrata.server.processes import Process, Running
from kvstrata.server.requests.grants import Lease
from kvstrata.server.requests.lookup import Lookups
from kvstrata.server.requests.plain import PlainClients, read_piece
from kvstrata.server.requests.reserve import Reserving
from kvstrata.types import shown_name

if TYPE_CHECKING:
    from kvstrata.server.listener import Line
    from kvstrata.server.parts import Parts

HEAD_BYTES = 64 << 10
"""Maximum length of an invalid message whose operation and number are parsed for the error reply."""
MAX_TASKS_OF_PROCESS = 2_048
"""Maximum number of running tasks of one process, over all its sessions."""
MAX_GRANTS = 8_192
"""Maximum number of leases, reservations and promises of one session."""
GRACE_S = 0.02
"""Grace after a request's deadline before it is answered with the deadline's error."""


class _Op(msgspec.Struct, array_like=True):
    op: str


class _Head(_Op, array_like=True):
    seq: int


_OP, _HEAD = msgspec.msgpack.Decoder(_Op), msgspec.msgpack.Decoder(_Head)
Verb = Callable[[Process, Any], Reply | Coroutine[Any, Any, Reply]]


class Requests:
    """Answers frames. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._epoch, self._pool, self._counters = parts.facts.epoch, parts.pool, parts.counters
        self._loop, self._supervisor = parts.loop, parts.supervisor
        self._grace_s = patience(GRACE_S)
        self._processes, self._grants = parts.processes, parts.grants
        self.lookups, self._plain = Lookups(parts), PlainClients(parts)
        reserving = Reserving(parts)
        self._recuts = parts.recuts
        self._log = EventLog("rpc")
        self._verbs: dict[type[Request], Verb] = {
            Ping: self._ping,
            Identify: self._identify,
            Lookup: self.lookups.lookup,
            Release: self._release,
            Reserve: reserving.reserve,
            Promise: self._promise,
            Commit: reserving.commit,
            Abort: reserving.abort,
            Cancel: self._cancel,
            Resume: self._resume,
            Retrieve: self._retrieve,
            Quiesced: self._quiesced,
            Corrupt: reserving.corrupt,
        }

    def on_frame(self, sender: Line, frame: bytes) -> bool:
        """Answer one message, now or when its task has ended. Returns False if it is not a valid request."""
        started_s = time.perf_counter()
        process = sender.process
        try:
            request = decode_request(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            sender.send(self._undecodable(frame, error))
            return False
        kind, seq = type(request), request.seq
        op = _OPS[kind]
        failpoints.hit(op, "received")
        self._counters.requests[op] += 1
        try:
            if process is None:
                answer = encode(self._plain.answer(sender.plain, request, op))
            elif seq <= process.last_seq:
                answer = self._error(seq, _not_next(process))
            else:
                process.last_seq = seq
                if kind in _TAKES_ROOM:
                    _check_room(process, grants=kind is not Corrupt)
                reply = self._verbs[kind](process, request)
                if not isinstance(reply, Reply):
                    deadline_ms = getattr(request, "deadline_ms", MAX_DEADLINE_MS) + getattr(
                        request, "wait_ms", 0
                    )
                    self._begin(
                        Running(sender, process, seq, op, started_s, process.uses), reply, deadline_ms / 1000
                    )
                    return True
                answer = encode(reply)
        except Exception as error:
            answer = self._failed(process, seq, error)
        self._send(sender, op, answer, started_s)
        if process is not None:
            if kind is Lookup:
                self.lookups.note_answered()
            elif type(request) is Ping:
                self.lookups.note_missed(process, request.misses)
                self.lookups.note_hints(process, request.hints)
        return True

    def on_attached(self, process: Process) -> None:
        """A process has attached. If it is an engine's scheduler, tell the other engines at once that they share L1."""
        self._recuts.attached(process)
        if not process.declared.kv_bytes:
            return
        told = encode(Pong(0, self._epoch, [], [], self._processes.kv_bytes))
        for other in self._processes:
            if other.line is not None and other is not process and other.declared.kv_bytes:
                other.line.send(told)

    async def on_gone(self, process: Process) -> None:
        """Stop the requests of a process that has ended, and end its grants."""
        running = list(process.running.values())
        for one in running:
            self._stop(one, None)
        leases, reservations = self._grants.process_gone(process)
        self._grants.promises.process_gone(self._processes.groups)
        if leases or reservations:  # a process without grants is not logged
            EventLog("instance").repeated(
                logging.INFO, "held", "process_gone", pid=process.pid, session=shown_name(process.session),
                group=shown_name(process.group_name), leases=leases, reservations=reservations,
                note="its reservations are freed, and its leases as far as no process of its engine uses them",
            )  # fmt: skip
        await asyncio.gather(*(one.task for one in running if one.task is not None), return_exceptions=True)

    # --- verbs; those of lookups are in lookup.py, and those of writers in reserve.py ----------------------

    def _ping(self, process: Process, request: Ping) -> Reply:
        """The process is alive; the reply names the leases that it should release. Raises BadRequest."""
        for miss in request.misses:
            if miss.chain:
                check_keys(miss.chain, "misses.chain")
        process.pinged_s = time.monotonic()
        if request.copies is not None:
            process.copies = msgspec.structs.asdict(request.copies)
        if request.loads is not None:
            process.load_rate = request.loads.latency_us / 1e6, float(request.loads.bytes_s)
        if request.prompt_tokens_s:
            process.group.prompt_tokens_s = request.prompt_tokens_s
        grants = self._grants
        engines_kv_bytes = self._processes.kv_bytes if process.declared.kv_bytes else None
        return Pong(
            request.seq, self._epoch, grants.orphans(process), grants.revoked(process), engines_kv_bytes
        )

    def _identify(self, process: Process, request: Identify) -> Reply:
        """Give the process a number for an identity, which its later requests use."""
        identity = self._processes.identify(process, request.request)
        group = process.group
        return IdentifyReply(
            request.seq,
            self._epoch,
            identity.number,
            identity.root,
            group.slices,
            group.complete,
            list(group.spans),
        )

    def _quiesced(self, process: Process, request: Quiesced) -> Reply:
        """End the earlier epochs of a process: it does not touch their bytes any more."""
        self._pool.row_quiesced(process.row)
        return Ok(request.seq, self._epoch, 1)

    def _release(self, process: Process, request: Release) -> Reply:
        """End this process's shares of leases, or with `group` those of its whole group."""
        found: list[Lease] = []
        for name in request.leases:
            lease = self._grants.find(name)
            if lease is None:
                continue
            if lease.owner.group.name != process.group.name:
                if process.tenants is not None:
                    continue  # do not reveal to a tenant whether another one has such a lease
                raise NotPermitted(
                    f"leases: ({shown_name(name[0])}, {name[1]}) belongs to another engine; nothing was released",
                    field="leases",
                )
            found.append(lease)
        count = sum(self._grants.release(lease, process, group=request.group) for lease in found)
        return Ok(request.seq, self._epoch, count)

    def _promise(self, process: Process, request: Promise) -> Reply:
        """Remember which chunks the process's engine computes now. Raises BadRequest, UnknownIdentity or Refused."""
        identity = self._processes.identity(process, request.identity_id)
        n_chunks = check_keys(request.chain, "chain")
        if not process.group.complete:
            raise Refused(
                "chain: not all slices of this engine are attached; promise when they are", field="chain"
            )
        self._grants.promise(process, request.seq, identity.root, request.chain)
        return Ok(request.seq, self._epoch, n_chunks)

    def _cancel(self, process: Process, request: Cancel) -> Reply:
        """Stop a lookup or reserve of this session, or end its lease or reservation; or withdraw a promise."""
        if request.target >= request.seq:
            raise BadRequest(
                f"target: {request.target} is not the number of an earlier request", field="target"
            )
        return Ok(request.seq, self._epoch, int(self._end(process, request.target)))

    def _resume(self, process: Process, request: Resume) -> Reply:
        """End those running requests and grants of this session that the message does not name."""
        unnamed = {*process.running, *process.grants}.difference(request.live)
        return Ok(request.seq, self._epoch, sum(self._end(process, seq) for seq in sorted(unnamed)))

    def _retrieve(self, process: Process, request: Retrieve) -> Reply:
        """Reply with bytes of a record, for a process that does not map L1."""
        root = self._processes.identity(process, request.identity_id).root
        return read_piece(self._pool, root, request, self._epoch, self._counters)

    def _end(self, process: Process, seq: int) -> bool:
        """Stop a request, or end its grant. Returns whether it was running or had a grant."""
        running = process.running.get(seq)
        if running is None:
            return self._grants.end(process, seq)
        return self._stop(running, Cancelled("the session cancelled this request itself"))

    # --- requests that take time ---------------------------------------------------------------------------

    def _begin(self, running: Running, work: Coroutine[Any, Any, Reply], deadline_s: float) -> None:
        process = running.process
        process.running[running.seq] = running
        for use in running.uses:
            use.n_tasks += 1
        running.task = self._supervisor.job(self._run(running, work, deadline_s), running.op)

    async def _run(self, running: Running, work: Coroutine[Any, Any, Reply], deadline_s: float) -> None:
        timer = self._loop.call_later(deadline_s + self._grace_s, self._overdue, running)
        process, seq = running.process, running.seq
        answer = b""
        try:
            answer = encode(await work)
        except asyncio.CancelledError:
            pass  # the task has undone its work
        except Exception as error:
            answer = self._failed(process, seq, error)
        timer.cancel()
        del process.running[seq]
        for use in running.uses:
            use.n_tasks -= 1
        if running.stopped:
            self._grants.end(process, seq)
            return
        answer = answer or self._error(seq, InternalError("the request was stopped; try again"))
        self._send(running.sender, running.op, answer, running.started_s)

    def _overdue(self, running: Running) -> None:
        error = DeadlineExceeded("no outcome before the deadline; nothing was promised", field="deadline_ms")
        self._stop(running, error)

    def _stop(self, running: Running, error: KvstrataError | None) -> bool:
        """Answer a running request with an error, and stop its task. False if it was stopped already."""
        if running.stopped:
            return False
        running.stopped = True
        if error is not None:
            answer = self._error(running.seq, error)
            self._send(running.sender, running.op, answer, running.started_s)
        if running.task is not None:
            # Not cancelled at once: a task that is cancelled before its first step never enters its own `try`.
            self._loop.call_soon(running.task.cancel)
        return True

    # --- replies -------------------------------------------------------------------------------------------

    def _send(self, sender: Line, op: str, answer: bytes, started_s: float) -> None:
        failpoints.hit(op, "done")
        sender.send(answer)
        failpoints.hit(op, "replied")
        self._counters.request_seconds[op].add(time.perf_counter() - started_s)

    def _failed(self, process: Process | None, seq: int, error: Exception) -> bytes:
        """The error reply to a request; a failed request keeps no grant."""
        if process is not None:
            self._grants.end(process, seq)
        if isinstance(error, KvstrataError):
            return self._error(seq, error)
        logging.getLogger("kvstrata.rpc").error("request_failed", exc_info=error)
        name = type(error).__name__
        return self._error(
            seq, InternalError(f"the server failed on this request ({name}); its log has details")
        )

    def _error(self, seq: int, error: KvstrataError) -> bytes:
        self._counters.errors[error.code] += 1
        return encode(
            Error(seq, self._epoch, error.code, error.message[:2000], error.field[:200], error.retryable)
        )

    def _undecodable(self, frame: bytes, error: Exception) -> bytes:
        """The error reply to an invalid message, with the sender's seq if it can be read."""
        size_bytes = len(frame)
        self._log.repeated(logging.WARNING, "undecodable", "bad_message", error=error, size_bytes=size_bytes)
        seq, op = 0, ""
        if size_bytes <= HEAD_BYTES:
            head = _decoded(_HEAD, frame) or _decoded(_OP, frame)
            op = head.op if head is not None else ""
            seq = head.seq if isinstance(head, _Head) and 0 <= head.seq <= MAX_SEQ else 0
        if not frame:
            return self._error(
                seq, BadRequest("message: it must have one frame, which holds an array", field="message")
            )
        fields = _FIELDS.get(op)
        if op and fields is None:
            known = ", ".join(sorted(_FIELDS))
            bad = BadRequest(f"op: {op[:40]!r} is unknown; this server knows {known}", field="op")
            return self._error(seq, bad)
        text, _, where = str(error).partition(" - at `$[")
        match = re.match(r"(\d+)\]([^`]*)", where)
        field = "message"
        if match and fields:
            index = int(match[1])
            field = ("op", *fields)[index] + match[2] if index <= len(fields) else "message"
        return self._error(seq, BadRequest(f"{field}: {text}", field=field))


_TAKES_ROOM = frozenset({Lookup, Reserve, Corrupt, Promise})
"""Requests that may become tasks or get grants. None of them releases a grant, so refusing them at a limit is safe."""
_OPS: dict[type[Request], str] = {
    kind: str(kind.__struct_config__.tag) for kind in typing.get_args(AnyRequest)
}
OPERATIONS = frozenset(_OPS.values())
"""Names of all operations."""
_FIELDS: dict[str, tuple[str, ...]] = {op: kind.__struct_fields__ for kind, op in _OPS.items()}
"""Operation → names of its fields after the operation's name."""


def _not_next(process: Process) -> BadRequest:
    return BadRequest(
        f"seq: it does not follow {process.last_seq}; number the requests of a session upwards by one counter",
        field="seq",
    )


def _check_room(process: Process, *, grants: bool) -> None:
    """Raises Refused if the process has too many running tasks, or with `grants` its session too many grants."""
    n_tasks = process.uses[0].n_tasks
    if n_tasks >= MAX_TASKS_OF_PROCESS:
        raise Refused(f"this process has {n_tasks} requests that take time running; wait for some")
    if grants and len(process.grants) >= MAX_GRANTS:
        raise Refused(
            f"seq: this session holds {len(process.grants)} leases, reservations and promises; end some",
            field="seq",
        )


H = TypeVar("H", bound=_Op)


def _decoded(decoder: msgspec.msgpack.Decoder[H], frame: bytes) -> H | None:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
