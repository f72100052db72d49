"""The connection to one server: it attaches, sends requests and detects silence, all on an I/O thread of its own.

The process attaches and sends its requests over a single connection.  A second thread exists only while no server is
attached: it tries to attach.

Invariants
1. Other threads only call `post`; all other state and methods of `Link` belong to the I/O thread.
2. The I/O thread waits only in its poll: attaching may block, so it has a thread of its own.
3. A connection belongs to one epoch of the server.

A request (`Pending`) gets its number when it is sent, once.  A connection delivers each message once and in order, so
no request is repeated; if the connection ends first, the outcome of the request is unknown.  Besides a reply, these
events end a request:

    kind   deadline   server silent   connection lost
    -----  ---------  --------------  ---------------
    ASK    fails      fails           fails
    TELL   -          kept            fails

ASK requests are lookups and reserves: a caller waits for them.  TELL requests are all others; those that are made while
no server is attached are sent to the next one.

4. For each request that was added and not removed, either `replied` or `failed` is called, once.
5. At most `MAX_ASKS` ASK requests are under way.

While the server answers, requests are sent.  While it is silent (`Silence`), callers are answered at once, with misses.
A client process that did not run for a while (stopped, no free core, its interpreter locked) finds a ping overdue
although the server answered it long ago: the reply is still unread in this process.  So a check that runs more than
`LATE_S` after it was due does not yet call the server silent; the next check, `SECOND_LOOK_S` later, does so if no
reply was read by then.

Pings are sent every `TELL_PING_S` while they have something to report, every `BUSY_PING_S` while requests are
outstanding, else every `IDLE_PING_S`.  A silent server is pinged every `SILENT_PING_S`, so a server that runs again is
noticed within that time.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvstrata.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    KvstrataError,
    Unavailable,
    from_wire,
)
from kvstrata.observability.logging import Thinning
from kvstrata.patience import patience
from kvstrata.rpc import wire
from kvstrata.rpc.wire import DeviceCopies, LoadRate
from kvstrata.session.attach import Attachment, attach_in, process_locks

if TYPE_CHECKING:
    from kvstrata.client.client import CacheClient

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 1.0
ATTACH_RETRY_FIRST_S = 0.02
ATTACH_RETRY_LAST_S = 0.25
"""Maximum pause between attempts while no server answers, so that caching resumes within a second of its return."""
GOODBYE_TIMEOUT_S = 0.3
ATTACH_REFUSED_RETRY_S = 2.0
"""Pause after a refusal (other layout, no free row, other version), which an early retry would not change."""
REPEATED_S = 600.0
"""Interval of log lines about a server that is still absent."""
LONGEST_POLL_S = 1.0
MAX_ASKS = 1024
TELL_PING_S = 0.01
BUSY_PING_S = 0.1
IDLE_PING_S = 1.0
SILENT_PING_S = 0.5
PING_PATIENCE_S = 0.3
LATE_S = 0.05
SECOND_LOOK_S = 0.1


class Kind(enum.Enum):
    """The kind of a request decides what ends it besides an answer; see the module."""

    ASK = enum.auto()
    TELL = enum.auto()


class Pending(msgspec.Struct, eq=False):
    """One request under way."""

    kind: Kind
    message: Callable[[int, int], wire.AnyRequest | None]
    """`message(seq, remaining_ms)` returns the request, or None while it cannot be sent yet (`wake_unsent`). It may
    raise KvstrataError, which fails the request."""
    replied: Callable[[wire.AnyReply], None]
    failed: Callable[[KvstrataError], None]
    deadline_s: float = math.inf
    seq: int = 0
    """Its number; 0 until it is sent."""
    waits: bool = False
    """Whether it cannot be sent yet."""


class RequestTable:
    """All requests of one session."""

    def __init__(self) -> None:
        self._last_seq = 0
        self._unsent: dict[Pending, None] = {}
        self._sent: dict[int, Pending] = {}
        self._asks = 0
        self._due_s = math.inf
        """Before this time no deadline passes and nothing can be sent."""

    def __len__(self) -> int:
        return len(self._sent) + len(self._unsent)

    @property
    def n_asks(self) -> int:
        """Number of lookups and reserves under way."""
        return self._asks

    @property
    def awaited(self) -> bool:
        """Whether any request waits for its answer."""
        return bool(self._sent)

    def next_seq(self) -> int:
        """A new number; pings, which are not in this table, take theirs directly."""
        self._last_seq += 1
        return self._last_seq

    def add(self, pending: Pending) -> bool:
        """Accept a request. Returns False, and does nothing, when too many ASKs are under way."""
        if pending.kind is Kind.ASK:
            if self._asks >= MAX_ASKS:
                return False
            self._asks += 1
        self._unsent[pending] = None
        self._due_s = -math.inf
        return True

    def remove(self, pending: Pending) -> None:
        """Forget a request without calling it back, sent or not. Idempotent."""
        if pending in self._unsent:
            del self._unsent[pending]
        elif self._sent.get(pending.seq) is pending:
            del self._sent[pending.seq]
        else:
            return
        if pending.kind is Kind.ASK:
            self._asks -= 1

    def wake_unsent(self) -> None:
        """Try the unsent requests again, because something that they wait for has changed."""
        for pending in self._unsent:
            pending.waits = False
        self._due_s = -math.inf

    def due_s(self) -> float:
        """The time at which `expire` or `to_send` must run next."""
        return self._due_s

    def expire(self, now_s: float) -> None:
        """Fail the requests whose deadline has passed."""
        if now_s < self._due_s:
            return
        for pending in [p for p in self._all() if p.deadline_s <= now_s]:
            self._fail(pending, DeadlineExceeded("no answer before the request's deadline"))

    def to_send(self, now_s: float) -> Iterator[bytes]:
        """Frames to send now, in this order; the caller sends each one that it takes, and may leave the others."""
        if now_s < self._due_s:
            return
        ready = [p for p in self._unsent if not p.waits]
        # Requests that a caller waits for go first.
        for pending in sorted(ready, key=lambda p: p.kind is not Kind.ASK) if len(ready) > 1 else ready:
            if pending not in self._unsent:
                continue  # the failure of an earlier request has ended this one
            seq = self._last_seq + 1
            remaining_s = min(pending.deadline_s - now_s, wire.MAX_DEADLINE_MS / 1000)
            try:
                message = pending.message(seq, max(0, int(remaining_s * 1000)))
            except KvstrataError as error:
                self._fail(pending, error)
                continue
            if message is None:
                pending.waits = True
                continue
            self._last_seq = pending.seq = seq
            del self._unsent[pending]
            self._sent[seq] = pending
            yield wire.encode(message)
        if all(p.waits for p in self._unsent):
            self._due_s = min((p.deadline_s for p in self._all()), default=math.inf)

    def reply(self, reply: wire.AnyReply) -> None:
        """Hand a reply to its request, if it is known."""
        pending = self._sent.get(reply.seq)
        if pending is None:
            return
        if isinstance(reply, wire.Error):
            self._fail(pending, from_wire(reply.code, reply.message, field=reply.field))
        else:
            self.remove(pending)
            pending.replied(reply)

    def fail_all(self, error: KvstrataError, *kinds: Kind) -> None:
        """Fail all requests of these kinds, except those that are added meanwhile."""
        for pending in [p for p in self._all() if p.kind in kinds]:
            self._fail(pending, error)

    def _all(self) -> list[Pending]:
        return [*self._sent.values(), *self._unsent]

    def _fail(self, pending: Pending, error: KvstrataError) -> None:
        self.remove(pending)
        pending.failed(error)


class Silence:
    """Decides whether the server of one link is silent. All times are seconds of one monotonic clock."""

    __slots__ = ("_due_s", "_last_ping_s", "_was_late", "silent", "spells")

    def __init__(self) -> None:
        self.silent = True
        """Whether callers get misses without a request to the server."""
        self.spells = 0
        """Number of times that the server fell silent after it had answered."""
        self._last_ping_s = -math.inf
        self._due_s = math.inf
        self._was_late = False

    def lost(self) -> None:
        """The connection is lost; the server counts as silent until a message arrives on the next one."""
        self.spells += not self.silent
        self.silent = True
        self._last_ping_s = -math.inf
        self._forget_pings()

    def heard(self) -> None:
        """A message of the server has arrived; it answers all pings so far."""
        self.silent = False
        self._forget_pings()

    def pinged(self, now_s: float) -> None:
        """A ping was sent."""
        self._last_ping_s = now_s
        self._due_s = min(self._due_s, now_s + patience(PING_PATIENCE_S))

    def check(self, now_s: float) -> bool:
        """Whether the server falls silent now. Call it after everything that arrived by `now_s` was reported.

        Returns True once for each silence.
        """
        if now_s < self.check_due_s():
            return False
        if not self._was_late and now_s > self._due_s + LATE_S:
            self._was_late = True
            self._due_s = now_s + patience(SECOND_LOOK_S)
            return False
        self.silent = True
        self.spells += 1
        return True

    def ping_due_s(self, busy: bool, tells: bool = False) -> float:
        """When the next ping is due; -inf: now. `busy`: requests are outstanding; `tells`: the ping has a report."""
        if self.silent:
            return self._last_ping_s + SILENT_PING_S
        return self._last_ping_s + (TELL_PING_S if tells else BUSY_PING_S if busy else IDLE_PING_S)

    def check_due_s(self) -> float:
        """When `check` may next change something; inf when no answer is awaited."""
        return math.inf if self.silent else self._due_s

    def _forget_pings(self) -> None:
        self._due_s = math.inf
        self._was_late = False


class Link:
    """One client's link to its server. `session`: 16 bytes that name this process as long as it lives.

    `places`: directories in which the server's sockets may lie, the configured one first.  `start_with`: the command
    that starts a server there, for the log.  One of the links of an engine `speaks`: it warns when the server is absent
    or lost; the other links log that at level INFO.

    The owner's parts need the link, so the link gets its owner only by `start`; before that nothing is received.
    """

    def __init__(self, places: Sequence[Path], session: bytes, start_with: str, *, speaks: bool) -> None:
        self.table = RequestTable()
        self.silence = Silence()
        self.session = session
        self.epoch = 0
        """Epoch of the last attachment, even after that attachment was lost."""
        self.error = "not started"
        self.engines_kv_bytes = 0
        """See `wire.Pong`; 0: unknown."""
        self.closing = False
        """The client accepts no more calls: it is being closed, or this is a forked child. Any thread may set it."""
        self.forked = False
        """This is a forked child, which must not touch what belongs to the parent."""
        self.connected = False
        """A server is attached, and its pool is mapped. Any thread may read it."""
        self._owner: CacheClient
        self._places = places
        self._start_with = start_with
        self._problem_level = logging.WARNING if speaks else logging.INFO
        self._absences = Thinning(REPEATED_S)
        self._losses = Thinning()
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """-1 once it is closed."""
        # Reentrant: a finaliser may post while this same thread is posting.
        self._wake_lock = threading.RLock()
        self._watched: dict[int, Callable[[], None]] = {}
        self._poll = select.poll()
        self._attachment: Attachment | None = None
        self._events = 0
        """The poll events registered for the connection."""
        self._reported_copies: DeviceCopies | None = None
        self._reported_rate: LoadRate | None = None
        self._reported_tokens_s = 0.0
        self._stop_attaching = threading.Event()
        self._retry_s = ATTACH_RETRY_FIRST_S
        self._attacher: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._bye = False
        self._dead = False

    # From any thread.

    @property
    def usable(self) -> bool:
        """Whether a server is attached and answers."""
        return self.connected and not self.silence.silent

    @property
    def accepts(self) -> bool:
        """Whether a caller's request is accepted now."""
        return self.usable and not self.closing

    @property
    def alive(self) -> bool:
        """Whether posted calls will run."""
        return self._thread is not None and self._thread.is_alive() and not self._dead

    def start(self, owner: CacheClient, watch: dict[int, Callable[[], None]]) -> None:
        """Start the I/O thread. It calls `watch[fd]` whenever that descriptor is readable."""
        assert self._thread is None, "a link starts once"
        self._owner = owner
        self._watched = dict(watch)
        self.error = "no answer yet"
        for fd in (self._wake_fd, *self._watched):
            self._poll.register(fd, select.POLLIN)
        self._thread = self._start_thread(self._run, "kvstrata-io")

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the I/O thread soon, or in the calling thread if the I/O thread has ended. Never blocks.

        In a forked child, `call` is dropped.
        """
        if self.forked:
            return
        self._inbox.append(call)
        with self._wake_lock:
            if not self._dead:
                if not self._woken:
                    self._woken = True
                    os.eventfd_write(self._wake_fd, 1)
                return
        self._drain()

    def close(self) -> None:
        """Free the link's descriptor once the I/O thread has ended or if it was never started. Idempotent."""
        with self._wake_lock:
            self._dead = True
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def stop(self, *, bye: bool) -> None:
        """End the I/O thread; with `bye` first tell the server that this process has finished with the pool."""

        def end() -> None:
            self._bye = bye
            self._stopping = True

        self.post(end)

    def join(self, timeout_s: float) -> bool:
        """Wait for both threads. Returns whether the I/O thread has ended; the attaching thread may still run."""
        ends_s = time.monotonic() + timeout_s
        for thread in (self._thread, self._attacher):
            if thread is not None:
                thread.join(max(0.0, ends_s - time.monotonic()))
        return self._thread is None or not self._thread.is_alive()

    def abandon(self) -> None:
        """Called in a forked child, which has none of our threads and is unknown to the server."""
        self.forked = self.closing = True
        self._wake_lock = threading.RLock()  # a thread of the parent may have held the old one at the fork
        self._inbox.clear()
        self.connected = False
        self.close()

    # In the I/O thread.

    def ask(self, pending: Pending) -> None:
        """Accept a request; an ASK fails at once while the server is silent or too many ASKs are under way."""
        if pending.kind is Kind.ASK and not self.usable:
            pending.failed(Unavailable(f"the cache server is not answering: {self.error or 'silent'}"))
        elif not self.table.add(pending):
            pending.failed(Unavailable("too many requests are under way"))

    def tell(self, message: Callable[[int, int], wire.AnyRequest | None]) -> None:
        """Accept a TELL request for whose answer nothing waits; see `Pending` for `message`."""
        self.ask(Pending(Kind.TELL, message, lambda reply: None, lambda error: None))

    def _run(self) -> None:
        try:
            self._start_attaching()
            while not self._stopping:
                self._pass(self._timeout_s(time.monotonic()))
        except Exception:
            # Supervisor of this thread: a bug must not leave the engine waiting.
            log.exception(
                "the cache client stops: its I/O thread failed; the engine continues without a cache"
            )
            self.error = "the I/O thread failed, see the log"
            self._owner.link_died()
        finally:
            self._end()

    def _end(self) -> None:
        self._dead, self.connected = True, False
        self._stop_attaching.set()
        if self._attachment is not None:
            if self._bye:
                self._attachment.goodbye(patience(GOODBYE_TIMEOUT_S))
            self._attachment.close()
            self._attachment = None
        self.close()
        self._drain()

    def _drain(self) -> None:
        for _ in range(len(self._inbox)):
            try:
                call = self._inbox.popleft()
            except IndexError:  # after the end, several threads may pop from the queue
                return
            call()

    def _start_thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        """Start a thread of this link. Tests that play both threads themselves replace this."""
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def _pass(self, timeout_s: float) -> None:
        """Wait for events, at most `timeout_s`, and handle everything that is due."""
        has_arrived = False
        for fd, _ in self._poll.poll(1000 * timeout_s):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd in self._watched:
                self._watched[fd]()
            else:
                has_arrived = True
        self._woken = False
        self._drain()
        now_s = time.monotonic()
        # Answers that arrived after the wait are read before the check for silence: this thread may have slept since.
        if self._attachment is not None and (has_arrived or self.silence.check_due_s() <= now_s):
            self._converse(self._attachment)
        if self.silence.check(now_s):
            self._say_lost("the cache server does not answer; continuing without it until it does")
            self._fell_silent("the server does not answer")
        self.table.expire(now_s)
        self._owner.link_pass(now_s)
        if self._attachment is not None:
            self._send(self._attachment, now_s)

    def _timeout_s(self, now_s: float) -> float:
        """Seconds until the next due time, if no event comes before."""
        if self._inbox:
            return 0.0
        due_s = now_s + LONGEST_POLL_S
        if self._attachment is not None:
            due_s = min(
                due_s,
                self._owner.link_due_s(),
                self.silence.check_due_s(),
                self._ping_due_s(),
            )
            if self._may_send(self._attachment):
                due_s = min(due_s, self.table.due_s())
        return max(0.0, due_s - now_s)

    def _ping_due_s(self) -> float:
        return self.silence.ping_due_s(self.table.awaited, bool(self._owner.lookups.pending_reports()))

    def _may_send(self, attachment: Attachment) -> bool:
        """Whether requests are sent, not only pings: not to a silent server, nor while the socket's buffer is full."""
        return not self.silence.silent and not attachment.link.unsent_bytes

    def _send(self, attachment: Attachment, now_s: float) -> None:
        try:
            self._send_all(attachment, now_s)
        except OSError as error:
            self._lose(f"the connection failed: {error}")
            return
        self._watch(attachment)

    def _send_all(self, attachment: Attachment, now_s: float) -> None:
        link = attachment.link
        if self._may_send(attachment):
            for frame in self.table.to_send(now_s):
                link.send(frame)
                if link.unsent_bytes:
                    break
        if self._ping_due_s() <= now_s:
            copies = self._owner.device_copies()
            news = None if copies == self._reported_copies else copies
            rate = self._owner.loads.rate()
            new_rate = None if rate == self._reported_rate else rate
            reports = self._owner.lookups.pending_reports()
            misses = [one for one in reports if isinstance(one, wire.Miss)]
            hints = [one for one in reports if isinstance(one, wire.Hint)]
            tokens_s = self._owner.prompt_tokens_s
            new_tokens_s = 0.0 if tokens_s == self._reported_tokens_s else tokens_s
            ping = wire.Ping(self.table.next_seq(), news, new_rate, misses, hints, new_tokens_s)
            if link.send(wire.encode(ping)):
                self._reported_copies, self._reported_rate, self._reported_tokens_s = copies, rate, tokens_s
                self._owner.lookups.drop_reported(len(reports))
            self.silence.pinged(time.monotonic())

    def _watch(self, attachment: Attachment) -> None:
        """Poll the connection for messages, and for writability if bytes are unsent."""
        events = select.POLLIN | (select.POLLOUT if attachment.link.unsent_bytes else 0)
        if events != self._events:
            self._events = events
            self._poll.register(attachment.fileno(), events)

    def _converse(self, attachment: Attachment) -> None:
        """Send unsent bytes, and handle messages that have arrived."""
        asks = self.table.n_asks
        try:
            attachment.link.flush()
            self._handle(attachment.link.receive())
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self._lose("the server closed the connection")
        except OSError as error:
            self._lose(f"the connection failed: {error}")
        if self.table.n_asks < asks:
            # A caller that waited for one of these answers has been woken, but without this it would wait for the GIL
            # until this thread's next poll.
            os.sched_yield()

    def _handle(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            try:
                reply = wire.decode_reply(frame)
            except msgspec.MsgspecError as error:
                log.warning("dropped an invalid message from the server: %s", error)
                continue
            if reply.epoch != self.epoch:
                continue
            was_silent = self.silence.silent
            self.silence.heard()
            if was_silent and self.connected:
                log.info("the cache server answers again")
            if isinstance(reply, wire.Pong):
                if reply.orphaned:
                    self._owner.link_orphaned(reply.orphaned)
                if reply.revoked:
                    self._owner.link_revoked(reply.revoked)
                if reply.engines_kv_bytes is not None:
                    self.engines_kv_bytes = reply.engines_kv_bytes
            else:
                self.table.reply(reply)

    def _fell_silent(self, why: str) -> None:
        self.table.fail_all(Unavailable(why), Kind.ASK)
        self._owner.link_silent()

    def _lose(self, why: str) -> None:
        """Drop the connection and attach again."""
        if self._attachment is None:
            return
        self._say_lost("lost the cache server (%s); continuing without it until it is back", why)
        self._absences.left_out("absent")  # the line above replaces it
        self._poll.unregister(self._attachment.fileno())
        self._events = 0
        self._attachment.close()
        self._attachment, self.connected = None, False
        self.error = why
        self.silence.lost()
        self.table.fail_all(Unavailable(why), Kind.TELL)
        self._fell_silent(why)
        self._start_attaching()

    def _start_attaching(self, wait_s: float = 0.0) -> None:
        self._retry_s = ATTACH_RETRY_FIRST_S
        self._attacher = self._start_thread(partial(self._attach_until_done, wait_s), "kvstrata-attach")

    def _attach_until_done(self, wait_s: float) -> None:
        """Body of the attaching thread."""
        while not self._stop_attaching.wait(wait_s):
            wait_s = self._try_to_attach()
            if wait_s == math.inf:
                return

    def _try_to_attach(self) -> float:
        """Try once. Returns the pause before the next attempt; inf if the process is attached."""
        try:
            request = self._owner.attach_request(self.epoch)
            attachment, place = attach_in(self._places, request, process_locks(), patience(ATTACH_TIMEOUT_S))
        except Unavailable as error:
            self._absent(error.message)
            wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, ATTACH_RETRY_LAST_S)
            return wait_s
        except KvstrataError as error:
            self._refused(error)
            return ATTACH_REFUSED_RETRY_S
        except Exception as error:
            # Supervisor of this thread: a bug must not leave the engine without a cache for ever.
            self._refused(InternalError(f"{type(error).__name__}: {error}"))
            return ATTACH_REFUSED_RETRY_S
        self.post(partial(self._attached, attachment, place))
        return math.inf

    def _absent(self, why: str) -> None:
        self.error = why
        self._absences.log(
            log,
            self._problem_level,
            "absent",
            "no cache server answers (%s); computing without a cache until one does. To start one, as uid %d: %s",
            *(why, os.geteuid(), self._start_with),
        )

    def _say_lost(self, text: str, *values: object) -> None:
        self._losses.log(log, self._problem_level, text, text, *values)

    def _refused(self, error: KvstrataError) -> None:
        text = f"the cache server refused this process ({error.code}): {error.message}"
        if isinstance(error, ConfigError):  # raised on this side
            text = f"cannot attach to the cache server ({error.code}): {error.message}"
        if text != self.error:
            log.error("%s", text)
        self.error = text

    def _attached(self, attachment: Attachment, place: Path) -> None:
        """Map the pool and connect; if that fails, release the attachment and try again."""
        if self._stopping:
            attachment.goodbye(patience(GOODBYE_TIMEOUT_S))
            return
        old_epoch = self.epoch
        try:
            self._owner.link_attached(attachment, old_epoch)
        except (KvstrataError, OSError) as error:
            self.error = f"attached, but cannot use the pool: {error}"
            log.error("%s", self.error)
            attachment.goodbye(patience(GOODBYE_TIMEOUT_S))
            self._start_attaching(ATTACH_REFUSED_RETRY_S)
            return
        if place != self._places[0]:
            log.info(
                "the cache server's sockets are in %s, not in %s: XDG_RUNTIME_DIR differs between server and engine",
                *(place, self._places[0]),
            )
        self.epoch = attachment.epoch
        if self.epoch != old_epoch:
            self.table.fail_all(Unavailable("the server restarted"), Kind.TELL)
        self._attachment, self.connected = attachment, True
        self.error = ""
        self._reported_copies = self._reported_rate = None
        self._reported_tokens_s = 0.0
        attachment.close_pool_fds()
        self._watch(attachment)
        self.silence.heard()  # the attach was answered
        self.table.wake_unsent()
        log.info("connected to cache server %s, epoch %d", attachment.instance_id, self.epoch)
        self._owner.link_ready(attachment, old_epoch)
        self._handle(attachment.early)
