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
    """The parts of one gateway that the operations use."""

    parts: Parts
    status: Callable[[], Document]
    page: Callable[[], bytes]
    """Returns the body of /metrics."""

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, the reason."""
        return self.parts.readiness()


class Decision(msgspec.Struct):
    """A routing decision."""

    request: Annotated[str, Meta(description="Id of the request, as `decisions` prints it.")]
    number: Annotated[
        int, Meta(ge=0, description="Number of the decision, for a request sent more than once; 0: its last.")
    ] = 0


@operation("GET", "/gateway/status", ctl="status")
def status(app: Admin) -> Document:
    """Show engines, tenants, the queue, other gateways and controllers."""
    return app.status()


@operation("GET", "/gateway/decisions", ctl="decisions")
def decisions(app: Admin) -> Document:
    """List the last 50 routing decisions, newest first, with the terms of their costs."""
    return {"decisions": app.parts.choosing.decisions.page(SHOWN_DECISIONS)}


@operation("GET", "/gateway/decisions/{request:path}", ctl="decision")
def decision(app: Admin, ask: Decision) -> Document:
    """Explain a request's routing: all inputs of its decision, and the same decision replayed from them."""
    found: Document | None = app.parts.choosing.decisions.again(ask.request, ask.number)
    if found is None:
        raise NotFound(
            f"request: no decision for {ask.request!a:.200} is kept; see the ids in `decisions`",
            field="request",
        )
    return found


OPERATIONS = [
    *(one for one in operations_of(common) if one.path in (*PROBES, METRICS)),
    *operations_of(sys.modules[__name__]),
]
