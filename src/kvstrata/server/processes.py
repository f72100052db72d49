"""The table of attached processes: their rows, engines, identities, tenants, running requests and grants.

A row of the pool's session table goes through the states of `MOVES`; a `Process` is the owner of a row that is not
free.  A *group* is one engine: a scheduler and its workers, or one process that is both.  Each worker declares which
slice of every chunk's KV it has.  A group is *complete* when as many distinct slices are known as the engine has; only
then can a chunk count as a hit, since all its slices must be present.

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
5. All members of a group declared the same LayoutIdentity and the same number of slices; the attach handshake
   refuses others (server/attach_checks.py).
6. In one epoch an identity id names one (layout, request) and no other; ids of dropped identities are not reused.

Not here: sockets (listener.py), requests, leases and reservations (requests/).
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import logging
import os
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from kvstrata.errors import BadRequest, NotPermitted, Refused, Unavailable, UnknownIdentity
from kvstrata.memory import linux
from kvstrata.naming import name_thread
from kvstrata.native.core import Pool, PoolError
from kvstrata.observability.explain import EngineUse
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.wire import MAX_SLICES, AttachRequest
from kvstrata.server.attach_checks import check_company, check_resumed, declared_record_bytes
from kvstrata.types import SPAN_FACT, LayoutIdentity, RequestIdentity, identity_root, shown_name

if TYPE_CHECKING:
    from kvstrata.native.core import Row as PoolRow
    from kvstrata.server.listener import Line
    from kvstrata.server.requests.grants import Lease, Reservation
    from kvstrata.server.requests.promises import Promise
    from kvstrata.server.requests.requests import Requests

MAX_IDENTITIES = 4096
"""Maximum number of identities of one session; the one that was declared or used longest ago is dropped."""
MAX_NAME_CHARS = 4096
"""Maximum length of an adapter's name, a tenant or a salt."""
ADAPTERS_REMEMBERED = 64
"""Number of adapters remembered for each engine, those that were declared last."""
SESSIONS_OF_PROCESS, SESSIONS_OF_TOKEN = 64, 512
"""Maximum number of sessions of one process, and of all processes that may name the same tenants."""
MAX_MODELS = 3
"""Maximum number of layouts whose chunks have costs of their own in the pool."""
OLD_ROW_INTERVAL_S = 1.0
"""Interval between checks of the locks of rows from before a restart."""
MAX_ELEMENT_BYTES = 16

_log = logging.getLogger(__name__)


# --- rows -------------------------------------------------------------------------------------------------------------


class RowState(enum.Enum):
    """The ownership of a row."""

    FREE = enum.auto()
    """No session has it."""
    OLD = enum.auto()
    """An earlier server granted it, and its process has not attached to this one."""
    CLAIMED = enum.auto()
    """It was granted to a process that has not locked its byte yet and that the rest of the server does not know."""
    RECLAIMED = enum.auto()
    """The process of an OLD row attaches again but has not confirmed yet that its byte is locked."""
    ATTACHED = enum.auto()
    """Its process is alive, and has a connection or is replacing it."""
    DETACHED = enum.auto()
    """Its process is alive without a connection, and keeps everything that it owns."""
    RETIRING = enum.auto()
    """Its process has ended or said goodbye. Its operations are being ended; then the row is freed."""
    STRANDED = enum.auto()
    """Its process ended while no server ran; a device may still write into extents that the row quarantines."""


class RowEvent(enum.Enum):
    """An event in the life of a row."""

    FOUND = enum.auto()
    """The server starts, and the adopted pool has a session in this row."""
    CLAIMED = enum.auto()
    """A process asks to attach with the row's session."""
    LOCKED = enum.auto()
    """The process reports that it has locked the row's byte, and the server has verified that."""
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
    """Its process ended while no server ran, and its bytes stay quarantined: a device may still write them."""
    CLEARED = enum.auto()
    """An operator confirms that no device writes for this session any more."""


MOVES = {
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
}
"""The state that an event leads to; an event that a state does not list cannot happen in it."""
KNOWN = (RowState.ATTACHED, RowState.DETACHED)
"""States of the processes that the rest of the server knows."""


# --- engines and identities -------------------------------------------------------------------------------------------


def tenant_number(tenant: str) -> int:
    """The 32-bit number by which the pool counts a tenant's bytes; 0 for the unnamed tenant."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4], "little") or 1


class DeclaredIdentity(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """An identity that a session has declared by `identify`."""

    number: int
    layout: LayoutIdentity
    request: RequestIdentity
    root: bytes
    tenant: int


class Use(msgspec.Struct, eq=False, weakref=True):
    """The work and reservations under way of all sessions of one process, or of all with one token."""

    n_tasks: int = 0
    """Number of running tasks."""
    reserved_bytes: int = 0
    """Bytes of open reservations, and of reserves that are not answered yet."""
    promised_chunks: int = 0


class EngineGroup(msgspec.Struct, eq=False):
    """One engine: its members and their slices."""

    name: bytes
    layout: LayoutIdentity
    engine_slices: int
    use: EngineUse = msgspec.field(default_factory=EngineUse)
    members: dict[bytes, Process] = {}
    slices: list[bytes] = []
    """Digests of the slices of attached members, sorted: the order of extents in a lookup's reply."""
    packed_slices: bytes = b""
    """The digests of `slices`, concatenated."""
    rows: list[int] = []
    """Pool rows of all members; a lease is granted to each of them.  Each change makes a new list."""
    spans: tuple[int, ...] = ()
    """For each of `slices` how many of a hit's last chunks it needs, 0: all; () if every slice needs all."""
    prompt_tokens_s: float = 0.0
    """Prefill rate that its scheduler last reported (wire.Ping); 0: unknown."""
    complete: bool = False
    """Whether every slice of the engine has an attached member."""
    _adapters: dict[str, None] = {}

    def changed(self) -> None:
        """Recompute the fields that depend on the members."""
        of = {member.digest: member.span for member in self.members.values() if member.digest}
        self.slices = sorted(of)
        self.packed_slices = b"".join(self.slices)
        self.rows = sorted(member.row for member in self.members.values())
        spans = tuple(of[digest] for digest in self.slices)
        self.spans = spans if any(spans) else ()
        self.complete = len(self.slices) == self.engine_slices

    @property
    def adapters(self) -> list[str]:
        """`RequestIdentity.adapter` of its processes' identities, the last declared one first."""
        return list(reversed(self._adapters))

    def declares(self, adapter: str) -> None:
        """Record that a process has declared an identity with this `adapter`."""
        self._adapters.pop(adapter, None)
        self._adapters[adapter] = None
        if len(self._adapters) > ADAPTERS_REMEMBERED:
            del self._adapters[next(iter(self._adapters))]

    @property
    def record_limits(self) -> list[int]:
        """For each of `slices` the length of a whole chunk's record."""
        of = {member.digest: member.chunk_record_bytes for member in self.members.values()}
        return [of[digest] for digest in self.slices]

    @property
    def load_rate(self) -> tuple[float, float] | None:
        """How fast the engine loads chunks of all slices: latency in seconds, and bytes per second; None: unknown.

        Its processes load at the same time, and the engine waits for the slowest.
        """
        rates = {one.digest: one.load_rate for one in self.members.values() if one.load_rate is not None}
        if not rates or not self.complete or len(rates) < self.engine_slices:
            return None
        latencies_s, bytes_s = zip(*rates.values(), strict=True)
        return max(latencies_s), len(rates) * min(bytes_s)


NO_ENGINE = EngineGroup(b"", LayoutIdentity(model="", kv_dtype="", chunk_tokens=1), 0)
"""The group of processes that are not attached."""


class Process(msgspec.Struct, eq=False):
    """The owner of one row."""

    row: int
    session: bytes
    group_name: bytes
    pid: int
    """In the server's PID namespace; 0: not visible there."""
    request: AttachRequest | None = None
    """None for a process that attached to an earlier server and not to this one."""
    tenants: frozenset[str] | None = None
    """The tenants that it may use; None: any."""
    state: RowState = RowState.FREE
    resumed: bool = False
    """Whether it was attached before: to this server, or to an earlier one whose pool was adopted."""
    registers_memory: bool = False
    """Whether a device might access the extents on its behalf when it attached to an earlier server."""
    kept_bytes: int = 0
    """Bytes that the row quarantines while it is STRANDED."""
    pidfd: int = -1
    line: Line | None = None
    """Its current connection."""

    # Of a process that is attached.
    group: EngineGroup = msgspec.field(default_factory=lambda: NO_ENGINE)
    digest: bytes = b""
    """Digest of its slice; empty for a scheduler."""
    span: int = 0
    """How many of a hit's last chunks its slice needs; 0: all."""
    chunk_record_bytes: int = 0
    """Length of a whole chunk's record in its slice; a tail's is shorter."""
    pinged_s: float = 0.0
    """Time of its last ping by `time.monotonic`; 0: no ping since it attached."""
    identities: dict[int, DeclaredIdentity] = {}
    copies: dict[str, object] | None = None
    """How the process copies, as it last reported; None if its blocks are in host memory."""
    load_rate: tuple[float, float] | None = None
    """How fast it loads its slice of chunks, as last reported: latency in seconds, and bytes per second."""
    uses: tuple[Use, ...] = ()
    """The counters that it shares with the other sessions of its process, and with those of its token if it has one."""
    last_seq: int = -1
    """Number of its last request."""
    running: dict[int, Running] = {}
    """Its running tasks, by request number."""
    grants: dict[int, Lease | Reservation | Promise] = {}
    """The leases of its lookups whose share it has not released, its reservations and promises, by number
    (grants.py)."""

    def __repr__(self) -> str:
        """The row's number and state, without the process's declaration."""
        return f"Process(row={self.row}, pid={self.pid}, {self.state.name})"

    def move(self, event: RowEvent) -> RowState:
        """Enter the state that `MOVES` gives. Returns the previous state."""
        before, self.state = self.state, MOVES[self.state][event]
        return before

    @property
    def declared(self) -> AttachRequest:
        """The request of a process that attached to this server."""
        assert self.request is not None, "it attached to an earlier server only"
        return self.request

    @property
    def detached(self) -> bool:
        """Whether its connection is closed."""
        return self.state is RowState.DETACHED

    def is_at(self, line: Line, pidfd: int) -> bool:
        """Whether this process is at the other end of `line`, and `pidfd` is its own."""
        return self.pid == line.credentials.pid and linux.same_process(self.pidfd, pidfd) is not False


class Running(msgspec.Struct, eq=False):
    """The task of one request, until the request is answered and the task has ended."""

    sender: Line
    process: Process
    seq: int
    op: str
    started_s: float
    """When it arrived, by `time.perf_counter`."""
    uses: tuple[Use, ...]
    """The counters that include it; the process may attach again with another token meanwhile."""
    stopped: bool = False
    """It has been answered early; a grant that it still gets ends with its task."""
    task: asyncio.Task[None] | None = None


class TenantTokens:
    """The tenants that each token allows. If no tokens are configured, every local process may use every tenant."""

    def __init__(self, tokens: Mapping[str, frozenset[str]] | None = None) -> None:
        self._tokens = dict(tokens or {})

    def replace(self, other: TenantTokens) -> bool:
        """Use the tokens of `other` from the next attach on; returns whether they differ. Both must have tokens."""
        assert self._tokens and other._tokens
        before, self._tokens = self._tokens, other._tokens
        return self._tokens != before

    @property
    def without(self) -> frozenset[str] | None:
        """The tenants that a process without a token may use (None: any)."""
        return frozenset({""}) if self._tokens else None

    @property
    def sets(self) -> list[frozenset[str]]:
        """For each token the tenants that it allows."""
        return list(self._tokens.values())

    def allowed(self, token: str) -> frozenset[str] | None:
        """The tenants that a process with this token may use (None: any). Raises NotPermitted for an unknown token."""
        if not self._tokens or not token:
            return self.without
        for known, tenants in self._tokens.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                return tenants
        raise NotPermitted(
            "token: not in this server's tenants file; check the token and the file", field="token"
        )


class Readiness:
    """Whether the instance is ready: first `starting`, then ready, then `stopping`."""

    def __init__(self) -> None:
        self._why_not = "starting"

    def set(self, why_not: str = "") -> None:
        """Set the reason why the instance is not ready; empty: it is ready."""
        self._why_not = why_not

    def __call__(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""
        return not self._why_not, self._why_not

    @property
    def ready(self) -> bool:
        return not self._why_not

    @property
    def stopping(self) -> bool:
        """Whether the instance is about to end, so that no new process may attach."""
        return self._why_not == "stopping"


# --- the table --------------------------------------------------------------------------------------------------------


class Processes:
    """All processes, engines and identities of one instance.

    Used on the event loop only, except `element_bytes_of`; slow calls of the pool run on a thread.
    """

    def __init__(self, pool: Pool, epoch: int, tokens: TenantTokens, readiness: Readiness) -> None:
        self._pool, self._tokens, self._readiness = pool, tokens, readiness
        self._rows: dict[int, Process] = {}
        """The owner of each row that is not free, apart from the server's own."""
        self._living: dict[bytes, Process] = {}
        """Processes that live and have claimed a row of this server, by session."""
        self._groups: dict[bytes, EngineGroup] = {}
        self._by_root: WeakValueDictionary[bytes, DeclaredIdentity] = WeakValueDictionary()
        """Declared identities by root, each as long as a process has it."""
        self._uses: WeakValueDictionary[Hashable, Use] = WeakValueDictionary()
        """Counters by pid (by session where the pid is not visible), and by token."""
        self._models: dict[LayoutIdentity, int] = {}
        self._next_number = ((epoch & 0xFFFFFF) << 32) | 1
        self._element_bytes: dict[bytes, int] = {}
        """Element size in bytes of a slice's payloads, by the slice's digest."""
        self._ending: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._events = EventLog("instance")

    # --- life --------------------------------------------------------------------------------------------

    async def start(self, requests: Requests, sessions_lock: int) -> None:
        """Take over the rows from before a restart, and end those whose processes have died since.

        `requests` is notified of processes that attach and end. `sessions_lock`: descriptor of sessions.lock.
        """
        self._loop, self._requests, self._sessions_lock = asyncio.get_running_loop(), requests, sessions_lock
        self._lane = ThreadPoolExecutor(1, "kv-rows", name_thread)
        for known in self._pool.rows():
            if known["old"]:
                found = Process(known["row"], known["session"], known["group"], known["pid"])
                found.registers_memory = known["registers_memory"]
                found.move(RowEvent.FOUND)
                self._rows[found.row] = found
        if await self._sweep_old_rows():
            self._sweeper = asyncio.create_task(self._sweep(), name="attach-sweep-old-rows")

    async def stop(self) -> None:
        """Stop checking old rows for ended processes, and watching the other processes."""
        self._stopping.set()
        if self._sweeper is not None:
            await self._sweeper
        for process in self._living.values():
            process.line = None
            self._unwatch(process)
        self._living.clear()

    async def ended(self) -> None:
        """Wait for the end of all RETIRING rows. No row can be retired after this."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._lane.shutdown()

    # --- queries -----------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[EngineGroup]:
        """All groups that have an attached process."""
        return list(self._groups.values())

    def __iter__(self) -> Iterator[Process]:
        """All attached processes, detached ones included."""
        return iter([process for process in self._living.values() if process.state in KNOWN])

    @property
    def kv_bytes(self) -> int:
        """Bytes that the chunks in all engines' own caches would take in L1, as far as engines have reported them."""
        return sum(one.request.kv_bytes for one in self if one.request is not None)

    def get(self, session: bytes) -> Process | None:
        """The attached process of a session."""
        process = self._living.get(session)
        return process if process is not None and process.state in KNOWN else None

    def count(self, *states: RowState) -> int:
        """The number of rows in these states."""
        return sum(process.state in states for process in self._rows.values())

    def element_bytes_of(self, slice_digest: bytes) -> int:
        """Element size in bytes of this slice's payloads, for codecs; 2 if unknown. Any thread."""
        return self._element_bytes.get(slice_digest, 2)

    # --- attaching ---------------------------------------------------------------------------------------

    def claim(self, request: AttachRequest, pidfd: int, line: Line) -> Process:
        """Give the process at the other end of `line` the row of its session: a new row, or the one that it has.

        Takes ownership of `pidfd` if it returns; if it raises, the caller still owns it.  Raises a KvstrataError if
        the process may not have the row.  An earlier connection of the process is closed.
        """
        if self._readiness.stopping:
            raise Unavailable("this server is stopping; attach to its successor")
        tenants = self._tokens.allowed(request.token)
        self._check_room(request.session, line.credentials.pid, tenants)
        others = [one for one in self._living.values() if one.session != request.session]
        self._check_tenants(request, tenants, others)
        # Sessions with other tenants share no chunk with this one.
        check_company(request, (one.declared for one in others if one.tenants == tenants))
        process = self._living.get(request.session)
        if process is None or not process.is_at(line, pidfd):
            if process is not None:
                raise NotPermitted("session: it belongs to another living process", field="session")
            return self._claim_row(request, tenants, pidfd, line)
        if process.state not in KNOWN:
            assert process.line is not None
            process.line.let_go(ok=False)  # the process gave up its first attempt; its hang-up is unread
            return self._claim_row(request, tenants, pidfd, line)
        check_resumed(request, process.declared)
        # Its token may differ, or allow other tenants since the file was read again.
        process.tenants = tenants
        earlier, process.line = process.line, line
        if earlier is not None:
            earlier.let_go(ok=False)
        linux.close_all([pidfd])  # the process already has a pidfd here
        return process

    def locked(self, process: Process) -> None:
        """Announce a process that reports that it has locked its byte.

        Raises BadRequest if no process has locked the byte, NotPermitted if another process has.
        """
        assert process.line is not None, "a message came over a connection that was closed"
        locker, pid = linux.byte_locker(self._sessions_lock, process.row), process.line.credentials.pid
        if locker is None:
            raise BadRequest(
                f"locked: byte {process.row} of sessions.lock is not locked; take it with F_SETLK",
                field="row",
            )
        if locker != pid:
            raise NotPermitted(
                f"locked: byte {process.row} of sessions.lock is locked by process {locker}, not by {pid}",
                field="row",
            )
        process.resumed |= process.state in KNOWN
        self.announce(process)
        self._requests.on_attached(process)
        request = process.declared
        self._events.debug(
            "attached", session=shown_name(process.session), group=shown_name(request.group), role=request.role,
            pid=process.pid, row=process.row, model=request.layout.model, resumed=process.resumed,
        )  # fmt: skip

    def announce(self, process: Process) -> None:
        """Make a process with a checked declaration a member of its engine; its requests are accepted from now on."""
        request, before = process.declared, process.move(RowEvent.LOCKED)
        if before not in KNOWN:
            self._living[process.session] = process
            group = self._groups.get(request.group)
            if group is None:
                group = EngineGroup(request.group, request.layout, request.engine_slices)
                self._groups[request.group] = group
            process.group = group
            group.members[process.session] = process
            facts = request.facts or {}
            process.span = facts.get(SPAN_FACT, 0)
            process.chunk_record_bytes = declared_record_bytes(facts)
            if request.slice is not None:
                process.digest = request.slice.digest()
                self._note_element_bytes(process.digest, facts.get("element_bytes"))
        names = [process.pid or process.session, *([] if process.tenants is None else [process.tenants])]
        process.uses = tuple(self._uses.setdefault(name, Use()) for name in names)
        process.group.changed()

    def _check_room(self, session: bytes, pid: int, tenants: frozenset[str] | None) -> None:
        """Raises Refused if this session would exceed the maximum number of sessions of its process, or of its token.

        A session that is attached already is not checked. Sessions of processes in other PID namespaces (`pid` 0) are
        not counted, since these processes cannot be distinguished. `tenants` None: tokens are not used or counted.
        """
        attached = list(self)
        if any(one.session == session for one in attached):
            return
        of_process = sum(one.pid == pid for one in attached) if pid else 0
        if of_process >= SESSIONS_OF_PROCESS:
            raise Refused(
                f"session: process {pid} has {of_process} sessions attached, and one process may have "
                f"{SESSIONS_OF_PROCESS}; close some",
                field="session",
            )
        of_token = 0 if tenants is None else sum(one.tenants == tenants for one in attached)
        if of_token >= SESSIONS_OF_TOKEN:
            raise Refused(
                f"session: {of_token} sessions are attached with this token, and one token may have "
                f"{SESSIONS_OF_TOKEN}; end other engines of the tenant, or give some another token",
                field="session",
            )

    def _check_tenants(
        self, request: AttachRequest, tenants: frozenset[str] | None, others: Iterable[Process]
    ) -> None:
        """Raises NotPermitted unless the other processes of the group may use the same tenants, or could until the file
        of tokens was read again."""
        for other in others:
            same_group = other.declared.group == request.group
            if same_group and other.tenants != tenants and other.declared.token != request.token:
                raise NotPermitted(
                    "group: its processes may use other tenants; give all processes of an engine the same token",
                    field="group",
                )

    def _claim_row(
        self, request: AttachRequest, tenants: frozenset[str] | None, pidfd: int, line: Line
    ) -> Process:
        """Claim a row for a session without a living process: a new row, or the OLD row of the same process."""
        pid = line.credentials.pid
        known = next((row for row in self._pool.rows() if row["session"] == request.session), None)
        if known is not None:
            self._check_old_row(known, pid, request)
        try:
            number = self._pool.claim_row(request.session, request.group, pid, request.registers_memory)
        except PoolError as error:
            raise Refused(
                f"session: no row is left for it ({error}); end other engines", field="session"
            ) from error
        process = self._rows.get(number)
        if process is None or process.state is not RowState.OLD:
            # The pool may just have freed a row that is still RETIRING here.
            process = self._rows[number] = Process(number, request.session, request.group, pid)
        process.move(RowEvent.CLAIMED)
        process.pid, process.request, process.tenants = pid, request, tenants
        process.pidfd, process.line, process.resumed = pidfd, line, known is not None
        self._living[request.session] = process
        self._loop.add_reader(pidfd, self._died, process)
        return process

    def _check_old_row(self, known: PoolRow, pid: int, request: AttachRequest) -> None:
        """Raise Refused or NotPermitted unless the row is OLD and its own process asks for it."""
        process = self._rows.get(known["row"])
        state = process.state if process is not None else RowState.FREE
        if state is RowState.STRANDED:
            raise Refused("session: its earlier process has ended; choose another session", field="session")
        if state is RowState.RETIRING:
            raise Refused("session: its earlier process is being cleaned up; try again", field="session")
        locker = linux.byte_locker(self._sessions_lock, known["row"])
        if locker is None:
            raise Refused(
                "session: its earlier process has ended and is being cleaned up; try again", field="session"
            )
        if locker != pid or known["group"] != request.group:
            raise NotPermitted("session: it belongs to another living process", field="session")

    def _note_element_bytes(self, digest: bytes, element_bytes: object) -> None:
        self._element_bytes.pop(digest, None)
        if type(element_bytes) is int and 0 < element_bytes <= MAX_ELEMENT_BYTES:
            self._element_bytes[digest] = element_bytes
        if len(self._element_bytes) > MAX_SLICES:
            del self._element_bytes[next(iter(self._element_bytes))]

    # --- ending ------------------------------------------------------------------------------------------

    def lost(self, process: Process, line: Line) -> None:
        """Handle the end of connection `line`, unless another one replaced it: detach its process, or end its row."""
        if process.line is not line:
            return
        process.line = None
        if process.move(RowEvent.LOST) in (RowState.CLAIMED, RowState.RECLAIMED):
            self._let_row_go(process)  # at once, because the session has no grants yet
        else:
            self._events.debug("detached", session=shown_name(process.session), pid=process.pid)

    def bye(self, process: Process) -> None:
        """End the row of a process that said goodbye; once the row is free, its connection gets "ok" and is closed.

        Raises BadRequest while the row's byte is locked.
        """
        if linux.byte_locker(self._sessions_lock, process.row) is not None:
            raise BadRequest(
                f"bye: byte {process.row} of sessions.lock is still locked; unlock it first", field="row"
            )
        process.move(RowEvent.BYE)
        line, process.line = process.line, None
        self._retire(process, line)

    def _died(self, process: Process) -> None:
        """End the row of a process whose pidfd is readable."""
        line, process.line = process.line, None
        if line is not None:
            line.let_go(ok=False)
        process.move(RowEvent.DIED)
        if process.state is RowState.RETIRING:
            self._retire(process)
        else:
            self._let_row_go(process)

    def _let_row_go(self, process: Process) -> None:
        """Undo a claim that was not completed: an old row becomes OLD again and keeps its bytes, a new row is freed."""
        self.leave(process)
        if process.state is RowState.OLD:
            process.request, process.tenants = None, None  # its lock still shows whether its process is alive
        else:
            del self._rows[process.row]
            self._pool.row_gone(process.row)

    def leave(self, process: Process) -> None:
        """Remove a process that has ended, or has not completed its claim, from its engine, and stop watching it."""
        if process.pidfd >= 0:
            self._unwatch(process)
        self._living.pop(process.session, None)
        if process.group is NO_ENGINE:
            return
        process.group.members.pop(process.session, None)
        process.group.changed()
        if not process.group.members:
            self._groups.pop(process.group.name, None)
        process.identities.clear()

    def _unwatch(self, process: Process) -> None:
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        process.pidfd = -1

    def _retire(
        self, process: Process, line: Line | None = None, *, unseen: bool = False
    ) -> asyncio.Task[None]:
        """Begin to end a RETIRING row; when it has ended, `line` gets an "ok".

        `unseen`: the process ended while no server ran, which only its free byte shows.
        """
        self.leave(process)
        task = asyncio.create_task(self._end_row(process, line, unseen), name=f"attach-end-row-{process.row}")
        self._ending.add(task)
        task.add_done_callback(self._end_done)
        return task

    async def _end_row(self, process: Process, line: Line | None, unseen: bool) -> None:
        await self._requests.on_gone(process)
        self._events.debug("gone", session=shown_name(process.session), pid=process.pid, row=process.row)
        kept_bytes = 0
        if unseen and process.registers_memory:
            kept_bytes = await self._loop.run_in_executor(self._lane, self._pool.row_stranded, process.row)
        else:
            await self._loop.run_in_executor(self._lane, self._pool.row_gone, process.row)
        if kept_bytes:
            process.move(RowEvent.KEPT_BYTES)
            process.kept_bytes = kept_bytes
            _log.warning(
                "attach: process %d of session %s ended while no server watched, and its device may still write "
                "into %d bytes of L1; when you know that it does not, free them: kvstrata ctl stranded clear %s",
                process.pid,
                shown_name(process.session),
                kept_bytes,
                shown_name(process.session),
            )
        else:
            process.move(RowEvent.ENDED)
            if self._rows.get(process.row) is process:  # if not, it was claimed after the pool had freed it
                del self._rows[process.row]
        if line is not None:
            line.let_go(ok=True)

    def _end_done(self, task: asyncio.Task[None]) -> None:
        """Log why a row could not be ended; it stays occupied."""
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("attach: %s failed; the row stays occupied", task.get_name(), exc_info=error)

    # --- stranded rows, and rows from before a restart ---------------------------------------------------

    def stranded(self) -> list[Process]:
        """The owners of stranded rows; a device may still write into the extents that these quarantine."""
        return [process for process in self._rows.values() if process.state is RowState.STRANDED]

    async def clear_stranded(self, sessions: Sequence[bytes] | None = None) -> list[Process]:
        """Free the extents of stranded sessions (None: all), after an operator has confirmed that no device writes
        there.

        Returns the cleared ones. Raises KeyError, and clears none, if one of them is not stranded. If the call is
        cancelled, they are cleared nevertheless.
        """
        by_name = {process.session: process for process in self.stranded()}
        names = by_name if sessions is None else dict.fromkeys(sessions)
        cleared = [by_name[name] for name in names]
        for process in cleared:
            process.move(RowEvent.CLEARED)
        await asyncio.shield(asyncio.gather(*(self._retire(process) for process in cleared)))
        return cleared

    async def _sweep_old_rows(self) -> int:
        """End the OLD rows whose byte no process locks. Return how many OLD or RECLAIMED rows are left."""
        ending: list[asyncio.Task[None]] = []
        for process in list(self._rows.values()):
            is_old = process.state is RowState.OLD
            if is_old and linux.byte_locker(self._sessions_lock, process.row) is None:
                process.move(RowEvent.UNLOCKED)
                ending.append(self._retire(process, unseen=True))
        await asyncio.gather(*ending, return_exceptions=True)
        return self.count(RowState.OLD, RowState.RECLAIMED)

    async def _sweep(self) -> None:
        while await self._sweep_old_rows():
            try:
                await asyncio.wait_for(self._stopping.wait(), OLD_ROW_INTERVAL_S)
            except TimeoutError:
                continue  # the kernel reports no event when a record lock ends
            return

    # --- identities --------------------------------------------------------------------------------------

    def model_number(self, layout: LayoutIdentity) -> int:
        """The number under which the pool keeps the costs of a layout's chunks; 0 beyond MAX_MODELS layouts.

        It is derived from the layout, so a layout that is alone here keeps its number over restarts.
        """
        free = sorted(set(range(1, MAX_MODELS + 1)).difference(self._models.values()))
        if layout not in self._models and free:
            self._models[layout] = free[zlib.crc32(msgspec.msgpack.encode(layout)) % len(free)]
        return self._models.get(layout, 0)

    def identify(self, process: Process, request: RequestIdentity) -> DeclaredIdentity:
        """The identity of a request under the process's layout. Raises NotPermitted if it may not use the tenant."""
        for name in ("adapter", "tenant", "salt"):
            if len(getattr(request, name)) > MAX_NAME_CHARS:
                raise BadRequest(
                    f"request.{name}: longer than {MAX_NAME_CHARS} characters; send a digest",
                    field=f"request.{name}",
                )
        if process.tenants is not None and request.tenant not in process.tenants:
            raise NotPermitted(
                f"request.tenant: this process may not use tenant {request.tenant!r:.80}; attach with its token",
                field="request.tenant",
            )
        process.group.declares(request.adapter)
        root = identity_root(process.group.layout, request)
        identity = self._by_root.get(root)
        if identity is None:
            identity = DeclaredIdentity(
                self._next_number, process.group.layout, request, root, tenant_number(request.tenant)
            )
            self._next_number += 1
            self._by_root[root] = identity
            self._pool.set_model(root, self.model_number(process.group.layout))
        process.identities.pop(identity.number, None)
        process.identities[identity.number] = identity
        if len(process.identities) > MAX_IDENTITIES:
            del process.identities[next(iter(process.identities))]
        return identity

    def identity(self, process: Process, number: int) -> DeclaredIdentity:
        """The identity that this process declared under that number. Raises UnknownIdentity."""
        identity = process.identities.get(number)
        if identity is None:
            raise UnknownIdentity(
                f"identity_id: {number} was not declared by this session in this epoch; identify again",
                field="identity_id",
            )
        return identity
