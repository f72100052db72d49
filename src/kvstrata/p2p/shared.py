"""The state that the parts of the peer tier (tier.py) share: settings, leases, owners, counters and tasks."""

from __future__ import annotations

import collections
import logging

from kvstrata.clock import Clock
from kvstrata.p2p.leases import LeaseBook
from kvstrata.p2p.owners import OwnerBook
from kvstrata.p2p.settings import PeerSettings
from kvstrata.tiers.work import Work

log = logging.getLogger(__name__)

MAX_TOLD = 256
COUNTED = (
    "asked_directory", "recalled", "leases", "leases_refused", "leases_lost", "reads", "read_records", "read_bytes",
    "read_failures", "unsound_records", "unauthenticated_records", "hellos", "owners", "owners_skipped", "named_leases",
    "named_refused",
)  # fmt: skip


class Shared:
    """The shared state of one tier. Belongs to the event loop."""

    def __init__(self, name: str, settings: PeerSettings, clock: Clock, instance_id: str) -> None:
        """`name` of the tier; `instance_id` of this instance."""
        self.name = name
        self.settings = settings
        self.leases = LeaseBook()
        self.owners = OwnerBook(settings.limits, self.leases.under_way_bytes)
        self.counts = collections.Counter(dict.fromkeys(COUNTED, 0))
        self.work = Work(name)
        self.now_s = clock.monotonic_s
        self.instance_id = instance_id
        self._told: set[str] = set()

    def tell_once(self, what: str) -> None:
        """Log a warning, each text only once, and at most MAX_TOLD texts."""
        if what not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(what)
            log.warning("%s: %s", self.name, what)
