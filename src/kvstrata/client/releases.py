"""Leases on their way back to the server, many in one message.  Belongs to the I/O thread.

While somebody waits for a lookup or a reserve they stay here, for at most `HOLD_S`: the server shall answer that first,
and one message then gives back what several would have.

A release is repeated until answered, for as long as the epoch of its lease lasts; afterwards `quiesced` ends it.
Releases of an epoch that this process has not attached to yet (the scheduler was quicker) wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvstrata.client.link import Link
from kvstrata.client.requests import Kind, Pending
from kvstrata.rpc import wire
from kvstrata.types import LeaseName

LEASES_PER_MESSAGE = 1024
HOLD_S = 0.002
WAITING_LEASES = 65_536
"""More than any engine has; beyond, the oldest are left to the server's own ends of a lease."""


class ReleaseQueue:
    """Shares of leases to be ended: our own ones, and whole groups'."""

    def __init__(self, link: Link, released: Callable[[Sequence[LeaseName]], None]) -> None:
        """`released` is told which leases the server has taken back."""
        self._link = link
        self._released = released
        self._waiting: dict[bool, dict[LeaseName, None]] = {False: {}, True: {}}
        self._sending: dict[bool, bool] = {False: False, True: False}
        self._past_epochs: set[int] = set()
        self._held_until_s = math.inf
        self._added = False

    def add(self, leases: Sequence[LeaseName], *, group: bool) -> None:
        """Give these back; with `group` for every member of the engine."""
        waiting = self._waiting[group]
        for lease in leases:
            if lease.epoch not in self._past_epochs:
                waiting[lease] = None
        while len(waiting) > WAITING_LEASES:
            del waiting[next(iter(waiting))]
        self._added = True

    def restarted(self, old_epoch: int, epoch: int) -> None:
        """The link goes from one epoch to another: leases of the old one are none any more."""
        self._past_epochs.add(old_epoch)
        self._past_epochs.discard(epoch)
        for waiting in self._waiting.values():
            for lease in [lease for lease in waiting if lease.epoch in self._past_epochs]:
                del waiting[lease]

    def due_s(self) -> float:
        """When `tick` has something to do even if nothing else happens."""
        return self._held_until_s

    def tick(self, now_s: float) -> None:
        """Once per pass of the link: send what was added, unless it is to be held."""
        added, self._added = self._added, False
        if added and self._link.table.n_asks:
            self._held_until_s = min(self._held_until_s, now_s + HOLD_S)
        elif added or self._held_until_s <= now_s:
            self.pump()

    def pump(self) -> None:
        """Send what can be sent; one message of each kind is under way at a time."""
        self._held_until_s = math.inf
        for group in (False, True):
            if not self._sending[group]:
                self._send(group)

    def _send(self, group: bool) -> None:
        waiting = self._waiting[group]
        leases = [lease for lease in waiting if lease.epoch == self._link.epoch][:LEASES_PER_MESSAGE]
        if not leases:
            return
        for lease in leases:
            del waiting[lease]
        self._sending[group] = True
        names = [(lease.session, lease.seq) for lease in leases]

        def ended(_: object) -> None:
            self._sending[group] = False
            self._released(leases)
            self.pump()

        session = self._link.session
        self._link.ask(
            Pending(Kind.SETTLE, lambda seq, _: wire.Release(session, seq, names, group), ended, ended)
        )
