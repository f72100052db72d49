"""The request and the reply of the attach handshake, as msgpack maps; its other messages are single words.

They are the first messages of a process's connection, with descriptors; requests (`wire`) follow.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.rpc.wire import MAX_SLICES, SessionName
from kvstrata.types import LayoutIdentity, Role, Slice

ENGINE_URL = r"^(|https?://[^\s/?#@]+:[0-9]{1,5})$"
"""Form of an engine's URL."""
MAX_HELD_LOCKS = 1024
"""Maximum number of lock files of one process: one per segment that it was ever attached to."""


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a connection; the caller's own pidfd travels with it."""

    protocol: int
    session: SessionName
    """Random bytes that the caller chooses; the same when the process attaches again."""
    group: SessionName
    """Name of the engine: all its processes attach with the same 16 bytes."""
    role: Role
    """Role of the process in its engine."""
    layout: LayoutIdentity
    engine_slices: Annotated[int, Meta(ge=1, le=MAX_SLICES)]
    """Number of distinct slices of the whole engine."""
    slice: Slice | None = None
    """The slice that this process reads and writes; nil for a scheduler."""
    facts: dict[str, Any] | None = None
    """Layout facts from which `slice.layout` is derived. The same identity with other facts, apart from `axes` and
    `block_tokens`, is refused; the error names the first fact that differs."""
    old_epoch: int = 0
    """Epoch of the previous attachment, 0 for none."""
    registers_memory: bool = False
    """Whether the extents are registered with a device's driver, so that the device may access them for this process.
    Such access may outlast the locks of a process that dies, but not its pidfd."""
    token: Annotated[str, Meta(max_length=256)] = ""
    """Proves which tenants this process may use, if the server has a tenants file."""
    engine_url: Annotated[str, Meta(max_length=256, pattern=ENGINE_URL)] = ""
    """Where gateways reach the engine over HTTP, for its scheduler to tell; empty: they are not told of it."""
    held_locks: Annotated[list[tuple[int, int]], Meta(max_length=MAX_HELD_LOCKS)] = []
    """(device, inode) of every sessions.lock that this process has open. The process must never get a second descriptor
    of such a file, because closing that descriptor would drop its locks."""

    def __repr__(self) -> str:
        """Every field but the token, which is a secret."""
        shown = {**msgspec.structs.asdict(self), "token": "***" if self.token else ""}
        return f"AttachRequest({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class AttachReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to it; an empty `code` means accepted.

    With an accepted attach, descriptors travel with it: index (read-only), extents (read-only for a process without a
    slice), and sessions.lock, unless the request's `held_locks` names it.
    """

    code: str = ""
    message: str = ""
    field: str = ""
    """The field of the request that was refused, as in an error reply."""
    row: int = 0
    """Row of the process in the session table."""
    epoch: int = 0
    """Changes with every start of the server."""
    pool_id: bytes = b""
    """Changes with every new pool, whose files the client must then map anew."""
    extents_bytes: int = 0
    """Length of the extents file."""
    max_reserved_bytes: int = 0
    """Maximum number of bytes that the process may have reserved at a time; a larger store takes several reserves."""
    instance_id: str = ""
    lock_file: tuple[int, int] = (0, 0)
    """(device, inode) of sessions.lock; the client locks byte `row` of it for life."""
