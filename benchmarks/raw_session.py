"""An attached session without the client library, for figures of the server alone."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from benchmarks.common import wait_until
from benchmarks.plain_connection import PlainConnection
from kvstrata.rpc import wire
from kvstrata.session.attach import attach, process_locks
from kvstrata.types import LayoutIdentity, RequestIdentity, Role, Slice

ATTACH_S = 10.0
REPLY_S = 10.0


class RawSession:
    """An attached session with one declared identity, for one thread. `ask` raises error replies as exceptions."""

    def __init__(
        self, socket_dir: Path, layout: LayoutIdentity, slice_: Slice, facts: dict[str, Any]
    ) -> None:
        self.session = secrets.token_bytes(wire.SESSION_BYTES)
        self.last_seq = 0
        request = wire.AttachRequest(
            protocol=wire.PROTOCOL_VERSION,
            session=self.session,
            group=secrets.token_bytes(wire.SESSION_BYTES),
            role=Role.CLIENT,
            layout=layout,
            engine_slices=1,
            slice=slice_,
            facts=facts,
        )
        self._attachment = attach(socket_dir, request, process_locks(), ATTACH_S)
        self.socket = PlainConnection(socket_dir, REPLY_S, self._attachment.link)
        """The connection, for callers that count messages rather than answers."""
        self.ask = self.socket.ask
        identified = self.ask(wire.Identify(self.seq(), RequestIdentity()))
        assert isinstance(identified, wire.IdentifyReply) and identified.complete, identified
        self.identity_id = identified.identity_id

    def seq(self) -> int:
        """Return a fresh number for the next request."""
        self.last_seq += 1
        return self.last_seq

    def ping(self) -> bytes:
        """Make a ping's message."""
        return wire.encode(wire.Ping(self.seq()))

    def lookup(self, keys: bytes) -> bytes:
        """Make a lookup's message; its number is `last_seq`."""
        groups = [wire.KeyGroup(wire.Rule.PREFIX, keys)]
        return wire.encode(wire.Lookup(self.seq(), 1000, self.identity_id, "bench", groups))

    def release(self, lookup_seq: int) -> bytes:
        """Make the message that ends a lookup's lease."""
        return wire.encode(wire.Release(self.seq(), [(self.session, lookup_seq)]))

    def close(self) -> None:
        """Leave the server."""
        self._attachment.goodbye(ATTACH_S)


def status(server: Any) -> dict[str, Any]:
    """Return the status document of a `ServerProcess`."""
    document: dict[str, Any] = server.get("/v1/status")
    return document


def start_faulted(server: Any) -> None:
    """Start a `ServerProcess` and wait until its pool is faulted in."""
    server.start()
    wait_until(lambda: is_faulted(status(server)), "the pool is faulted in", 120)


def is_faulted(found: dict[str, Any]) -> bool:
    """Whether a status says that the whole pool is faulted in."""
    return bool(found["pool"]["prefaulted_bytes"] >= found["pool"]["extents_bytes"])
