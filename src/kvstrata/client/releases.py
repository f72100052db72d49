"""Leases on their way back to the server, many in one message.  All methods but `end` belong to the I/O thread.

While a caller waits for a lookup or a reserve, leases stay here for up to `HOLD_S`: the server answers the caller
first, and one message then gives back the leases of several requests.

A lease stays here until its release is answered or its epoch ends; then `quiesced` ends the lease.  The
scheduler may attach earlier than this process, so a release may name an epoch that this process has not attached to
yet; such a release waits for that epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvstrata.client.copies import CopyLedger
from kvstrata.client.link import Link
from kvstrata.client.requests import Kind, Pending
from kvstrata.errors import KvstrataError, Unavailable
from kvstrata.rpc import wire
from kvstrata.types import LeaseName

LEASES_PER_MESSAGE = 1024
HOLD_S = 0.002
WAITING_LEASES = 65_536
"""More leases than any engine has.  Beyond this number the oldest are dropped here; they end with this process."""


class ReleaseQueue:
    """The leases to be given back: this process's shares, and those of the whole group."""

    def __init__(
        self, link: Link, ledger: CopyLedger, released: Callable[[Sequence[LeaseName]], None]
    ) -> None:
        """`released` is called with the leases that the server has taken back."""
        self._link = link
        self._ledger = ledger
        self._released = released
        self._waiting: dict[bool, dict[LeaseName, None]] = {False: {}, True: {}}
        self._sending: dict[bool, bool] = {False: False, True: False}
        self._past_epochs: set[int] = set()
        self._held_until_s = math.inf
        self._added = False

    def end(self, leases: Sequence[LeaseName], *, group: bool) -> None:
        """Let no load begin under these leases, and give back those that no load uses. Any thread.

        A load that runs gives its lease back when it ends.
        """
        if leases and not self._link.forked:
            idle = self._ledger.spend(leases)
            self._link.post(lambda: self.add(idle, group=group))

    def add(self, leases: Sequence[LeaseName], *, group: bool) -> None:
        """Give these leases back; with `group` for every process of the engine."""
        waiting = self._waiting[group]
        for lease in leases:
            if lease.epoch not in self._past_epochs:
                waiting[lease] = None
        while len(waiting) > WAITING_LEASES:
            del waiting[next(iter(waiting))]
        self._added = True

    def restarted(self, old_epoch: int, epoch: int) -> None:
        """Forget the leases of the old epoch, which have ended: a server of another epoch is attached."""
        self._past_epochs.add(old_epoch)
        self._past_epochs.discard(epoch)
        for waiting in self._waiting.values():
            for lease in [lease for lease in waiting if lease.epoch in self._past_epochs]:
                del waiting[lease]

    def due_s(self) -> float:
        """The time (`time.monotonic`) at which `tick` has something to do, even if no message arrives; inf: never."""
        return self._held_until_s

    def tick(self, now_s: float) -> None:
        """Send the leases that were added, unless they may still wait. Called once per pass of the link."""
        added, self._added = self._added, False
        if added and self._link.table.n_asks:
            self._held_until_s = min(self._held_until_s, now_s + HOLD_S)
        elif added or self._held_until_s <= now_s:
            self.pump()

    def pump(self) -> None:
        """Send waiting leases; one message of each kind (own share, whole group) is under way at a time."""
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

        def failed(error: KvstrataError) -> None:
            self._sending[group] = False
            if isinstance(error, Unavailable):  # the connection is lost
                self.add(leases, group=group)
            else:
                ended(error)

        self._link.ask(Pending(Kind.TELL, lambda seq, _: wire.Release(seq, names, group), ended, failed))
