"""The operations of the gateway's own pages, which operators alone may use (door.py); `app` is app.py's App."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.errors import NotFound
from kvstrata.process import operations as common
from kvstrata.process.operations import Operation, operation, operations_of

SHOWN_DECISIONS = 50
Document = dict[str, Any]


class Decision(msgspec.Struct):
    """A routing decision."""

    request: Annotated[str, Meta(description="Id of the request, as `decisions` prints it.")]
    number: Annotated[
        int, Meta(ge=0, description="Which one, of a request that was sent again; 0: the last.")
    ] = 0


@operation("GET", "/gateway/status", ctl="status")
def status(app: Any) -> Document:
    """Engines, tenants, queue and what is known of other processes, at a glance."""
    found: Document = app.status()
    return found


@operation("GET", "/gateway/decisions", ctl="decisions")
def decisions(app: Any) -> Document:
    """The last 50 routing decisions, newest first, with the terms of their costs."""
    return {"decisions": app.parts.choosing.decisions.page(SHOWN_DECISIONS)}


@operation("GET", "/gateway/decisions/{request:path}", ctl="decision")
def decision(app: Any, ask: Decision) -> Document:
    """Why a request went where it did: all that it was decided from, and the same decision made again."""
    found: Document | None = app.parts.choosing.decisions.again(ask.request, ask.number)
    if found is None:
        raise NotFound(
            f"request: the decision for {ask.request!a:.200} is not among the last that were kept",
            field="request",
        )
    return found


OPERATIONS = [common.metrics.operation, *operations_of(sys.modules[__name__])]  # type: ignore[attr-defined]


def find(path: str) -> tuple[Operation, dict[str, str]] | None:
    """The operation of a path, and the fields that the path names."""
    for one in OPERATIONS:
        if match := re.fullmatch(re.sub(r"{(\w+):path}", r"(?P<\1>.+)", one.path), path):
            return one, match.groupdict()
    return None
