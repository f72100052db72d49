"""Stands for a client's link to a server: connected, and without timers; the test sends what is due and answers it."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.client.link import Pending, RequestTable
from kvstrata.rpc import wire

EPOCH = 7
SESSION = bytes(16)


class Link:
    """`runs_posted`: whether it runs at once what it should run later; else it never does."""

    def __init__(self, *, runs_posted: bool = False) -> None:
        self.table = RequestTable()
        self.session, self.epoch = SESSION, EPOCH
        self.connected = self.accepts = self.usable = True
        self.settled: list[wire.Cancel] = []
        self._runs_posted = runs_posted

    def ask(self, pending: Pending) -> None:
        self.table.add(pending)

    def post(self, call: Callable[[], object]) -> None:
        if self._runs_posted:
            call()

    def tell(self, message: Callable[[int, int], wire.Cancel]) -> None:
        self.settled.append(message(0, 0))

    def said(self, now_s: float = 0.0) -> list[wire.AnyRequest]:
        """Send the requests that are due; return them."""
        return [wire.decode_request(frame) for frame in self.table.to_send(now_s)]

    def send_due(self, now_s: float = 0.0) -> list[int]:
        """Send the requests that are due; return their numbers."""
        return [message.seq for message in self.said(now_s)]
