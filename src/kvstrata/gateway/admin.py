"""The operations of the gateway's admin pages, which only operators may use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.errors import NotFound
from kvstrata.process import operations as common
from kvstrata.process.http_gate import METRICS, PROBES
from kvstrata.process.operations import operation, operations_of

if TYPE_CHECKING:
    from kvstrata.gateway.parts import Parts

SHOWN_DECISIONS = 50
Document = dict[str, Any]


@dataclass(slots=True)
class Admin:
    """What the operations use of one gateway."""

    parts: Parts
    status: Callable[[], Document]
    page: Callable[[], bytes]
    """Makes /metrics."""

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and why not."""
        return self.parts.readiness()


class Decision(msgspec.Struct):
    """A routing decision."""

    request: Annotated[str, Meta(description="Id of the request, as `decisions` prints it.")]
    number: Annotated[
        int, Meta(ge=0, description="Which one, of a request that was sent again; 0: the last.")
    ] = 0


@operation("GET", "/gateway/status", ctl="status")
def status(app: Admin) -> Document:
    """Engines, tenants, queue and what is known of other processes, at a glance."""
    return app.status()


@operation("GET", "/gateway/decisions", ctl="decisions")
def decisions(app: Admin) -> Document:
    """The last 50 routing decisions, newest first, with the terms of their costs."""
    return {"decisions": app.parts.choosing.decisions.page(SHOWN_DECISIONS)}


@operation("GET", "/gateway/decisions/{request:path}", ctl="decision")
def decision(app: Admin, ask: Decision) -> Document:
    """Why a request went where it did: all that it was decided from, and the same decision made again."""
    found: Document | None = app.parts.choosing.decisions.again(ask.request, ask.number)
    if found is None:
        raise NotFound(
            f"request: the decision for {ask.request!a:.200} is not among the last that were kept",
            field="request",
        )
    return found


OPERATIONS = [
    *(one for one in operations_of(common) if one.path in (*PROBES, METRICS)),
    *operations_of(sys.modules[__name__]),
]
