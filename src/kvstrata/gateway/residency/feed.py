"""One engine's KV events in order: what the numbers of its batches mean, and what to ask for again.

Batches are numbered from 0 in each life of an engine.  The publisher keeps the last ones and sends them again from a
number on (a replay).  It has no name for its life, so the last batch that was heard is asked for too and compared.

    joining ──replay from 0──▶ in order ──gap, new connection, or silence──▶ asking ──▶ in order
                                                                               │ another batch under the same number
                                                                               └──▶ forget, joining

1. Batches are applied in the order of their numbers, each once.
2. A batch under a number that another batch had means that the engine was restarted: everything is forgotten.
3. Batches that cannot be had again mean that everything is forgotten, too.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from kvstrata.gateway.residency.batches import decoded
from kvstrata.gateway.residency.cache import Cache

REMEMBERED = 4_096
"""Batches whose digests are kept."""


class Feed:
    """See the module: the numbers without sockets. Belongs to the thread of the watcher."""

    def __init__(self, cache: Cache, *, replays: bool) -> None:
        """`replays`: whether the engine sends batches again."""
        self.cache = cache
        self._replays = replays
        self.asking = replays
        """Whether a replay is needed or under way."""
        self.joining = replays
        """Whether it is the first one of the engine's life."""
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
    def phase(self) -> str:
        """See the module."""
        return "joining" if self.joining else "asking" if self.asking else "in_order"

    @property
    def replay_from(self) -> int:
        """The first number to ask for."""
        return max(0, self._next - 1)

    def published(self, number: int, payload: bytes) -> bool:
        """A batch has come; returns whether a replay is needed first, after which the batch must be given again."""
        if self.asking:
            return True
        if number < self._next and not self._differs(number, payload):
            return False
        if number != self._next and self._next >= 0:
            if number < self._next:
                self._restarted()
            elif not self._replays:
                self._lost()
            if self._replays:
                self.ask()
                return True
        self._apply(number, payload)
        return False

    def reconnected(self) -> bool:
        """The connection is a new one, perhaps to another life; returns whether a replay is needed."""
        if not self._replays and self._next >= 0:
            self._lost()
            self._next = -1
        return self._replays

    def ask(self) -> None:
        """A replay is under way, of all from `replay_from` on."""
        self.asking = self._first = True

    def again(self, number: int, payload: bytes) -> bool:
        """A batch of a replay has come; returns False if the replay is of another life: ask again from 0."""
        self._first = False
        if number < self._next:
            if not self._differs(number, payload):
                return True
            self._restarted()
            return number == 0 and self.again(number, payload)
        if number > self._next >= 0:
            self._lost()
        self._apply(number, payload)
        return True

    def asked(self, *, answered: bool) -> bool:
        """The replay has ended; returns False if the engine was restarted and everything must be asked for again."""
        if answered and self._first and self._next > 0:
            # Not even the last batch that was heard is kept: another life, which has told nothing yet.
            self._restarted()
            return False
        if answered and self._next < 0:
            self._next, self.whole = 0, True
        if not answered and not self.joining:
            self._lost()
            self._next = -1
        self.asking = self.joining = False
        return True

    def forget(self) -> None:
        """The engine has another life now."""
        self.cache.emptied()
        self._seen.clear()
        self._next = -1
        self.whole = False
        self.asking = self.joining = self._replays

    def _restarted(self) -> None:
        self.restarts += 1
        self.forget()

    def _lost(self) -> None:
        self.gaps += 1
        self.whole = False
        self.cache.missed()

    def _differs(self, number: int, payload: bytes) -> bool:
        known = self._seen.get(number)
        return known is not None and known != _digest(payload)

    def _apply(self, number: int, payload: bytes) -> None:
        if self._next < 0:
            self.whole = number == 0
            if not self.whole:
                self.cache.missed()
        self._next = number + 1
        self._seen[number] = _digest(payload)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self.batches += 1
        try:
            self.cache.apply(decoded(payload))
        except ValueError:
            self.malformed += 1
            self._lost()


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()
