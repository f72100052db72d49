"""One engine's KV events in order: what the numbers of its batches mean, and what to ask for again.

Batches are numbered from 0 in each life of an engine.  The publisher keeps the last ones and sends them again from a
number on (a replay).  It has no name for its life, so the last batch that was heard is asked for too and compared.

    JOINING ──replay from 0──▶ IN_ORDER ──gap, new connection, or silence──▶ ASKING ──▶ IN_ORDER
                                                                               │ another batch under the same number
                                                                               └──▶ forget, JOINING

1. Batches are applied in the order of their numbers, each once.
2. A batch under a number that another batch had means that the engine was restarted: everything is forgotten.
3. Batches that cannot be had again make what is known doubtful.
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict

from kvstrata.gateway.residency.batches import decoded
from kvstrata.gateway.residency.caches import Caches

REMEMBERED = 16_384
"""Batches whose digests are kept."""


class Phase(enum.Enum):
    """See the module."""

    JOINING = "joining"
    IN_ORDER = "in_order"
    ASKING = "asking"


class Feed:
    """See the module: the numbers without sockets. Belongs to the thread of the watcher."""

    def __init__(self, caches: Caches, *, replays: bool) -> None:
        """`replays`: whether the engine sends batches again."""
        self.caches = caches
        self._replays = replays
        self.phase = Phase.JOINING if replays else Phase.IN_ORDER
        self._next = -1
        """The number of the batch to come; -1: any."""
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        self._first = True
        """Whether no batch of the replay under way has come yet."""
        self.batches = 0
        self.gaps = 0
        """Times that batches were lost for good."""
        self.restarts = 0
        self.malformed = 0
        self.whole = False
        """Whether every event of the engine's life was heard."""

    @property
    def replay_from(self) -> int:
        """The first number to ask for."""
        return max(0, self._next - 1)

    def published(self, number: int, payload: bytes) -> bool:
        """A batch has come; returns whether a replay is needed first, after which the batch must be given again."""
        if self.phase is not Phase.IN_ORDER:
            return True
        known = self._seen.get(number)
        if known is not None and number < self._next:
            if known == _digest(payload):
                return False
            self._restarted()
            if not self._replays:
                return self._skip_to(number, payload)
            return True
        if self._next == number:
            self._apply(number, payload)
            return False
        if self._next < 0 or not self._replays:
            return self._skip_to(number, payload)
        if number < self._next:
            self._restarted()
        else:
            self.ask()
        return True

    def reconnected(self) -> bool:
        """The connection is a new one, perhaps to another life; returns whether a replay is needed."""
        if not self._replays and self._next >= 0:
            self._lost()
            self._next = -1
        return self._replays

    def ask(self) -> None:
        """A replay is under way, of all from `replay_from` on."""
        if self.phase is Phase.IN_ORDER:
            self.phase = Phase.ASKING
        self._first = True

    def again(self, number: int, payload: bytes) -> bool:
        """A batch of a replay has come; returns False if the replay is of another life: ask again from 0."""
        first, self._first = self._first, False
        known = self._seen.get(number)
        if known is not None and number < self._next:
            if known == _digest(payload):
                return True
            self._restarted()
            return number == 0 and self.again(number, payload)
        if self.phase is Phase.ASKING and first and number < self._next:
            return True  # its digest is no longer kept
        if number != self._next:
            if self._next < 0:
                self._join(number)
            elif number < self._next:
                return True
            else:
                self._lost()
            self._next = number
        self._apply(number, payload)
        return True

    def asked(self, *, answered: bool) -> bool:
        """The replay has ended; returns False if the engine was restarted and everything must be asked for again."""
        if answered and self.phase is Phase.ASKING and self._first and self._next > 0:
            # Not even the last batch that was heard is there: another life, which has told nothing yet.
            self._restarted()
            return False
        if answered and self._next < 0:
            self._next, self.whole = 0, True
        if not answered and self.phase is Phase.ASKING:
            self._lost()
            self._next = -1
        self.phase = Phase.IN_ORDER
        return True

    def forget(self) -> None:
        """The engine has another life now."""
        self.caches.restarted()
        self._seen.clear()
        self._next = -1
        self.whole = False
        self.phase = Phase.JOINING if self._replays else Phase.IN_ORDER

    def _restarted(self) -> None:
        self.restarts += 1
        self.forget()

    def _lost(self) -> None:
        self.gaps += 1
        self.whole = False
        self.caches.doubt()

    def _skip_to(self, number: int, payload: bytes) -> bool:
        """Go on from this batch, whatever came before it."""
        if self._next >= 0:
            if number < self._next:
                self._restarted()
            else:
                self._lost()
        if self._next < 0:
            self._join(number)
        self._next = number
        self._apply(number, payload)
        return False

    def _join(self, number: int) -> None:
        """Begin with this batch."""
        self.whole = number == 0
        if not self.whole:
            self.caches.missed()

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._seen[number] = _digest(payload)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self.batches += 1
        try:
            self.caches.apply(decoded(payload))
        except ValueError:
            self.malformed += 1
            self._lost()


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()
