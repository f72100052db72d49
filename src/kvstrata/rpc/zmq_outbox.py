"""How many bytes of replies libzmq still keeps for peers that do not read them.

libzmq bounds what waits for a peer by its number of messages alone.  A reply of TRACKED_BYTES or more is therefore
given to it without a copy, and libzmq tells when it has let go of the bytes: when they are in the kernel's buffer, or
when the connection has ended.  Smaller replies are bounded by their number.

A peer may have PEER_BYTES unread.  All peers together may have TOTAL_BYTES, beyond which a peer still gets one reply
at a time, so that nobody can take the place of those who read.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Protocol

TRACKED_BYTES = 16 << 10
PEER_BYTES = 32 << 20
TOTAL_BYTES = 256 << 20


class Tracker(Protocol):
    """Of one reply: zmq.MessageTracker."""

    @property
    def done(self) -> bool:
        """libzmq has let go of it."""


class Outbox:
    """See the module. Belongs to one thread."""

    def __init__(self) -> None:
        self._unread: dict[Hashable, collections.deque[tuple[Tracker, int]]] = {}
        self._peer_bytes: collections.Counter[Hashable] = collections.Counter()
        self.unread_bytes = 0

    def look(self) -> int:
        """Bytes that are unread now."""
        for peer in list(self._unread):
            self._look(peer)
        return self.unread_bytes

    def has_room(self, peer: Hashable, size_bytes: int) -> bool:
        """Whether this peer may get such a reply now."""
        self._look(peer)
        if not self._peer_bytes[peer]:
            return True
        if self._peer_bytes[peer] + size_bytes > PEER_BYTES:
            return False
        if self.unread_bytes + size_bytes > TOTAL_BYTES:
            self.look()
        return self.unread_bytes + size_bytes <= TOTAL_BYTES

    def sent(self, peer: Hashable, size_bytes: int, tracker: Tracker) -> None:
        """It was given to libzmq."""
        self._unread.setdefault(peer, collections.deque()).append((tracker, size_bytes))
        self._peer_bytes[peer] += size_bytes
        self.unread_bytes += size_bytes

    def _look(self, peer: Hashable) -> None:
        """Forget what libzmq has let go of, which it does in the order of sending."""
        replies = self._unread.get(peer)
        while replies and replies[0][0].done:
            _, size_bytes = replies.popleft()
            self._peer_bytes[peer] -= size_bytes
            self.unread_bytes -= size_bytes
        if not replies:
            self._unread.pop(peer, None)
            del self._peer_bytes[peer]
