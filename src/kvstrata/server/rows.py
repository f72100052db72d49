"""Sessions and their rows: which process owns a row, which has ended, and which row is stranded.

A row of the pool's session table goes through the states of `MACHINE`.

Invariants
1. A row belongs to a process, not to a connection or a clock.  A closed connection only *detaches* the session.  The
   row ends (`Pool.row_gone`) when the process is dead: its pidfd is readable or, for rows from before a server
   restart, no process locks the row's byte of sessions.lock.  Apart from that, only its owner's "bye" ends it.
2. A free byte does not prove that a device has stopped: the kernel drops the locks of a dying process before the driver
   tears down the contexts of that process.  So when the byte of a row from before the restart is free and its session
   had registered memory, the row is *stranded*: its bytes stay quarantined until `clear_stranded`.
3. A row that was claimed but never locked was never announced to the rest of the server, so it has no reservations;
   it ends with its connection.
4. `row_gone` is called only after `on_gone` has returned, when no operation of that session runs any more.

Not here: sockets and messages (`server`), leases and reservations.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvstrata.errors import BadRequest, NotPermitted, Refused
from kvstrata.memory import linux
from kvstrata.native.core import Pool, PoolError
from kvstrata.rpc.wire import AttachRequest
from kvstrata.server.attach_checks import check_company, check_resumed
from kvstrata.types import shown_name

if TYPE_CHECKING:  # exists for type checkers only
    from kvstrata.native.core import Row as PoolRow
    from kvstrata.server.listener import Line
    from kvstrata.server.requests.requests import Hooks
import enum
from typing import NamedTuple

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


class Owner(msgspec.Struct, eq=False):
    """The living process of a row: its request, its pidfd, and the connection that speaks for it."""

    row: Row
    request: AttachRequest
    pidfd: int
    speaker: Line | None

    def is_process(self, credentials: linux.SocketCredentials, pidfd: int) -> bool:
        """Whether the credentials and the pidfd are those of the owner."""
        if self.row.seen.pid != credentials.pid:
            return False
        return linux.same_process(self.pidfd, pidfd) is not False


class Row(msgspec.Struct, eq=False):
    """One row that is not free."""

    seen: SessionRow
    old: SessionRow | None
    """The row as the adopted pool had it; None for a row that this server gave out."""
    state: RowState = RowState.FREE
    kept_bytes: int = 0
    """Bytes that the row quarantines while it is STRANDED."""

    def move(self, event: RowEvent) -> RowState:
        """Enter the state that `MACHINE` gives. Returns the state before."""
        before, self.state = self.state, MACHINE.after(self.state, event)
        return before


_log = logging.getLogger(__name__)


class Rows:
    """All rows of a pool but the server's own. Used on the event loop only; slow calls of the pool run on the lane."""

    def __init__(
        self,
        pool: Pool,
        sessions_lock: int,
        hooks: Hooks,
        old_row_interval_s: float,
        lane: concurrent.futures.Executor,
    ) -> None:
        """`sessions_lock`: descriptor of sessions.lock; `old_row_interval_s`: time between two looks at its locks;
        `lane`: a thread for slow calls of the pool, which must outlive `ended`."""
        self._pool = pool
        self._sessions_lock = sessions_lock
        self._hooks = hooks
        self._old_row_interval_s = old_row_interval_s
        self._rows: dict[int, Row] = {}
        self._owners: dict[bytes, Owner] = {}
        """The owners (living processes), by session."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._lane = lane

    # --- life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over the rows from before a restart, and end those whose processes have died since."""
        self._loop = asyncio.get_running_loop()
        for known in self._pool.rows():
            if known["old"]:
                self._found(known)
        if await self._sweep_old_rows():
            self._sweeper = asyncio.create_task(self._sweep(), name="attach-sweep-old-rows")

    async def stop_sweeping(self) -> None:
        """Stop looking for old rows whose processes have ended."""
        self._stopping.set()
        if self._sweeper is not None:
            await self._sweeper

    def forget_owners(self) -> None:
        """Stop watching processes, because the server stops; their rows stay in the pool for the next server."""
        for owner in self._owners.values():
            owner.speaker = None
            self._unwatch(owner)
        self._owners.clear()

    async def ended(self) -> None:
        """Wait until the rows that are being ended have ended. No row can be ended after this."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def count(self, *states: RowState) -> int:
        """The number of rows in these states."""
        return sum(row.state in states for row in self._rows.values())

    # --- claiming a row ----------------------------------------------------------------------------------

    def claim(
        self, request: AttachRequest, tenants: frozenset[str] | None, pidfd: int, speaker: Line
    ) -> Owner:
        """Give the process behind `speaker` the row of its session: a new row, or the one that it has already.

        Takes ownership of `pidfd` if it returns; if it raises, the caller still owns it.  Raises a KvstrataError if
        the process may not have the row.  An earlier connection of the process is closed.
        """
        self._check_tenants(request, tenants)
        check_company(request, self._others(request.session, tenants))
        owner = self._owners.get(request.session)
        if (
            owner is not None
            and owner.row.state in (RowState.CLAIMED, RowState.RECLAIMED)
            and owner.is_process(speaker.credentials, pidfd)
        ):
            assert owner.speaker is not None
            owner.speaker.let_go(ok=False)  # the process gave up its first try; its hang-up is unread
            owner = None
        if owner is None:
            return self._claim_row(request, tenants, pidfd, speaker)
        if not owner.is_process(speaker.credentials, pidfd):
            raise NotPermitted("session: it belongs to another living process", field="session")
        check_resumed(request, owner.request)
        # Its token may be another, or open other tenants since the file was read again.
        owner.row.seen = msgspec.structs.replace(owner.row.seen, tenants=tenants)
        earlier, owner.speaker = owner.speaker, speaker
        if earlier is not None:
            earlier.let_go(ok=False)
        linux.close_all([pidfd])  # the owner already has one
        return owner

    def locked(self, owner: Owner) -> None:
        """Announce the session of an owner that says it has locked its byte.

        Raises BadRequest if no process
        has locked the byte, NotPermitted if another process has.
        """
        row, credentials = owner.row, _speaker_of(owner).credentials
        number = row.seen.row
        locker = linux.byte_locker(self._sessions_lock, number)
        if locker is None:
            raise BadRequest(
                f"locked: byte {number} of sessions.lock is not locked; take it with F_SETLK", field="row"
            )
        if locker != credentials.pid:
            raise NotPermitted(
                f"locked: byte {number} of sessions.lock is locked by process {locker}, not by "
                f"{credentials.pid}",
                field="row",
            )
        resumed = row.seen.resumed or row.state in (RowState.ATTACHED, RowState.DETACHED)
        row.seen = msgspec.structs.replace(row.seen, resumed=resumed)
        self._hooks.on_attached(row.seen)
        row.move(RowEvent.LOCKED)

    def _others(self, session: bytes, tenants: frozenset[str] | None) -> Iterable[AttachRequest]:
        """The other sessions with the same tenants; sessions with other tenants share no chunk with this one."""
        return [
            owner.request
            for name, owner in self._owners.items()
            if name != session and owner.row.seen.tenants == tenants
        ]

    def _check_tenants(self, request: AttachRequest, tenants: frozenset[str] | None) -> None:
        """Raises NotPermitted unless the other processes of the group may use the same tenants, or did until the file
        of tokens was read again."""
        for name, owner in self._owners.items():
            same_group = owner.request.group == request.group and name != request.session
            if same_group and owner.row.seen.tenants != tenants and owner.request.token != request.token:
                raise NotPermitted(
                    "group: its processes may use other tenants; give all processes of an engine the same token",
                    field="group",
                )

    def _claim_row(
        self, request: AttachRequest, tenants: frozenset[str] | None, pidfd: int, speaker: Line
    ) -> Owner:
        """Claim a row for a session that has no owner: a new row, or the OLD row of the same process."""
        credentials = speaker.credentials
        known = next((row for row in self._pool.rows() if row["session"] == request.session), None)
        if known is not None:
            self._check_old_row(known, credentials, request)
        try:
            number = self._pool.claim_row(
                request.session, request.group, credentials.pid, request.registers_memory
            )
        except PoolError as error:
            raise Refused(
                f"session: no row is left for it ({error}); end other engines", field="session"
            ) from error
        seen = SessionRow(
            row=number,
            session=request.session,
            group=request.group,
            pid=credentials.pid,
            request=request,
            tenants=tenants,
            resumed=known is not None,
            registers_memory=request.registers_memory,
        )
        row = self._rows.get(number)
        if row is None or row.state is not RowState.OLD:
            # The pool may just have freed a row that is still RETIRING here.
            row = self._rows[number] = Row(seen, None)
        row.seen = seen
        row.move(RowEvent.CLAIMED)
        owner = self._owners[request.session] = Owner(row, request, pidfd, speaker)
        self._loop.add_reader(pidfd, self._died, owner)
        return owner

    def _check_old_row(
        self, known: PoolRow, credentials: linux.SocketCredentials, request: AttachRequest
    ) -> None:
        """Raise Refused or NotPermitted unless the row is OLD and its own process asks for it."""
        row = self._rows.get(known["row"])
        state = row.state if row is not None else RowState.FREE
        if state is RowState.STRANDED:
            raise Refused("session: its earlier process has ended; choose another session", field="session")
        if state is RowState.RETIRING:
            raise Refused("session: its earlier process is being cleaned up; try again", field="session")
        locker = linux.byte_locker(self._sessions_lock, known["row"])
        if locker is None:
            raise Refused(
                "session: its earlier process has ended and is being cleaned up; try again", field="session"
            )
        if locker != credentials.pid or known["group"] != request.group:
            raise NotPermitted("session: it belongs to another living process", field="session")

    def _found(self, known: PoolRow) -> None:
        """Add a row that an earlier server gave out, as OLD."""
        seen = SessionRow(
            row=known["row"],
            session=known["session"],
            group=known["group"],
            pid=known["pid"],
            request=None,
            registers_memory=known["registers_memory"],
        )
        row = self._rows[seen.row] = Row(seen, seen)
        row.move(RowEvent.FOUND)

    # --- ending a row ------------------------------------------------------------------------------------

    def lost(self, owner: Owner, speaker: Line) -> None:
        """Detach or end the owner's row, if the connection that has closed, `speaker`, still spoke for it."""
        if owner.speaker is not speaker:
            return
        owner.speaker = None
        row = owner.row
        match row.move(RowEvent.LOST):
            case RowState.ATTACHED:
                self._hooks.on_detached(row.seen)
            case RowState.CLAIMED | RowState.RECLAIMED:
                self._forget(owner)
                self._let_row_go(row)  # at once, because the session owns nothing yet

    def bye(self, owner: Owner) -> None:
        """End the row of an owner that says goodbye; once the row is free, its connection gets "ok" and is closed.

        Raises BadRequest while the row's byte is locked.
        """
        row, speaker = owner.row, _speaker_of(owner)
        if linux.byte_locker(self._sessions_lock, row.seen.row) is not None:
            raise BadRequest(
                f"bye: byte {row.seen.row} of sessions.lock is still locked; unlock it first", field="row"
            )
        row.move(RowEvent.BYE)
        owner.speaker = None
        self._forget(owner)
        self._retire(row, speaker)

    def _died(self, owner: Owner) -> None:
        """End the row of an owner whose pidfd is readable."""
        speaker, owner.speaker = owner.speaker, None
        self._forget(owner)
        if speaker is not None:
            speaker.let_go(ok=False)
        owner.row.move(RowEvent.DIED)
        if owner.row.state is RowState.RETIRING:
            self._retire(owner.row)
        else:
            self._let_row_go(owner.row)

    def _let_row_go(self, row: Row) -> None:
        """Undo a claim that was not completed: an old row becomes OLD again and keeps its bytes, a new row is freed."""
        if row.state is RowState.OLD:
            assert row.old is not None
            row.seen = row.old  # its lock still tells whether its process lives
        else:
            del self._rows[row.seen.row]
            self._pool.row_gone(row.seen.row)

    def _forget(self, owner: Owner) -> None:
        self._unwatch(owner)
        del self._owners[owner.row.seen.session]

    def _unwatch(self, owner: Owner) -> None:
        self._loop.remove_reader(owner.pidfd)
        os.close(owner.pidfd)

    def _retire(self, row: Row, speaker: Line | None = None, *, unseen: bool = False) -> asyncio.Task[None]:
        """Begin to end a row in RETIRING; when it has ended, `speaker` gets an "ok".

        `unseen`: the process ended while no server watched, which only its free byte shows.
        """
        task = asyncio.create_task(self._end_row(row, speaker, unseen), name=f"attach-end-row-{row.seen.row}")
        self._tasks.add(task)
        task.add_done_callback(self._end_done)
        return task

    async def _end_row(self, row: Row, speaker: Line | None, unseen: bool) -> None:
        seen = row.seen
        await self._hooks.on_gone(seen)
        kept_bytes = 0
        if unseen and seen.registers_memory:
            kept_bytes = await self._loop.run_in_executor(self._lane, self._pool.row_stranded, seen.row)
        else:
            await self._loop.run_in_executor(self._lane, self._pool.row_gone, seen.row)
        if kept_bytes:
            row.move(RowEvent.KEPT_BYTES)
            row.kept_bytes = kept_bytes
            _log.warning(
                "attach: process %d of session %s ended while no server watched, and its device may still write "
                "into %d bytes of L1; when you know that it does not, free them: kvstrata ctl stranded clear %s",
                seen.pid,
                shown_name(seen.session),
                kept_bytes,
                shown_name(seen.session),
            )
        else:
            row.move(RowEvent.ENDED)
            if self._rows.get(seen.row) is row:  # if not, it was claimed after the pool had freed it
                del self._rows[seen.row]
        if speaker is not None:
            speaker.let_go(ok=True)

    def _end_done(self, task: asyncio.Task[None]) -> None:
        """Log why a row could not be ended; it stays occupied."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("attach: %s failed; the row stays occupied", task.get_name(), exc_info=error)

    # --- stranded rows, and rows from before a restart ---------------------------------------------------

    def stranded(self) -> list[Stranded]:
        """Return the stranded rows; a device may still write into the extents that they quarantine."""
        return [
            Stranded(row.seen, row.kept_bytes)
            for row in self._rows.values()
            if row.state is RowState.STRANDED
        ]

    async def clear_stranded(self, sessions: Sequence[bytes] | None = None) -> list[Stranded]:
        """Free the extents of stranded sessions (None: all). An operator has said that no device writes for them now.

        Returns the cleared ones. Raises KeyError, and clears none, if one of them is not stranded. If the call is
        cancelled, they are cleared all the same.
        """
        by_name = {row.seen.session: row for row in self._rows.values() if row.state is RowState.STRANDED}
        names = by_name if sessions is None else dict.fromkeys(sessions)
        chosen = [by_name[name] for name in names]
        cleared = [Stranded(row.seen, row.kept_bytes) for row in chosen]
        for row in chosen:
            row.move(RowEvent.CLEARED)
        await asyncio.shield(asyncio.gather(*(self._retire(row) for row in chosen)))
        return cleared

    async def _sweep_old_rows(self) -> int:
        """End the OLD rows whose byte no process locks. Return how many OLD or RECLAIMED rows are left."""
        ending: list[asyncio.Task[None]] = []
        for row in list(self._rows.values()):
            unlocked = (
                row.state is RowState.OLD and linux.byte_locker(self._sessions_lock, row.seen.row) is None
            )
            if unlocked:
                row.move(RowEvent.UNLOCKED)
                ending.append(self._retire(row, unseen=True))
        await asyncio.gather(*ending, return_exceptions=True)
        return self.count(RowState.OLD, RowState.RECLAIMED)

    async def _sweep(self) -> None:
        while await self._sweep_old_rows():
            try:
                await asyncio.wait_for(self._stopping.wait(), self._old_row_interval_s)
            except TimeoutError:
                continue  # the kernel reports no event when a record lock ends
            return


def _speaker_of(owner: Owner) -> Line:
    """Return the connection over which the owner has just sent a message."""
    assert owner.speaker is not None, "a message came over a connection that was closed"
    return owner.speaker
