"""Bounds the bytes of replies that libzmq keeps for clients that do not read them.

libzmq bounds only the number of messages that wait for a client.  A reply of TRACKED_BYTES or more is therefore handed
over without a copy, and libzmq tells when it no longer needs the bytes: they are in the kernel's buffer, or the
connection has ended.  Smaller replies are bounded by their number.

A client may leave CLIENT_BYTES unread, all clients together TOTAL_BYTES.  Beyond TOTAL_BYTES a client still gets one
reply at a time, so that clients that do not read cannot keep replies from those that do.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Protocol

TRACKED_BYTES = 16 << 10
CLIENT_BYTES = 32 << 20
TOTAL_BYTES = 256 << 20


class Tracker(Protocol):
    """Tells when libzmq no longer needs the bytes of one reply: zmq.MessageTracker."""

    @property
    def done(self) -> bool:
        """Whether libzmq no longer needs the bytes."""


class Outbox:
    """The unread bytes of one server's clients. Belongs to one thread."""

    def __init__(self) -> None:
        self._unread: dict[Hashable, collections.deque[tuple[Tracker, int]]] = {}
        self._client_bytes: collections.Counter[Hashable] = collections.Counter()
        self.unread_bytes = 0

    def look(self) -> int:
        """Forget replies that have left; returns the bytes that are still unread."""
        for client in list(self._unread):
            self._look(client)
        return self.unread_bytes

    def has_room(self, client: Hashable, size_bytes: int) -> bool:
        """Whether this client may get a reply of this size now."""
        self._look(client)
        if not self._client_bytes[client]:
            return True
        if self._client_bytes[client] + size_bytes > CLIENT_BYTES:
            return False
        if self.unread_bytes + size_bytes > TOTAL_BYTES:
            self.look()
        return self.unread_bytes + size_bytes <= TOTAL_BYTES

    def sent(self, client: Hashable, size_bytes: int, tracker: Tracker) -> None:
        """A reply of this size was handed to libzmq."""
        self._unread.setdefault(client, collections.deque()).append((tracker, size_bytes))
        self._client_bytes[client] += size_bytes
        self.unread_bytes += size_bytes

    def _look(self, client: Hashable) -> None:
        """Forget the client's replies that have left; replies leave in the order of sending."""
        replies = self._unread.get(client)
        while replies and replies[0][0].done:
            _, size_bytes = replies.popleft()
            self._client_bytes[client] -= size_bytes
            self.unread_bytes -= size_bytes
        if not replies:
            self._unread.pop(client, None)
            del self._client_bytes[client]
