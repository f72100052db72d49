"""The checks of an attach request, without sockets; each raises an error that names the field.

1. A session is one process: its request comes with a pidfd of the very process that sent it.
2. All processes of one group declare one layout and one number of slices.
3. All living sessions of the same tenants with the same part of the KV (layout identity, layers, kv heads, object
   group) have the same layout facts, apart from GEOMETRY; a process with other facts is refused, and the error names
   the first fact that differs.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvstrata.errors import BadRequest, LayoutRefused, NotPermitted, Refused, WrongVersion
from kvstrata.memory import linux
from kvstrata.native.core import record_bytes
from kvstrata.rpc.wire import NO_SESSION, PROTOCOL_VERSION, AttachRequest
from kvstrata.session.zmtp import WithFds
from kvstrata.types import (
    FORMAT_VERSION,
    MAX_SPAN_CHUNKS,
    SPAN_FACT,
    LayoutIdentity,
    Role,
    canonical_json,
    facts_digest,
)

GEOMETRY = frozenset({"axes", "block_tokens"})
"""Facts in which engines of one model may differ: their records can be recut (server/recuts), or are separate."""
MAX_SECTIONS = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 40
MAX_ATTACH_BYTES = 64 << 10
"""Maximum length of an attach request, and of the reply."""


class _Version(msgspec.Struct):
    protocol: int


_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_VERSION = msgspec.msgpack.Decoder(_Version)
_REQUEST = msgspec.msgpack.Decoder(AttachRequest)


class GaveUp(Exception):
    """The process ended or closed its connection before its attach was complete, so no error can be sent to it."""


def parse_request(data: bytes) -> AttachRequest:
    """The request in a message, checked by itself, without other sessions.

    Raises BadRequest naming the field, or WrongVersion, which is checked first.
    """
    try:
        version = _VERSION.decode(data)
        if version.protocol != PROTOCOL_VERSION:
            raise WrongVersion(
                f"protocol: the process speaks version {version.protocol}, this server {PROTOCOL_VERSION}; "
                "use the same kvstrata release on both sides",
                field="protocol",
            )
        request = _REQUEST.decode(data)
    except _DECODE_ERRORS as error:
        raise BadRequest(f"attach request: {error}", field="request") from error
    if NO_SESSION in (request.session, request.group):
        field = "session" if request.session == NO_SESSION else "group"
        raise BadRequest(f"{field}: 16 zero bytes cannot be a name; choose 16 random bytes", field=field)
    _check_layout(request.layout)
    _check_slice(request)
    return request


def _check_layout(layout: LayoutIdentity) -> None:
    if layout.format_version != FORMAT_VERSION:
        raise LayoutRefused(
            f"layout.format_version: the client uses {layout.format_version}, this server "
            f"{FORMAT_VERSION}; upgrade the older side",
            field="layout.format_version",
        )
    if layout.chunk_tokens < 1:
        raise BadRequest(
            f"layout.chunk_tokens: must be at least 1, found {layout.chunk_tokens}",
            field="layout.chunk_tokens",
        )
    if layout.lookahead < 0:
        raise BadRequest(
            f"layout.lookahead_tokens: must be at least 0, found {layout.lookahead_tokens}",
            field="layout.lookahead_tokens",
        )


def _check_slice(request: AttachRequest) -> None:
    part, facts = request.slice, request.facts
    if (part is None) != (facts is None):
        missing = "slice" if part is None else "facts"
        raise BadRequest(f"{missing}: missing; slice and facts go together", field=missing)
    if part is None and request.role is Role.WORKER:
        raise BadRequest("slice: missing; a worker declares the slice it reads and writes", field="slice")
    if part is not None and request.role is Role.SCHEDULER:
        raise BadRequest("slice: a scheduler has none; attach as worker or client", field="slice")
    if part is None:
        return
    for name, (first, end) in (("layers", part.layers), ("kv_heads", part.kv_heads)):
        if not 0 <= first < end:
            raise BadRequest(
                f"slice.{name}: [{first}, {end}) is not a range; it is half-open and starts at 0",
                field=f"slice.{name}",
            )
    try:
        digest = facts_digest(facts or {})
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"facts: not plain numbers, strings and lists: {error}", field="facts") from error
    span = (facts or {}).get(SPAN_FACT, 1)
    if type(span) is not int or not 0 < span <= MAX_SPAN_CHUNKS:
        raise BadRequest(
            f"facts.{SPAN_FACT}: {span!r:.80}, must be 1 to {MAX_SPAN_CHUNKS}; leave it out if all chunks are needed",
            field=f"facts.{SPAN_FACT}",
        )
    if not declared_record_bytes(facts or {}):
        raise BadRequest(
            "facts.payload_bytes, facts.sections: missing or no possible sizes; send the number of bytes of a chunk's "
            "KV in this slice, and the number of sections or a list of their lengths",
            field="facts.payload_bytes",
        )
    if part.layout != digest:
        raise BadRequest(
            f"slice.layout: {part.layout!r:.80} is not the digest of the facts, which is {digest!r}",
            field="slice.layout",
        )


def declared_record_bytes(facts: Mapping[str, Any]) -> int:
    """The length in bytes of a chunk's record by its slice's facts (docs/internals/layouts.md); 0: missing or wrong."""
    payload, sections = facts.get("payload_bytes"), facts.get("sections")
    count = len(sections) if isinstance(sections, list) else sections
    if type(payload) is not int or type(count) is not int:
        return 0
    if not 0 < count <= min(payload, MAX_SECTIONS) or payload > MAX_PAYLOAD_BYTES:
        return 0
    return record_bytes(count, payload)


def check_company(request: AttachRequest, others: Iterable[AttachRequest]) -> None:
    """Checks a request against those of the other living sessions of the same tenants.

    Raises BadRequest when its own group's declaration differs, LayoutRefused when a session with the same part of the
    KV has other facts, apart from GEOMETRY.  Sessions with the same part agree already, so checking one is enough.
    """
    part = None if request.slice is None else _part(request)
    for other in others:
        if other.group == request.group:
            _check_same(request, other, ("layout", "engine_slices"), "another process of the same group")
        if part is not None and other.slice is not None and _part(other) == part:
            _check_facts(request.facts or {}, other.facts or {})
            part = None


def check_resumed(request: AttachRequest, earlier: AttachRequest) -> None:
    """Raises BadRequest when a session that attaches again changes its declaration."""
    fields = ("group", "role", "layout", "engine_slices", "slice", "registers_memory")
    _check_same(request, earlier, fields, "this session before")


def _check_same(request: AttachRequest, other: AttachRequest, fields: tuple[str, ...], who: str) -> None:
    for field in fields:
        mine, theirs = getattr(request, field), getattr(other, field)
        if mine == theirs:
            continue
        if isinstance(mine, msgspec.Struct) and isinstance(theirs, msgspec.Struct):
            inner = next(f for f in mine.__struct_fields__ if getattr(mine, f) != getattr(theirs, f))
            field, mine, theirs = f"{field}.{inner}", getattr(mine, inner), getattr(theirs, inner)
        raise BadRequest(f"{field}: {mine!r:.80}, but {who} declared {theirs!r:.80}", field=field)


def _part(request: AttachRequest) -> tuple[object, ...]:
    assert request.slice is not None
    return request.layout, request.slice.layers, request.slice.kv_heads, request.slice.group


def _check_facts(facts: dict[str, Any], earlier: dict[str, Any]) -> None:
    absent = object()
    for name in sorted((facts.keys() | earlier.keys()) - GEOMETRY):
        mine, theirs = facts.get(name, absent), earlier.get(name, absent)
        if mine is absent or theirs is absent or canonical_json(mine) != canonical_json(theirs):
            shown = ["absent" if value is absent else repr(value) for value in (mine, theirs)]
            raise LayoutRefused(
                f"facts.{name}: {shown[0]} here, {shown[1]} in a process attached with the same identity; "
                "give engines with another KV layout another identity (model, revision, weights), or end the "
                "others",
                field=f"facts.{name}",
            )


def take_pidfd(received: WithFds, sock: socket.socket, credentials: linux.SocketCredentials) -> int:
    """Take the pidfd of a request out of `received.fds`, after checking that it is the sender's own.

    Raises BadRequest unless exactly one pidfd came, NotPermitted for another process's pidfd, GaveUp when the process
    has ended, Refused when this server has no free descriptor numbers.
    """
    if received.fds_lost and not received.fds:
        raise Refused("the server has no free file descriptors; try again", field="pidfd")
    if len(received.fds) != 1 or received.fds_lost:
        count = f"more than {len(received.fds)}" if received.fds_lost else str(len(received.fds))
        raise BadRequest(
            f"pidfd: {count} descriptors came with the request; send exactly one, pidfd_open(getpid(), 0)",
            field="pidfd",
        )
    [fd] = received.fds
    subject = linux.pidfd_subject(fd)
    if subject is None or subject.thread:
        what = "no pidfd" if subject is None else "the pidfd of a thread"
        raise BadRequest(f"pidfd: the descriptor is {what}; send pidfd_open(getpid(), 0)", field="pidfd")
    if subject.pid < 0:
        raise GaveUp("it has ended")
    if subject.pid != credentials.pid or (credentials.pid == 0 and not _is_senders(fd, sock)):
        raise NotPermitted(
            f"pidfd: it stands for process {subject.pid}, but the request came from {credentials.pid}; a process can "
            "only attach itself",
            field="pidfd",
        )
    received.fds.clear()
    return fd


def _is_senders(fd: int, sock: socket.socket) -> bool:
    """Whether a pidfd is the sender's, where process numbers are not visible (a sibling PID namespace)."""
    own = linux.socket_pidfd(sock)
    if own is None:
        return True  # before Linux 6.5 the kernel cannot tell; the uid was checked
    try:
        return linux.same_process(fd, own) is not False
    finally:
        linux.close_all([own])
