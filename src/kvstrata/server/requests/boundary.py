"""The RPC boundary: each frame gets one reply, whatever it holds.

    frame ─▶ head ─▶ proven? ─▶ decode ─▶ permitted? ─▶ outcome kept? ─▶ verb ─▶ reply
                        │          │          │             │              └─ or a task, with the request's deadline
                        └──────────┴─ error ◀─┴─────────────┘                 (running.py)

Rules:

1. Every message that has a return address gets one reply per arrival: its outcome, the outcome kept from an earlier
   arrival, or an error.  A request that is still running is answered when it ends or at its deadline, on every
   connection over which it came.
2. A frame that names a session must prove that the session sent it (rpc/frame.py).  Otherwise the frame is refused
   before it is decoded, and nothing is done or remembered in the session's name.
3. A ping or an error touches only memory of this process.
4. Only here and in running.py does an unexpected exception become a reply (`internal`); the log has the trace.
"""

from __future__ import annotations

import logging
import re
import time
import typing
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from kvstrata import failpoints
from kvstrata.errors import BadRequest, KvstrataError, NotPermitted, UnknownSession
from kvstrata.observability.logging import EventLog
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.processes import AttachedProcess, ProcessTable
from kvstrata.rpc.frame import MAX_UNPROVEN_BYTES, PROOF_BYTES, SCAN, Head, check_limits, proves
from kvstrata.rpc.session import Call, Effect, Sessions, Verdict
from kvstrata.rpc.wire import (
    MAX_DEADLINE_MS,
    NO_SESSION,
    Abort,
    AnyRequest,
    Cancel,
    Commit,
    Corrupt,
    Hello,
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
from kvstrata.rpc.zmq_server import Address
from kvstrata.server.requests.effects import Effects
from kvstrata.server.requests.handlers import Handlers
from kvstrata.server.requests.lookup import Lookups
from kvstrata.server.requests.reserve import Reserving
from kvstrata.server.requests.running import KeptOutcome, Replies, Running
from kvstrata.types import shown_name

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
        counters: ServerCounters,
    ) -> None:
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

    def on_frame(self, address: Address, frame: bytes | memoryview) -> bool:
        """Answer one frame, now or when its task has ended. Returns False if it was refused unread."""
        started_s = time.perf_counter()
        found = SCAN(frame)
        proof, _, session, _, fault = found
        sender = self._processes.get(session)
        try:
            # Most frames need no further check: they are whole, and their session and proof are right.
            if fault or sender is None or not proves(proof, sender.secret):
                self._check_sender(len(frame), Head(*found), sender)
            request = decode_request(frame[PROOF_BYTES:] if proof else frame)
        except KvstrataError as error:
            self._replies.send_error(address, self._replies.error(found[3], error))
            return False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._replies.send_error(address, self._undecodable(Head(*found), len(frame), error))
            return False
        kind = type(request)
        op = _OPS[kind]
        failpoints.hit(op, "received")
        try:
            if type(request) is Ping:
                reply: bytes | None = self._handlers.ping(request)
            else:
                reply = self._dispatch(address, request, op, sender, started_s)
        except KvstrataError as error:
            reply = self._replies.error(request.seq, error)
        except Exception as error:
            reply = self._replies.our_mistake(request.seq, error)
        if reply is not None:
            self._replies.send(op, (address,), reply)
            self._replies.ended(op, started_s)
        if kind is Lookup:
            self._lookups.note_answered()
        elif type(request) is Ping and request.misses and sender is not None:
            self._lookups.note_missed(sender, request.misses)
        return True

    def on_frame_count(self, address: Address, count: int) -> bytes:
        """The error for a message that does not have exactly one frame."""
        error = BadRequest(
            f"message: has {count} frames, must have 1; send from a DEALER socket without a delimiter",
            field="message",
        )
        return self._replies.error(0, error)

    def _check_sender(self, size_bytes: int, head: Head, process: AttachedProcess | None) -> None:
        """Raises unless the frame comes from the session that it names, or from none, and may be decoded."""
        if head.session and head.session != NO_SESSION:
            if process is None:
                raise UnknownSession(
                    "session: not attached to this instance; attach, then send again", field="session"
                )
            if not proves(head.proof, process.secret):
                self._counters.wrong_proofs += 1
                self._log.repeated(
                    logging.WARNING,
                    "wrong proof",
                    "wrong_proof",
                    session=shown_name(head.session),
                    pid=process.pid,
                )
                raise NotPermitted(
                    "session: the frame does not prove that it comes from this session; send the secret of its "
                    "attach reply before the message, as protocol 5 asks",
                    field="session",
                )
        elif size_bytes > MAX_UNPROVEN_BYTES:
            raise BadRequest(
                f"message: {size_bytes} bytes, but a frame without a session has at most {MAX_UNPROVEN_BYTES}; attach "
                "first",
                field="message",
            )
        check_limits(head)

    def _dispatch(
        self,
        address: Address,
        request: AnyRequest,
        op: str,
        process: AttachedProcess | None,
        started_s: float,
    ) -> bytes | None:
        counters = self._counters.requests
        counters[op] = counters.get(op, 0) + 1
        if type(request) is Hello:
            return encode(self._handlers.hello(request, process))
        if process is None:
            raise NotPermitted(f"session: {op} needs an attached session", field="session")
        kind = type(request)
        if type(request) is Retrieve:
            return encode(self._handlers.retrieve(request, process))
        work = self._kept[kind]
        receipt = self._sessions.request(
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
        call, owner = receipt.call, process.owner
        try:
            if kind in _TAKES_TIME:
                self._running.check_room(owner)
            result = work(call, process, request)
        except KvstrataError as error:
            return self._end(call, self._replies.error(call.seq, error), None, address)
        except Exception as error:
            return self._end(call, self._replies.our_mistake(call.seq, error), None, address)
        if isinstance(result, tuple):
            return self._end(call, encode(result[0]), result[1], address)
        deadline_ms = getattr(request, "deadline_ms", MAX_DEADLINE_MS)
        self._running.begin(call, result, deadline_ms / 1000, owner, started_s)
        return None

    def _end(self, call: Call, frame: bytes, effect: Effect | None, address: Address) -> bytes | None:
        """Keep the outcome of a request that ended at once. Returns the reply for the connection it came over."""
        return frame if address in self._effects.finish(call, frame, effect) else None

    def _undecodable(self, head: Head, size_bytes: int, error: Exception) -> bytes:
        """The error for a frame that is not a request, with the sender's seq if it could be read."""
        seq, op = head.seq, head.op.decode(errors="replace")
        self._log.repeated(logging.WARNING, "undecodable", "bad_message", error=error, size_bytes=size_bytes)
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
