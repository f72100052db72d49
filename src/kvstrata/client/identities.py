"""Request identities: made at once, declared to each server in the background.  Also learns the engine's slices."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from functools import partial

from kvstrata.client.calls import Declared, Identity
from kvstrata.client.link import Link
from kvstrata.client.requests import Kind, Pending
from kvstrata.errors import InternalError, KvstrataError, Refused, Unavailable, UnknownSession, WrongVersion
from kvstrata.rpc import wire
from kvstrata.types import RequestIdentity

log = logging.getLogger(__name__)

KEPT_IDENTITIES = 1024
"""Below what a server keeps per session (4,096)."""
REPLAYED_IDENTITIES = 64
"""Declared anew at once after a restart, the latest used first; others with their next request."""
MISTAKE_RETRY_S = 1.0
"""After an `internal` error; the next request of the identity has it declared again."""
SLICES_RETRY_FIRST_S = 0.05
SLICES_RETRY_LAST_S = 0.5


class IdentityTable:
    """All identities of one process."""

    def __init__(self, link: Link, slices: tuple[bytes, ...]) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._known: OrderedDict[RequestIdentity, Identity] = OrderedDict()
        self._asked: set[Identity] = set()
        self.slices = slices
        """Digests of all slices of the engine, sorted; empty until all its workers have attached."""
        self._slices_retry_s = SLICES_RETRY_FIRST_S
        self._slices_due_s = math.inf

    def get(self, request: RequestIdentity) -> Identity | None:
        """The identity of this request if known. Any thread."""
        with self._lock:
            identity = self._known.get(request)
            if identity is not None:
                self._known.move_to_end(request)
            return identity

    def put(self, identity: Identity) -> Identity:
        """Keep a new one, or the equal one that another thread put first. Any thread."""
        with self._lock:
            kept = self._known.setdefault(identity.request, identity)
            if len(self._known) > KEPT_IDENTITIES:
                self._known.popitem(last=False)
            return kept

    def abandon(self) -> None:
        """In a forked child: a thread that does not exist here may have held the lock."""
        self._lock = threading.Lock()

    # In the I/O thread.

    def declared(self, identity: Identity) -> Declared | None:
        """What the present server knows it by; None: it is being told, and unsent requests are woken then.

        Raises Refused when this server has refused it; a mistake of the server counts as that for a while only.
        """
        known = identity.declared
        if known is not None and known.epoch == self._link.epoch:
            return known
        if self._refused(identity):
            raise Refused(identity.error)
        self.declare(identity)
        return None

    def declare(self, identity: Identity) -> None:
        """Tell the server, unless that is under way."""
        if identity in self._asked or not self._link.connected:
            return
        self._asked.add(identity)
        session = self._link.session
        self._link.ask(
            Pending(
                Kind.SETUP,
                lambda seq, _: wire.Identify(session, seq, identity.request),
                partial(self._answered, identity),
                partial(self._failed, identity),
            )
        )

    def replay(self) -> None:
        """A new server: tell it the identities used last."""
        with self._lock:
            latest = list(self._known.values())[-REPLAYED_IDENTITIES:]
        for identity in reversed(latest):
            self.declare(identity)

    def due_s(self) -> float:
        """When `tick` has something to do."""
        return self._slices_due_s

    def tick(self, now_s: float) -> None:
        """While slices are missing, ask again from time to time: workers attach one after another."""
        if now_s < self._slices_due_s:
            return
        self._slices_due_s = math.inf
        if self.slices:
            return
        with self._lock:
            known = list(self._known.values())
        # A refused identity is never answered with slices, so the latest one that this server accepts is asked for.
        latest = next((each for each in reversed(known) if not self._refused(each)), None)
        if latest is None:
            self._ask_slices_later()
        else:
            self.declare(latest)

    def _answered(self, identity: Identity, reply: wire.AnyReply) -> None:
        self._asked.discard(identity)
        if not isinstance(reply, wire.IdentifyReply) or reply.root != identity.root:
            self._failed(
                identity, WrongVersion("the server derives another root: versions of both sides differ")
            )
            return
        identity.error = ""
        identity.declared = Declared(reply.epoch, reply.identity_id)
        if reply.complete and not self.slices:
            self.slices = tuple(reply.slices)
            self._slices_retry_s = SLICES_RETRY_FIRST_S
        elif not self.slices:
            self._ask_slices_later()
        self._link.table.wake_unsent()

    def _failed(self, identity: Identity, error: KvstrataError) -> None:
        self._asked.discard(identity)
        if isinstance(error, (Unavailable, UnknownSession)):
            return  # the connection is lost; told anew to the next one
        if identity.error != error.message:
            # A salt is a secret of whoever sent it.
            log.error(
                "the server refused the identity with adapter %r, tenant %r and %s salt (%s): %s",
                identity.request.adapter,
                identity.request.tenant,
                "a" if identity.request.salt else "no",
                error.code,
                error.message,
            )
        identity.error = error.message
        identity.refused_epoch = self._link.epoch
        mistake = isinstance(error, InternalError)
        identity.refused_until_s = time.monotonic() + MISTAKE_RETRY_S if mistake else math.inf
        self._link.table.wake_unsent()
        if not self.slices:
            self._ask_slices_later()

    def _refused(self, identity: Identity) -> bool:
        """Whether the present server has refused it, for good or for a while that is not over."""
        refused = identity.refused_epoch == self._link.epoch and time.monotonic() < identity.refused_until_s
        return bool(identity.error) and refused

    def _ask_slices_later(self) -> None:
        self._slices_due_s = time.monotonic() + self._slices_retry_s
        self._slices_retry_s = min(2 * self._slices_retry_s, SLICES_RETRY_LAST_S)
