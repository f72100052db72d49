"""What the rest of the instance does when a process attaches, detaches or ends.

Invariants:

1. A process's requests are valid from `on_attached` until `on_gone` begins.
2. When `on_gone` returns, the process has no running request, no reservation, and no share of a lease.

How a process attaches and when it counts as ended: memory/attach/server.py.
"""

from __future__ import annotations

import asyncio
import logging

from kvstrata.errors import BadRequest, LayoutRefused, Unavailable
from kvstrata.memory.attach.row import SessionRow
from kvstrata.memory.linux import SocketCredentials
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.attach_wire import AttachRequest
from kvstrata.server.parts import Parts
from kvstrata.server.payload_kinds import declared_record_bytes
from kvstrata.server.requests.requests import Requests
from kvstrata.types import FORMAT_VERSION, SPAN_FACT, shown_name


class Hooks:
    """The hooks of the attach server (memory.attach.server.AttachHooks). Belongs to the event loop."""

    def __init__(self, parts: Parts, requests: Requests) -> None:
        self._parts = parts
        self._requests = requests
        self._log = EventLog("instance")

    def admit(self, request: AttachRequest) -> None:
        """Raises the error for a process that may not attach."""
        if self._parts.readiness.stopping:
            raise Unavailable("this server is stopping; attach to its successor")
        if request.layout.format_version != FORMAT_VERSION:
            raise LayoutRefused(
                f"layout.format_version: the client uses {request.layout.format_version}, this server "
                f"{FORMAT_VERSION}; upgrade the older side",
                field="layout.format_version",
            )
        if request.layout.chunk_tokens < 1:
            raise BadRequest(
                f"layout.chunk_tokens: must be at least 1, found {request.layout.chunk_tokens}",
                field="layout.chunk_tokens",
            )
        if request.layout.lookahead < 0:
            raise BadRequest(
                f"layout.lookahead_tokens: must be at least 0, found {request.layout.lookahead_tokens}",
                field="layout.lookahead_tokens",
            )

    def tenants_of(self, credentials: SocketCredentials, request: AttachRequest) -> frozenset[str] | None:
        """Tenants that a process with this token may use, None for any. Raises NotPermitted, or Refused if the process
        or the token has too many sessions."""
        tenants = self._parts.tokens.allowed(request.token)
        self._parts.processes.check_room(request.session, credentials.pid, tenants)
        return tenants

    def on_attached(self, session: SessionRow) -> None:
        """Requests of this session are valid from now on."""
        request = session.request
        assert request is not None
        process = self._parts.processes.attach(
            session.session,
            group=session.group,
            role=request.role,
            layout=request.layout,
            engine_slices=request.engine_slices,
            part=request.slice,
            tenants=session.tenants,
            row=session.row,
            pid=session.pid,
            record_bytes=declared_record_bytes(request.facts),
            span=(request.facts or {}).get(SPAN_FACT, 0),
            engine_url=request.engine_url,
        )
        self._parts.payload_kinds.attached(request.slice, request.facts)
        self._parts.recuts.attached(process, request.slice, request.facts)
        self._log.debug(
            "attached", session=shown_name(session.session), group=shown_name(session.group), role=request.role,
            pid=session.pid, row=session.row, model=request.layout.model, resumed=session.resumed,
        )  # fmt: skip

    def on_detached(self, session: SessionRow) -> None:
        """The connection has closed though the process lives; everything that the process owns stays."""
        self._parts.processes.detached(session.session)
        self._log.debug("detached", session=shown_name(session.session), pid=session.pid)

    async def on_gone(self, session: SessionRow) -> None:
        """Stop the requests of a process that has ended, and end what it was granted."""
        process = self._parts.processes.gone(session.session) if session.request is not None else None
        if process is not None:
            running = self._requests.stop(process)
            leases, reservations = self._parts.grants.process_gone(process)
            if leases or reservations:  # a process that has given back everything is not worth a line
                self._log.repeated(
                    logging.INFO, "held", "process_gone", pid=session.pid, session=shown_name(session.session),
                    group=shown_name(session.group), leases=leases, reservations=reservations,
                    note="its reservations are freed, and its leases as far as no process of its engine uses them",
                )  # fmt: skip
            tasks = [one.task for one in running if one.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)
        self._log.debug("gone", session=shown_name(session.session), pid=session.pid, row=session.row)
