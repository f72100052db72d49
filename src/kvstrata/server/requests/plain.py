"""Clients of this host without a row: any program of our user with an ordinary ZeroMQ DEALER.

They map no memory and hold no grants, so they may only send `identify`, `lookup` (a count without a lease), `retrieve`
(which returns bytes) and `ping`; any other request is refused by name.  With a tenants file they can access the unnamed
tenant only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstrata.errors import BadRequest, NotPermitted, Refused, UnknownIdentity
from kvstrata.native.core import Pool, storage_keys
from kvstrata.observability.explain import ServerNumbers
from kvstrata.rpc.wire import (
    AnyRequest,
    Identify,
    IdentifyReply,
    Lookup,
    LookupReply,
    Ping,
    Pong,
    Reply,
    Retrieve,
    RetrieveReply,
    check_keys,
)
from kvstrata.types import identity_root

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

MAX_IDENTITIES = 64
"""Maximum number of identities of one connection."""
MAX_RECORDS = 1_024
"""Maximum number of records in one lookup, which takes about 0.2 ms of the loop."""


class PlainIdentity(NamedTuple):
    """An identity that a client without a row has declared: its root, and the slices of its chunks."""

    root: bytes
    slices: list[bytes]


class PlainClients:
    """Answers clients without a row, at once. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._pool, self._tokens = parts.pool, parts.tokens
        self._counters, self._epoch = parts.counters, parts.facts.epoch

    def answer(self, identities: dict[int, PlainIdentity], request: AnyRequest, op: str) -> Reply:
        """The reply to a request; `identities` are those of its connection. Raises KvstrataError."""
        match request:
            case Ping():
                return Pong(request.seq, self._epoch)
            case Identify():
                return self._identify(identities, request)
            case Lookup():
                return self._lookup(_known(identities, request.identity_id), request)
            case Retrieve():
                root = _known(identities, request.identity_id).root
                return read_piece(self._pool, root, request, self._epoch, self._counters)
        raise NotPermitted(
            f"op: {op} needs an attached process; attach first, with a pidfd",
            field="op",
        )

    def _identify(self, identities: dict[int, PlainIdentity], request: Identify) -> Reply:
        if request.layout is None or not request.slices:
            missing = "slices" if request.layout else "layout"
            raise BadRequest(
                f"{missing}: missing; a client that is not attached names the layout identity and the slices",
                field=missing,
            )
        allowed = self._tokens.without
        if allowed is not None and request.request.tenant not in allowed:
            raise NotPermitted(
                "request.tenant: this server has a tenants file; attach with a token of the tenant",
                field="request.tenant",
            )
        if len(identities) >= MAX_IDENTITIES:
            raise Refused(
                f"request: this connection has declared {MAX_IDENTITIES} identities", field="request"
            )
        number, root = len(identities) + 1, identity_root(request.layout, request.request)
        identities[number] = PlainIdentity(root, request.slices)
        return IdentifyReply(request.seq, self._epoch, number, root, request.slices, complete=True)

    def _lookup(self, identity: PlainIdentity, request: Lookup) -> Reply:
        n_records = check_keys(request.keys, "keys") * len(identity.slices)
        if n_records > MAX_RECORDS:
            raise BadRequest(
                f"keys: {n_records} records; a client that is not attached may ask for {MAX_RECORDS} at once",
                field="keys",
            )
        keys = storage_keys(identity.root, request.keys, b"".join(identity.slices))
        n_chunks = self._pool.peek(keys, len(identity.slices))
        return LookupReply(request.seq, self._epoch, n_chunks, b"", n_chunks, 0, "")


def read_piece(pool: Pool, root: bytes, request: Retrieve, epoch: int, counters: ServerNumbers) -> Reply:
    """The reply to a retrieve, with bytes of the record that it names."""
    hold = pool.hold(storage_keys(root, request.key, request.slice_digest), identity=root)
    if hold is None:
        return RetrieveReply(request.seq, epoch, False, 0, b"")
    try:
        first = min(request.offset_bytes, hold.length)
        end = min(first + request.length_bytes, hold.length)
        body = bytes(hold.view()[first:end])
        length = hold.length
    finally:
        hold.drop()
    counters.retrieved_bytes += end - first
    return RetrieveReply(request.seq, epoch, True, length, body)


def _known(identities: dict[int, PlainIdentity], number: int) -> PlainIdentity:
    identity = identities.get(number)
    if identity is None:
        raise UnknownIdentity(
            f"identity_id: {number} was not declared on this connection", field="identity_id"
        )
    return identity
