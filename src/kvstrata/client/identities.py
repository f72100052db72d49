"""Request identities, usable at once and declared to each server in the background; and the engine's slices.

A caller gets an `Identity` without any message: keys can be computed from it right away.  The I/O thread declares the
identity to the attached server and keeps the id that this server gives it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from kvstrata.client.link import Kind, Link, Pending
from kvstrata.errors import (
    InternalError,
    KvstrataError,
    NotPermitted,
    Refused,
    Unavailable,
    WrongVersion,
)
from kvstrata.keys import ChunkHasher, MediaItem
from kvstrata.observability.logging import Thinning
from kvstrata.rpc import wire
from kvstrata.types import MAX_SPAN_CHUNKS, LayoutIdentity, RequestIdentity, identity_root

log = logging.getLogger(__name__)

KEPT_IDENTITIES = 1024
"""Maximum number of identities kept; a server keeps more per session (4,096)."""
REPLAYED_IDENTITIES = 64
"""Identities declared right after a server's restart, last used first; the others follow with their next request."""
MISTAKE_RETRY_S = 1.0
"""Time for which an identity counts as refused after a temporary error; then its next request declares it again."""
SLICES_RETRY_FIRST_S = 0.05
SLICES_RETRY_LAST_S = 0.5


class Declared(NamedTuple):
    """The answer of the server of one epoch to `identify`."""

    epoch: int
    identity_id: int


class Identity:
    """One request identity. Keys can be computed at once; the server's id follows in the background."""

    def __init__(self, table: IdentityTable, layout: LayoutIdentity, request: RequestIdentity) -> None:
        self._table = table
        self._layout = layout
        self.request = request
        self.root = identity_root(layout, request)
        """32 bytes, the start of the hash chain."""
        self.declared: Declared | None = None
        """The last answer, written by the I/O thread only; valid while its epoch is the current one."""
        self.error = ""
        """Why the server refused this identity; "": it did not. While refused, lookups miss and stores are refused."""
        self.forbidden = False
        """The server refused it because this process may not use its tenant."""
        self.refused_epoch = 0
        self.refused_until_s = math.inf
        """`time.monotonic()` from which the server that refused this identity may be asked again in the same epoch."""

    @property
    def ready(self) -> bool:
        """Whether the server of the current epoch knows this identity, and all slices of the engine are known."""
        declared = self.declared
        return declared is not None and declared.epoch == self._table.epoch and bool(self.slices)

    @property
    def slices(self) -> tuple[bytes, ...]:
        """Digests of the slices, in the order of extents in lookup results; empty until all workers have attached."""
        return self._table.slices

    @property
    def spans(self) -> tuple[int, ...]:
        """For each of `slices` how many of a hit's last chunks it needs, 0: all; () if every slice needs all."""
        return self._table.spans

    def hasher(self, media: Iterable[MediaItem] = ()) -> ChunkHasher:
        """A hasher for one request of this identity."""
        return ChunkHasher(
            self.root, self._layout.chunk_tokens, media, lookahead_tokens=self._layout.lookahead
        )


class IdentityTable:
    """All identities of one process, and the slices of its engine."""

    def __init__(self, link: Link, layout: LayoutIdentity, slices: tuple[bytes, ...]) -> None:
        """`slices` are the digests of the engine's slices if this process knows them all, else empty."""
        self._link = link
        self._layout = layout
        self._lock = threading.Lock()
        self._known: OrderedDict[RequestIdentity, Identity] = OrderedDict()
        self._asked: set[Identity] = set()
        self.slices = slices
        """Digests of all slices of the engine, sorted; empty until all its workers have attached."""
        self.spans: tuple[int, ...] = ()
        """See `Identity.spans`. Set before `slices`."""
        self._slices_retry_s = SLICES_RETRY_FIRST_S
        self._slices_due_s = math.inf
        self._thinning = Thinning()

    @property
    def epoch(self) -> int:
        """Epoch of the server attached last; 0 before the first attachment."""
        return self._link.epoch

    def identity(self, request: RequestIdentity) -> Identity:
        """The identity of requests like this one; the same object for equal requests. Any thread, never blocks."""
        with self._lock:
            known = self._known.get(request)
            if known is not None:
                self._known.move_to_end(request)
                return known
        fresh = Identity(self, self._layout, request)
        with self._lock:
            identity = self._known.setdefault(request, fresh)  # another thread may have been first
            if len(self._known) > KEPT_IDENTITIES:
                self._known.popitem(last=False)
        self._link.post(lambda: self.declare(identity))
        return identity

    def abandon(self) -> None:
        """Called in a forked child: replace the lock, which a thread of the parent may have held."""
        self._lock = threading.Lock()

    # In the I/O thread.

    def declared(self, identity: Identity) -> Declared | None:
        """The current server's number for the identity; None while the declaration is under way.

        Unsent requests are woken when the server has answered.  Raises Refused when this server has refused the
        identity; a temporary error counts as a refusal for `MISTAKE_RETRY_S` only.
        """
        known = identity.declared
        if known is not None and known.epoch == self._link.epoch:
            return known
        if self._refused(identity):
            raise Refused(identity.error)
        self.declare(identity)
        return None

    def declare(self, identity: Identity) -> None:
        """Declare the identity to the server, unless a declaration is under way."""
        if identity in self._asked or not self._link.connected:
            return
        self._asked.add(identity)
        self._link.ask(
            Pending(
                Kind.TELL,
                lambda seq, _: wire.Identify(seq, identity.request),
                partial(self._answered, identity),
                partial(self._failed, identity),
            )
        )

    def replay(self) -> None:
        """Declare the identities used last to a server that has just been attached."""
        with self._lock:
            latest = list(self._known.values())[-REPLAYED_IDENTITIES:]
        for identity in reversed(latest):
            self.declare(identity)

    def due_s(self) -> float:
        """The time (`time.monotonic`) at which `tick` has something to do; inf: never."""
        return self._slices_due_s

    def tick(self, now_s: float) -> None:
        """While slices are missing, declare an identity again after growing pauses: the answer names the slices."""
        if now_s < self._slices_due_s:
            return
        self._slices_due_s = math.inf
        if self.slices:
            return
        with self._lock:
            known = list(self._known.values())
        # A refused identity is never answered with slices, so the latest identity that this server accepts is declared.
        latest = next((each for each in reversed(known) if not self._refused(each)), None)
        if latest is None:
            self._ask_slices_later()
        else:
            self.declare(latest)

    def _answered(self, identity: Identity, reply: wire.AnyReply) -> None:
        self._asked.discard(identity)
        if (
            not isinstance(reply, wire.IdentifyReply)
            or reply.root != identity.root
            or len(reply.spans) not in (0, len(reply.slices))
            or not all(0 <= span <= MAX_SPAN_CHUNKS for span in reply.spans)
        ):
            self._failed(
                identity,
                WrongVersion("the server derives another root: client and server differ in version"),
            )
            return
        identity.error, identity.forbidden = "", False
        identity.declared = Declared(reply.epoch, reply.identity_id)
        if reply.complete and not self.slices:
            self.spans = tuple(reply.spans)
            self.slices = tuple(reply.slices)
            self._slices_retry_s = SLICES_RETRY_FIRST_S
        elif not self.slices:
            self._ask_slices_later()
        self._link.table.wake_unsent()

    def _failed(self, identity: Identity, error: KvstrataError) -> None:
        self._asked.discard(identity)
        if isinstance(error, Unavailable):
            return  # the connection is lost, and the identity is declared again on the next one
        if identity.error != error.message:
            # A salt is a secret of the client that sent it.
            self._thinning.log(
                log,
                logging.ERROR,
                f"{error.code} {identity.request.tenant}",
                "the server refused the identity with adapter %r, tenant %r and %s salt (%s): %s",
                identity.request.adapter,
                identity.request.tenant,
                "a" if identity.request.salt else "no",
                error.code,
                error.message,
            )
        identity.error, identity.forbidden = error.message, isinstance(error, NotPermitted)
        identity.refused_epoch = self._link.epoch
        passes = error.retryable or isinstance(error, InternalError)
        identity.refused_until_s = time.monotonic() + MISTAKE_RETRY_S if passes else math.inf
        self._link.table.wake_unsent()
        if not self.slices:
            self._ask_slices_later()

    def _refused(self, identity: Identity) -> bool:
        """Whether the current server has refused the identity and may not be asked again yet."""
        refused = identity.refused_epoch == self._link.epoch and time.monotonic() < identity.refused_until_s
        return bool(identity.error) and refused

    def _ask_slices_later(self) -> None:
        self._slices_due_s = time.monotonic() + self._slices_retry_s
        self._slices_retry_s = min(2 * self._slices_retry_s, SLICES_RETRY_LAST_S)
