"""Keeps a client's parts in step with its link: tells them in order that a server is attached, heard or lost.

`Upkeep` decides when an old epoch has ended, and sends `quiesced` to tell the server that no copy of that epoch runs
any more.  It also decides when a closing client has ended, and sets `drained`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import msgspec

from kvstrata.client.copies import CopyLedger, DeviceCopyEngine, Pages, device_copies
from kvstrata.client.identities import IdentityTable
from kvstrata.client.link import Link
from kvstrata.client.link_owner import LinkOwner
from kvstrata.client.loads import Loads
from kvstrata.client.lookups import LiveLookups, Lookups
from kvstrata.client.pool_view import PoolView
from kvstrata.client.releases import ReleaseQueue
from kvstrata.client.requests import Kind, Pending
from kvstrata.client.stores import StoreQueue
from kvstrata.errors import KvstrataError, Unavailable
from kvstrata.memory.attach.client import Attachment
from kvstrata.rpc import attach_wire, wire
from kvstrata.rpc.ping_wire import DeviceCopies, LoadRate
from kvstrata.types import LeaseName


class Upkeep(LinkOwner):
    """The owner of a client's link: see `LinkOwner`. All methods except `attach_request` run in the I/O thread."""

    def __init__(
        self,
        request: attach_wire.AttachRequest,
        token: Callable[[], str],
        *,
        link: Link,
        ledger: CopyLedger,
        device: DeviceCopyEngine | None,
        pages: Pages,
        live: LiveLookups,
        identities: IdentityTable,
        releases: ReleaseQueue,
        lookups: Lookups,
        loads: Loads,
        stores: StoreQueue,
        pool: PoolView,
    ) -> None:
        """`request` lacks the old epoch and the token; `token()` reads the present token or raises ConfigError."""
        self._request = request
        self._token = token
        self._link = link
        self._ledger = ledger
        self._device = device
        self._pages = pages
        self._live = live
        self._identities = identities
        self._releases = releases
        self._lookups = lookups
        self._loads = loads
        self._stores = stores
        self._pool = pool
        self._must_quiesce = False
        self.drained = threading.Event()
        """Set once a closing client has no message left to send and no running copy, or once the link has failed."""

    def attach_request(self, old_epoch: int) -> attach_wire.AttachRequest:
        """See LinkOwner."""
        return msgspec.structs.replace(self._request, old_epoch=old_epoch, token=self._token())

    def link_attached(self, attachment: Attachment, old_epoch: int) -> None:
        """See LinkOwner."""
        self._pool.attached(attachment)
        if attachment.epoch != old_epoch:
            self._must_quiesce = old_epoch != 0
            self._live.restarted()
            self._releases.restarted(old_epoch, attachment.epoch)

    def link_ready(self, attachment: Attachment, old_epoch: int) -> None:
        """See LinkOwner."""
        if attachment.epoch == old_epoch:
            self._link.tell(self._resume)
        self._stores.ready(attachment.max_reserved_bytes)
        self._identities.replay()
        self._releases.pump()

    def link_silent(self) -> None:
        """See LinkOwner."""
        self._stores.give_up()

    def link_revoked(self, lookups: list[int]) -> None:
        """See LinkOwner."""
        self._releases.add(self._lookups.take_back(lookups, self._ledger.take_back), group=True)

    def link_orphaned(self, leases: list[tuple[bytes, int]]) -> None:
        """See LinkOwner."""
        idle = self._ledger.spend([LeaseName(session, seq, self._link.epoch) for session, seq in leases])
        self._releases.add(idle, group=False)

    def device_copies(self) -> DeviceCopies | None:
        """See LinkOwner."""
        return None if self._device is None else device_copies(self._device, self._pages)

    def load_rate(self) -> LoadRate | None:
        """See LinkOwner."""
        return self._loads.rate()

    def untold_misses(self) -> list[wire.Miss]:
        """See LinkOwner."""
        return self._lookups.untold_misses()

    def misses_told(self, count: int) -> None:
        """See LinkOwner."""
        self._lookups.misses_told(count)

    def link_due_s(self) -> float:
        """See LinkOwner."""
        return min(self._identities.due_s(), self._releases.due_s())

    def link_pass(self, now_s: float) -> None:
        """See LinkOwner."""
        self._releases.tick(now_s)
        if self._link.connected:
            self._identities.tick(now_s)
            if self._must_quiesce:
                self._quiesce()
        unsaid = len(self._link.table) or self._releases.due_s() < math.inf
        answered = not self._link.usable or not unsaid
        if self._link.closing and answered and self._ledger.n_running == 0 and self._stores.idle:
            self.drained.set()

    def link_died(self) -> None:
        """See LinkOwner."""
        self._pool.forget()
        self._link.table.fail_all(Unavailable("the client has failed"), *Kind)
        self._stores.give_up()
        self.drained.set()

    def close_asking(self) -> None:
        """Fail the requests that callers wait for, because the client closes.

        The store queue closes first: otherwise each reserve that fails would make room for the next one.
        """
        self._stores.close()
        self._link.table.fail_all(Unavailable("the client closes"), Kind.ASK)

    def _quiesce(self) -> None:
        """Close the older epochs if no copy of them runs, and send `quiesced`."""
        closed = self._ledger.quiesce(self._link.epoch)
        if closed is None:
            return
        self._must_quiesce = False
        for mapping in closed:
            self._pages.forget(mapping)

        def failed(error: KvstrataError) -> None:
            self._must_quiesce |= isinstance(error, Unavailable)  # the connection is lost

        self._link.ask(Pending(Kind.TELL, lambda seq, _: wire.Quiesced(seq), lambda reply: None, failed))

    def _resume(self, seq: int, remaining_ms: int) -> wire.Resume:
        """Name what this process still has of the server, which it has lost for a while."""
        return wire.Resume(seq, sorted({*self._live.numbers(), *self._stores.reserves()}))
