"""One row of the pool's session table: its states, its owner, and what the rest of the server sees of it.

`MACHINE` has the states; `rows` moves a row through them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

import msgspec

from kvstrata.memory import linux
from kvstrata.rpc.attach_wire import AttachRequest
from kvstrata.states import Machine


class RowState(enum.Enum):
    """Who owns a row."""

    FREE = enum.auto()
    """No session has it."""
    OLD = enum.auto()
    """An earlier server gave it out, and its process has not attached to this one."""
    CLAIMED = enum.auto()
    """A process has been given it but has not locked its byte yet; the rest of the server does not know it."""
    RECLAIMED = enum.auto()
    """The process of an OLD row attaches again but has not said yet that its byte is locked."""
    ATTACHED = enum.auto()
    """Its process lives, and has a connection or is replacing it."""
    DETACHED = enum.auto()
    """Its process lives and has no connection; everything it owns stays."""
    RETIRING = enum.auto()
    """Its process has ended or said goodbye. Its operations are being ended; then the row is freed."""
    STRANDED = enum.auto()
    """Its process ended while no server watched; a device may still write into extents that the row quarantines."""


class RowEvent(enum.Enum):
    """An event in the life of a row."""

    FOUND = enum.auto()
    """The server starts, and the adopted pool has a session in this row."""
    CLAIMED = enum.auto()
    """A process asks to attach with the row's session."""
    LOCKED = enum.auto()
    """The process says that it has locked the row's byte, and it has."""
    LOST = enum.auto()
    """The connection of the process is closed."""
    DIED = enum.auto()
    """The pidfd of the process is readable."""
    BYE = enum.auto()
    """The process says goodbye, and its byte is free."""
    UNLOCKED = enum.auto()
    """The server finds that no process locks the row's byte."""
    ENDED = enum.auto()
    """The pool has freed the row."""
    KEPT_BYTES = enum.auto()
    """Its process ended while no server watched, and its bytes stay quarantined: a device may still write them."""
    CLEARED = enum.auto()
    """An operator says that no device writes for this session any more."""


MACHINE = Machine(
    "Row of an attached process",
    RowState.FREE,
    {
        RowState.FREE: {RowEvent.FOUND: RowState.OLD, RowEvent.CLAIMED: RowState.CLAIMED},
        RowState.OLD: {RowEvent.CLAIMED: RowState.RECLAIMED, RowEvent.UNLOCKED: RowState.RETIRING},
        RowState.CLAIMED: {
            RowEvent.LOCKED: RowState.ATTACHED,
            RowEvent.LOST: RowState.FREE,
            RowEvent.DIED: RowState.FREE,
        },
        RowState.RECLAIMED: {
            RowEvent.LOCKED: RowState.ATTACHED,
            RowEvent.LOST: RowState.OLD,
            RowEvent.DIED: RowState.OLD,
        },
        RowState.ATTACHED: {
            RowEvent.LOCKED: RowState.ATTACHED,
            RowEvent.LOST: RowState.DETACHED,
            RowEvent.DIED: RowState.RETIRING,
            RowEvent.BYE: RowState.RETIRING,
        },
        RowState.DETACHED: {
            RowEvent.LOCKED: RowState.ATTACHED,
            RowEvent.LOST: RowState.DETACHED,
            RowEvent.DIED: RowState.RETIRING,
        },
        RowState.RETIRING: {RowEvent.ENDED: RowState.FREE, RowEvent.KEPT_BYTES: RowState.STRANDED},
        RowState.STRANDED: {RowEvent.CLEARED: RowState.RETIRING},
    },
)


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attached process, as the rest of the server knows it."""

    row: int
    session: bytes
    group: bytes
    pid: int
    """In the server's PID namespace; 0: not visible there."""
    request: AttachRequest | None
    """None for a process that attached to an earlier server and not to this one."""
    tenants: frozenset[str] | None = None
    """Tenants that it may use; None: all."""
    resumed: bool = False
    """It was attached before: to this server, or to an earlier one whose pool was adopted."""
    registers_memory: bool = False
    """Whether a device may access the extents on its behalf."""

    def __repr__(self) -> str:
        """The row, without what the process declared."""
        return f"SessionRow(row={self.row}, pid={self.pid}, resumed={self.resumed})"


class Stranded(NamedTuple):
    """A row that keeps extents in quarantine although its process has ended."""

    seen: SessionRow
    kept_bytes: int


class AttachHooks(Protocol):
    """The server's reactions to attached processes. All are called on the event loop."""

    def admit(self, request: AttachRequest) -> None:
        """Raises a KvstrataError to refuse a process (other chunk size, stopping, …)."""
        ...

    def tenants_of(
        self, credentials: linux.SocketCredentials, request: AttachRequest
    ) -> frozenset[str] | None:
        """Tenants that this process may use; None: all. Raises NotPermitted for a bad token."""
        ...

    def on_attached(self, session: SessionRow) -> None:
        """Accept requests of this session from now on. Called before the process learns that it is attached."""
        ...

    def on_detached(self, session: SessionRow) -> None:
        """The connection has closed though the process lives; everything it owns stays."""
        ...

    async def on_gone(self, session: SessionRow) -> None:
        """The process is dead or said goodbye. Returns when no operation runs for it any more."""
        ...


class Speaker(Protocol):
    """The connection over which a process speaks for its row."""

    @property
    def credentials(self) -> linux.SocketCredentials:
        """Credentials of the process at its other end."""

    def let_go(self, *, ok: bool) -> None:
        """Close: the row does not need this connection any more. `ok`: first confirm the process's goodbye."""


class Owner:
    """The living process of a row: its request, its pidfd, and the connection that speaks for it."""

    __slots__ = ("pidfd", "request", "row", "speaker")

    def __init__(self, row: Row, request: AttachRequest, pidfd: int, speaker: Speaker) -> None:
        self.row = row
        self.request = request
        self.pidfd = pidfd
        self.speaker: Speaker | None = speaker

    def is_process(self, credentials: linux.SocketCredentials, pidfd: int) -> bool:
        """Whether the credentials and the pidfd are those of the owner."""
        if self.row.seen.pid != credentials.pid:
            return False
        return linux.same_process(self.pidfd, pidfd) is not False


class Row:
    """One row that is not free."""

    __slots__ = ("kept_bytes", "old", "seen", "state")

    def __init__(self, seen: SessionRow, old: SessionRow | None) -> None:
        self.seen = seen
        self.old = old
        """The row as the adopted pool had it; None for a row that this server gave out."""
        self.state = MACHINE.first
        self.kept_bytes = 0
        """Bytes that the row quarantines while it is STRANDED."""

    def move(self, event: RowEvent) -> RowState:
        """Enter the state that `MACHINE` gives. Returns the state before."""
        before, self.state = self.state, MACHINE.after(self.state, event)
        return before
