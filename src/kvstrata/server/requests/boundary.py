"""The RPC boundary: each message gets one reply, whatever it holds.

    message ─▶ decode ─▶ permitted? ─▶ outcome kept? ─▶ verb ─▶ reply
                  │           │             │              └─ or a task, with the request's deadline (running.py)
                  └─ error ◀──┴─────────────┘

Rules:

1. Every message gets one reply per arrival: its outcome, the outcome kept from an earlier arrival, or an error.  A
   request that is still running is answered when it ends or at its deadline.
2. The connection says who asks (memory/attach/server.py).  A connection without a row is answered by plain.py.
3. A ping or an error touches only memory of this process.
4. Only here and in running.py does an unexpected exception become a reply (`internal`); the log has the trace.
"""

from __future__ import annotations

import logging
import re
import time
import typing
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec

from kvstrata import failpoints
from kvstrata.errors import BadRequest, KvstrataError
from kvstrata.observability.logging import EventLog
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.processes import AttachedProcess, ProcessTable
from kvstrata.rpc.session import Address, Call, Effect, Sessions, Verdict
from kvstrata.rpc.wire import (
    MAX_DEADLINE_MS,
    MAX_SEQ,
    Abort,
    AnyRequest,
    Cancel,
    Commit,
    Corrupt,
    Identify,
    Lookup,
    Ping,
    Quiesced,
    Release,
    Request,
    Reserve,
    Retrieve,
    decode_request,
    encode,
)
from kvstrata.server.requests.effects import Effects
from kvstrata.server.requests.handlers import Handlers
from kvstrata.server.requests.lookup import Lookups
from kvstrata.server.requests.plain import PlainClients
from kvstrata.server.requests.reserve import Reserving
from kvstrata.server.requests.running import KeptOutcome, Replies, Running

HEAD_BYTES = 64 << 10
"""Of an invalid message up to this length, operation and number are looked for."""


class Sender(Address, Protocol):
    """The connection over which a message came."""

    @property
    def session(self) -> bytes:
        """The attached session that speaks over it; empty for a client without a row."""

    @property
    def plain(self) -> dict[int, Any]:
        """Identities that a client without a row has declared (plain.py)."""


class _Op(msgspec.Struct, array_like=True):
    op: str


class _Head(_Op, array_like=True):
    seq: int


_OP, _HEAD = msgspec.msgpack.Decoder(_Op), msgspec.msgpack.Decoder(_Head)
Kept = Callable[[Call, AttachedProcess, Any], KeptOutcome | Coroutine[Any, Any, KeptOutcome]]
"""Executes a request of an attached process; the outcome is kept under the request's number."""


class Boundary:
    """Answers frames. Belongs to the event loop."""

    def __init__(
        self,
        *,
        handlers: Handlers,
        reserving: Reserving,
        lookups: Lookups,
        processes: ProcessTable,
        sessions: Sessions,
        effects: Effects,
        running: Running,
        replies: Replies,
        plain: PlainClients,
        counters: ServerCounters,
    ) -> None:
        self._plain = plain
        self._handlers = handlers
        self._processes = processes
        self._sessions = sessions
        self._effects = effects
        self._running = running
        self._replies = replies
        self._counters = counters
        self._log = EventLog("rpc")
        self._lookups = lookups
        self._kept: dict[type[Request], Kept] = {
            Identify: handlers.identify,
            Lookup: lookups.start,
            Release: handlers.release,
            Reserve: reserving.reserve,
            Commit: reserving.commit,
            Abort: reserving.abort,
            Cancel: handlers.cancel,
            Quiesced: handlers.quiesced,
            Corrupt: reserving.corrupt,
        }

    def on_frame(self, sender: Sender, frame: bytes) -> bool:
        """Answer one message, now or when its task has ended. Returns False if it is no request."""
        started_s = time.perf_counter()
        process = self._processes.get(sender.session)
        try:
            request = decode_request(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            sender.send(self._undecodable(frame, error))
            return False
        kind = type(request)
        op = _OPS[kind]
        failpoints.hit(op, "received")
        try:
            if process is None:
                reply: bytes | None = encode(self._plain.answer(sender.plain, request, op))
            elif type(request) is Ping:
                reply = self._handlers.ping(request, process)
            else:
                reply = self._dispatch(sender, request, op, process, started_s)
        except KvstrataError as error:
            reply = self._replies.error(request.seq, error)
        except Exception as error:
            reply = self._replies.our_mistake(request.seq, error)
        if reply is not None:
            self._replies.send(op, (sender,), reply)
            self._replies.ended(op, started_s)
        if process is not None:
            if kind is Lookup:
                self._lookups.note_answered()
            elif type(request) is Ping and request.misses:
                self._lookups.note_missed(process, request.misses)
        return True

    def _dispatch(
        self, sender: Sender, request: AnyRequest, op: str, process: AttachedProcess, started_s: float
    ) -> bytes | None:
        counters = self._counters.requests
        counters[op] = counters.get(op, 0) + 1
        kind = type(request)
        if type(request) is Retrieve:
            return encode(self._handlers.retrieve(request, process))
        work = self._kept[kind]
        receipt = self._sessions.request(
            process.session,
            request.seq,
            op,
            sender,
            wanted_by_ping=kind is Lookup,
            takes=kind in (Lookup, Reserve),
        )
        if receipt.verdict is Verdict.REPLAY:
            return receipt.call.reply
        if receipt.verdict is Verdict.JOINED:
            return None
        call, owner = receipt.call, process.owner
        try:
            if kind in _TAKES_TIME:
                self._running.check_room(owner)
            result = work(call, process, request)
        except KvstrataError as error:
            return self._end(call, self._replies.error(call.seq, error), None, sender)
        except Exception as error:
            return self._end(call, self._replies.our_mistake(call.seq, error), None, sender)
        if isinstance(result, tuple):
            return self._end(call, encode(result[0]), result[1], sender)
        deadline_ms = getattr(request, "deadline_ms", MAX_DEADLINE_MS)
        self._running.begin(call, result, deadline_ms / 1000, owner, started_s)
        return None

    def _end(self, call: Call, frame: bytes, effect: Effect | None, sender: Sender) -> bytes | None:
        """Keep the outcome of a request that ended at once. Returns the reply for the connection it came over."""
        return frame if sender in self._effects.finish(call, frame, effect) else None

    def _undecodable(self, frame: bytes, error: Exception) -> bytes:
        """The error for a message that is no request, with the sender's seq if it can be read."""
        size_bytes = len(frame)
        self._log.repeated(logging.WARNING, "undecodable", "bad_message", error=error, size_bytes=size_bytes)
        seq, op = 0, ""
        if size_bytes <= HEAD_BYTES:
            head = _decoded(_HEAD, frame) or _decoded(_OP, frame)
            op = head.op if head is not None else ""
            seq = head.seq if isinstance(head, _Head) and 0 <= head.seq <= MAX_SEQ else 0
        if not frame:
            return self._replies.error(
                seq, BadRequest("message: it must have one frame, which holds an array", field="message")
            )
        fields = _FIELDS.get(op)
        if op and fields is None:
            known = ", ".join(sorted(_FIELDS))
            bad = BadRequest(f"op: {op[:40]!r} is unknown; this server knows {known}", field="op")
            return self._replies.error(seq, bad)
        text, _, where = str(error).partition(" - at `$[")
        match = re.match(r"(\d+)\]([^`]*)", where)
        field = "message"
        if match and fields:
            index = int(match[1])
            field = ("op", *fields)[index] + match[2] if index <= len(fields) else "message"
        return self._replies.error(seq, BadRequest(f"{field}: {text}", field=field))


_TAKES_TIME = frozenset({Lookup, Reserve, Corrupt})
"""Requests that may become tasks. None of them gives anything back, so they may be refused for lack of room."""
_OPS: dict[type[Request], str] = {
    kind: str(kind.__struct_config__.tag) for kind in typing.get_args(AnyRequest)
}
OPERATIONS = frozenset(_OPS.values())
"""Names of all operations."""
_FIELDS: dict[str, tuple[str, ...]] = {op: kind.__struct_fields__ for kind, op in _OPS.items()}
"""Operation → names of its fields after the operation's name."""


H = TypeVar("H", bound=_Op)


def _decoded(decoder: msgspec.msgpack.Decoder[H], frame: bytes) -> H | None:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
