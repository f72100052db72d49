"""The parts of an instance that the admin API uses, in one value, and its operation on stranded sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvstrata.errors import BadRequest
from kvstrata.memory.attach.row import Stranded
from kvstrata.memory.attach.server import AttachServer
from kvstrata.native.core import Pool
from kvstrata.observability.logging import EventLog
from kvstrata.policy.misses import Explainer
from kvstrata.server.admin.clear import Clearing
from kvstrata.server.admin.prewarm import Prewarms
from kvstrata.server.admin.status import StatusBoard
from kvstrata.server.processes import tenant_number
from kvstrata.server.readiness import Readiness
from kvstrata.tiers.set import TierSet
from kvstrata.types import shown_name


class StrandedSessions:
    """Lists and clears stranded sessions for an admin; memory/attach/server.py keeps them."""

    def __init__(self, attach: AttachServer) -> None:
        self._attach = attach
        self._log = EventLog("instance")

    def rows(self) -> list[dict[str, Any]]:
        """A row for each stranded session that keeps extents in quarantine."""
        return [_row(one) for one in self._attach.stranded()]

    async def clear(self, session: str) -> list[dict[str, Any]]:
        """Free the extents of a stranded session, or of all with "all". Returns the rows of the cleared sessions.

        Raises BadRequest for a session that is not stranded.
        """
        try:
            names = {shown_name(one.seen.session): one.seen.session for one in self._attach.stranded()}
            chosen = None if session == "all" else [names[session]]
            cleared = await self._attach.clear_stranded(chosen)
        except KeyError:
            raise BadRequest(
                f'session: {session!r:.80} is not stranded; name one that GET /v1/stranded lists, or "all"',
                field="session",
            ) from None
        for one in cleared:
            self._log.info(
                "stranded_cleared", session=shown_name(one.seen.session), kept_bytes=one.kept_bytes
            )
        return [_row(one) for one in cleared]


def _row(one: Stranded) -> dict[str, Any]:
    seen = one.seen
    return {
        "session": shown_name(seen.session),
        "group": shown_name(seen.group),
        "pid": seen.pid,
        "row": seen.row,
        "kept_bytes": one.kept_bytes,
    }


class Admin(NamedTuple):
    """The parts of one instance that the admin API uses."""

    pool: Pool
    readiness: Readiness
    board: StatusBoard
    page: Callable[[], bytes]
    """Makes /metrics."""
    log: EventLog
    explainer: Explainer
    prewarms: Prewarms
    clearing: Clearing
    stranded: StrandedSessions
    tiers: TierSet

    def change_quota(self, tenant: str, quota_bytes: int) -> dict[str, Any]:
        """Set how much of L1 a tenant may have until the server ends; returns the JSON that an admin gets."""
        self.pool.set_quota(tenant_number(tenant), quota_bytes)
        EventLog("instance").info("quota_changed", tenant=tenant, quota_bytes=quota_bytes)
        return {"tenant": tenant, "quota_bytes": quota_bytes}
