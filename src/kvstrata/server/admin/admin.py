"""The parts of an instance that the admin API uses, in one value."""

from __future__ import annotations

from typing import NamedTuple

from kvstrata.observability.exposition import ServerCollector
from kvstrata.server.admin.clear import Clearing
from kvstrata.server.admin.explain import Explaining
from kvstrata.server.admin.prewarm import Prewarms
from kvstrata.server.admin.quotas import Quotas
from kvstrata.server.admin.status import StatusBoard
from kvstrata.server.admin.stranded import StrandedSessions
from kvstrata.server.l2.tier_control import TierControl
from kvstrata.server.readiness import Readiness


class Admin(NamedTuple):
    """The parts of one instance that the admin API uses."""

    readiness: Readiness
    board: StatusBoard
    collector: ServerCollector
    explain: Explaining
    prewarms: Prewarms
    clearing: Clearing
    stranded: StrandedSessions
    quotas: Quotas
    tiers: TierControl
