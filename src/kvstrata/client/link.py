"""The conversation with one server: attach, RPC connection, repetition, breaker.  All of it runs in one own thread.

    state       means                                           leaves it by
    ----------  ----------------------------------------------  ---------------------------------------------------
    ABSENT      a second thread tries to attach, every 250 ms   attach succeeds → SETUP
    SETUP       attached, hello sent                            hello answered → CONNECTED; socket closed → ABSENT
    CONNECTED   requests go out (while the breaker is closed)   socket closed or unknown session → ABSENT

Invariants
1. Other threads only `post`; everything else of this class belongs to the I/O thread.
2. The thread never waits for anything but its poll: attaching, which may block, has a thread of its own that lives
   only in ABSENT.
3. A reply of another epoch than the attached one is dropped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from kvstrata import __version__
from kvstrata.client.breaker import Breaker
from kvstrata.client.requests import Kind, Pending, RequestTable
from kvstrata.errors import ConfigError, KvstrataError, Unavailable, UnknownSession, WrongVersion
from kvstrata.memory.attach.client import Attachment, attach, process_locks
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.rpc import wire
from kvstrata.rpc.zmq_client import Dealer, Waiter

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 1.0
ATTACH_RETRY_FIRST_S = 0.02
ATTACH_RETRY_LAST_S = 0.25
"""Between tries while nobody answers: caching is back within a second of the server."""
GOODBYE_TIMEOUT_S = 0.3
ATTACH_REFUSED_RETRY_S = 2.0
"""After a refusal (other layout, no free row, other version), which trying soon would not change."""
FRAMES_PER_PASS = 256
LONGEST_POLL_S = 1.0


class LinkOwner(Protocol):
    """What the link calls, always in the I/O thread."""

    def attach_request(self, old_epoch: int) -> wire.AttachRequest:
        """The request to attach with (called in the attaching thread). Raises ConfigError for a bad token file."""

    def link_attached(self, attachment: Attachment, old_epoch: int) -> None:
        """Before any message: map the pool. May raise KvstrataError or OSError, which ends this attachment.

        With another epoch than the old one, what is under way to the old server fails right afterwards.
        """

    def link_ready(self, hello: wire.HelloReply) -> None:
        """Requests may go out."""

    def link_silent(self) -> None:
        """The server does not answer, or is gone: nobody shall wait for it. ASK requests have failed already."""

    def link_orphaned(self, leases: list[tuple[bytes, int]]) -> None:
        """Who looked these leases up is gone: the own share ends."""

    def link_revoked(self, lookups: list[int]) -> None:
        """The server asks for the leases of these own lookups."""

    def live_lookups(self) -> list[int]:
        """Numbers of the lookups still wanted."""

    def device_copies(self) -> wire.DeviceCopies | None:
        """What the server is told of them; None where blocks are in host memory."""

    def link_due_s(self) -> float:
        """When `link_pass` has something to do without anything else happening."""

    def link_pass(self, now_s: float) -> None:
        """Once per pass of the loop, after all that was received was handled."""

    def link_died(self) -> None:
        """The I/O thread ends by a mistake of ours; finish what others wait for."""


class Link:
    """See the module. `session` are 16 bytes that name this process to the server, for life."""

    def __init__(self, socket_dir: Path, session: bytes, owner: LinkOwner) -> None:
        self.table = RequestTable()
        self.breaker = Breaker()
        self.session = session
        self.epoch = 0
        """Of the last attachment; stays after it is lost."""
        self.connected = False
        self.error = "not started"
        self._socket_dir = socket_dir
        self._owner = owner
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """-1 once it is closed."""
        # Reentrant: a finaliser may post while this thread does.
        self._wake_lock = threading.RLock()
        self._watched: dict[int, Callable[[], None]] = {}
        self._waiter: Waiter | None = None
        self._dealer: Dealer | None = None
        self._attachment: Attachment | None = None
        self._copies_told: wire.DeviceCopies | None = None
        self._stop_attaching = threading.Event()
        self._attacher: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._bye = False
        self._dead = False

    # From any thread.

    @property
    def usable(self) -> bool:
        """Whether a request sent now has a fair chance of an answer."""
        return self.connected and not self.breaker.is_open

    @property
    def alive(self) -> bool:
        """Whether posted calls will run."""
        return self._thread is not None and self._thread.is_alive() and not self._dead

    def start(self, watch: dict[int, Callable[[], None]]) -> None:
        """Start the I/O thread. It calls `watch[fd]` whenever that descriptor is readable."""
        assert self._thread is None, "a link starts once"
        self._watched = dict(watch)
        self.error = "no answer yet"
        self._thread = threading.Thread(target=self._run, name="kvstrata-io", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the I/O thread soon, or here and now when that thread has ended. Never blocks."""
        self._inbox.append(call)
        with self._wake_lock:
            if not self._dead:
                if not self._woken:
                    self._woken = True
                    os.eventfd_write(self._wake_fd, 1)
                return
        self._drain()

    def close(self) -> None:
        """Of a link whose I/O thread was never started, or has ended. Idempotent."""
        with self._wake_lock:
            self._dead = True
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def stop(self, *, bye: bool) -> None:
        """End the I/O thread; with `bye` the server is told that this process touches nothing any more."""

        def end() -> None:
            self._bye = bye
            self._stopping = True

        self.post(end)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; whether the I/O thread ended. (The other one may still wait for a server's answer.)"""
        ends_s = time.monotonic() + timeout_s
        for thread in (self._thread, self._attacher):
            if thread is not None:
                thread.join(max(0.0, ends_s - time.monotonic()))
        return self._thread is None or not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child: no thread of ours runs here, and this process is nobody to the server."""
        self._wake_lock = threading.RLock()  # the one of the parent may have been taken when it forked
        self._inbox.clear()
        self.connected = False
        self.close()

    # In the I/O thread.

    def ask(self, pending: Pending) -> None:
        """Take up a request; an ASK fails at once while the server is silent or too many are under way."""
        if pending.kind is Kind.ASK and not self.usable:
            pending.failed(Unavailable(f"the cache server is not answering: {self.error or 'silent'}"))
        elif not self.table.add(pending):
            pending.failed(Unavailable("too many requests are under way"))

    def _run(self) -> None:
        waiter = self._waiter = Waiter()
        try:
            waiter.watch(self._wake_fd)
            for fd in self._watched:
                waiter.watch(fd)
            self._start_attaching()
            while not self._stopping:
                self._pass(waiter)
        except Exception:
            # Supervisor of this thread: a mistake of ours must not leave the engine waiting.
            log.exception("the cache client stops: its I/O thread failed; the engine goes on without a cache")
            self.error = "the I/O thread failed, see the log"
            self._owner.link_died()
        finally:
            self._dead = True
            self.connected = False
            self._stop_attaching.set()
            if self._attachment is not None:
                if self._bye:
                    self._attachment.goodbye(GOODBYE_TIMEOUT_S)
                self._attachment.close()
                self._attachment = None
            waiter.close()
            self.close()
            self._drain()

    def _drain(self) -> None:
        for _ in range(len(self._inbox)):
            try:
                call = self._inbox.popleft()
            except IndexError:  # after the end, several threads may come here
                return
            call()

    def _pass(self, waiter: Waiter) -> None:
        frames, descriptors = waiter.wait(0.0 if self._inbox else self._timeout_s(time.monotonic()))
        for fd in descriptors:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd in self._watched:
                self._watched[fd]()
            else:
                self._lose("the server closed the connection")
        self._woken = False
        self._drain()
        now_s = time.monotonic()
        # An answer that came since the wait is no silence, however long this thread has slept since.
        if self._dealer is not None and (frames or self.breaker.check_due_s() <= now_s):
            self._receive(self._dealer)
        if self.breaker.check(now_s):
            log.warning("the cache server does not answer; going on without it until it does")
            self._silence("the server does not answer")
        self.table.expire(now_s)
        self._owner.link_pass(now_s)
        if self._dealer is not None:
            self._send(self._dealer, now_s)

    def _timeout_s(self, now_s: float) -> float:
        due_s = now_s + LONGEST_POLL_S
        if self._dealer is not None:
            due_s = min(
                due_s,
                self._owner.link_due_s(),
                self.breaker.check_due_s(),
                self.breaker.ping_due_s(self.table.awaited),
            )
            if self._may_send:
                due_s = min(due_s, self.table.due_s())
        return max(0.0, due_s - now_s)

    @property
    def _may_send(self) -> bool:
        """A silent server gets nothing but pings, lest its queue fills with repeats; a fresh one is set up."""
        return not self.breaker.is_open or not self.connected

    def _send(self, dealer: Dealer, now_s: float) -> None:
        if self._may_send:
            for pending, frame in self.table.to_send(now_s):
                if dealer.try_send(frame):
                    self.table.sent(pending, now_s)
                else:
                    self.table.not_sent(pending, now_s)
        if self.breaker.ping_due_s(self.table.awaited) <= now_s:
            live = self._owner.live_lookups()
            named = live if len(live) <= wire.MAX_LIVE else None
            copies = self._owner.device_copies()
            news = None if copies == self._copies_told else copies
            if dealer.try_send(wire.encode(wire.Ping(self.session, self.table.next_seq(), named, news))):
                self._copies_told = copies
            self.breaker.pinged(time.monotonic())

    def _receive(self, dealer: Dealer) -> None:
        for frame in dealer.receive(FRAMES_PER_PASS):
            try:
                reply = wire.decode_reply(frame)
            except msgspec.MsgspecError as error:
                log.warning("dropped a reply that is none of the protocol: %s", error)
                continue
            if reply.epoch != self.epoch:
                continue
            was_open = self.breaker.is_open
            self.breaker.heard()
            if was_open and self.connected:
                log.info("the cache server answers again")
            if isinstance(reply, wire.Pong):
                if reply.orphaned:
                    self._owner.link_orphaned(reply.orphaned)
                if reply.revoked:
                    self._owner.link_revoked(reply.revoked)
            elif isinstance(self.table.reply(reply), UnknownSession):
                self._lose("the server does not know this session any more")
                return

    def _silence(self, why: str) -> None:
        self.table.fail_all(Unavailable(why), Kind.ASK)
        self._owner.link_silent()

    def _lose(self, why: str) -> None:
        """To ABSENT."""
        if self._attachment is None or self._waiter is None:
            return
        log.warning("lost the cache server (%s); going on without it until it is back", why)
        self._waiter.unwatch(self._attachment.fileno())
        self._waiter.disconnect()
        self._dealer = None
        self._attachment.close()
        self._attachment = None
        self.connected = False
        self.error = why
        self.breaker.trip()
        self.table.fail_all(Unavailable(why), Kind.SETUP)
        self._silence(why)
        self._start_attaching()

    def _start_attaching(self, wait_s: float = 0.0) -> None:
        self._attacher = threading.Thread(
            target=self._attach_until_done, args=(wait_s,), name="kvstrata-attach", daemon=True
        )
        self._attacher.start()

    def _attach_until_done(self, wait_s: float) -> None:
        """Body of the attaching thread."""
        retry_s = ATTACH_RETRY_FIRST_S
        while not self._stop_attaching.wait(wait_s):
            try:
                request = self._owner.attach_request(self.epoch)
                attachment = attach(self._socket_dir, request, process_locks(), ATTACH_TIMEOUT_S)
            except Unavailable as error:
                self.error = error.message
                wait_s, retry_s = retry_s, min(2 * retry_s, ATTACH_RETRY_LAST_S)
            except KvstrataError as error:
                self._refused(error)
                wait_s = ATTACH_REFUSED_RETRY_S
            else:
                self.post(partial(self._attached, attachment))
                return

    def _refused(self, error: KvstrataError) -> None:
        text = f"the cache server refused this process ({error.code}): {error.message}"
        if isinstance(error, ConfigError):  # raised on this side
            text = f"cannot attach to the cache server ({error.code}): {error.message}"
        if text != self.error:
            log.error("%s", text)
        self.error = text

    def _attached(self, attachment: Attachment) -> None:
        """To SETUP."""
        assert self._waiter is not None
        if self._stopping:
            attachment.goodbye(GOODBYE_TIMEOUT_S)
            return
        old_epoch = self.epoch
        try:
            self._owner.link_attached(attachment, old_epoch)
            self._dealer = self._waiter.connect(f"ipc://{self._socket_dir / RPC_SOCKET}")
        except (KvstrataError, OSError) as error:
            self.error = f"attached, but cannot use the pool: {error}"
            log.error("%s", self.error)
            attachment.goodbye(GOODBYE_TIMEOUT_S)
            self._start_attaching(ATTACH_REFUSED_RETRY_S)
            return
        self.epoch = attachment.epoch
        if self.epoch != old_epoch:
            self.table.fail_all(Unavailable("the server restarted"), Kind.SETTLE)
        self._attachment = attachment
        self._copies_told = None
        attachment.close_pool_fds()
        self._waiter.watch(attachment.fileno())
        self.table.repeat_now()
        self.ask(
            Pending(
                Kind.SETUP,
                lambda seq, _: wire.Hello(
                    self.session, seq, wire.PROTOCOL_VERSION, f"kvstrata {__version__} python"
                ),
                self._greeted,
                lambda error: self._refused(error) if not isinstance(error, Unavailable) else None,
            )
        )

    def _greeted(self, reply: wire.AnyReply) -> None:
        """To CONNECTED."""
        if not isinstance(reply, wire.HelloReply) or reply.protocol != wire.PROTOCOL_VERSION:
            self._refused(
                WrongVersion(
                    f"the server does not speak protocol version {wire.PROTOCOL_VERSION}: {reply!r:.200}"
                )
            )
            return
        self.connected = True
        self.error = ""
        log.info("connected to cache server %s, epoch %d", reply.instance_id, self.epoch)
        self._owner.link_ready(reply)
