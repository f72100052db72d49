"""Attached processes, their engine groups, identities and tenants, and what they have running and were granted.

A *group* is one engine: a scheduler and its workers, or one process that is both.  Each worker declares the
slice of every chunk's KV that it has.  A group is *complete* when as many distinct slices are known as the
engine has; only then can a chunk count as a hit, since all its slices must be present.

Invariants:

1. All members of a group declared the same LayoutIdentity and the same number of slices; the attach handshake
   refuses others (server/attach_checks.py).
2. In one epoch an identity id names one (layout, request) and no other; ids of dropped identities are not reused.

The records of leases and reservations are here; requests/grants.py makes and ends them.  This module does not know
sockets or the pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from kvstrata.errors import BadRequest, NotPermitted, Refused, UnknownIdentity
from kvstrata.observability.explain import EngineUse
from kvstrata.server.payload_kinds import declared_record_bytes
from kvstrata.server.rows import SessionRow
from kvstrata.types import SPAN_FACT, LayoutIdentity, RequestIdentity, Role, Slice, identity_root

if TYPE_CHECKING:
    from kvstrata.server.listener import Line

MAX_IDENTITIES = 4096
"""Maximum number of identities of one session; the one that was declared or used longest ago is dropped."""
MAX_NAME_CHARS = 4096
"""Longest adapter, tenant or salt."""
ADAPTERS_REMEMBERED = 64
"""Of each engine: those that were declared last."""


def tenant_number(tenant: str) -> int:
    """The 32-bit number by which the pool counts a tenant's bytes; 0 for the unnamed tenant."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4], "little") or 1


class DeclaredIdentity(NamedTuple):
    """An identity that a session has declared by `identify`."""

    number: int
    layout: LayoutIdentity
    request: RequestIdentity
    root: bytes
    tenant: int


class Use(msgspec.Struct, eq=False, weakref=True):
    """What all sessions of one process, or all with one token, have under way together."""

    n_tasks: int = 0
    """Requests that take time."""
    reserved_bytes: int = 0
    """Bytes of open reservations, and of reserves that are not answered yet."""


class EngineGroup(msgspec.Struct, eq=False):
    """One engine: its members and their slices."""

    name: bytes
    layout: LayoutIdentity
    engine_slices: int
    use: EngineUse = msgspec.field(default_factory=EngineUse)
    members: dict[bytes, AttachedProcess] = {}
    _order: tuple[list[bytes], bytes, list[int], tuple[int, ...]] | None = None
    _adapters: dict[str, None] = {}

    @property
    def adapters(self) -> list[str]:
        """`RequestIdentity.adapter` of the requests that its processes have, as last declared; the newest first."""
        return list(reversed(self._adapters))

    def declares(self, adapter: str) -> None:
        """A process has declared an identity with this `adapter`."""
        self._adapters.pop(adapter, None)
        self._adapters[adapter] = None
        if len(self._adapters) > ADAPTERS_REMEMBERED:
            del self._adapters[next(iter(self._adapters))]

    @property
    def slices(self) -> list[bytes]:
        """Digests of the slices of present members, sorted: the order of extents in a lookup's reply."""
        return self._ordered()[0]

    @property
    def packed_slices(self) -> bytes:
        """The digests of `slices`, concatenated."""
        return self._ordered()[1]

    @property
    def rows(self) -> list[int]:
        """Pool rows of all members; a lease is granted to each of them."""
        return self._ordered()[2]

    @property
    def spans(self) -> tuple[int, ...]:
        """For each of `slices` how many of a hit's last chunks are needed in it, 0: all; () if all are in each."""
        return self._ordered()[3]

    @property
    def record_limits(self) -> list[int]:
        """For each of `slices` the length of a chunk's longest record; 0: not known."""
        of = dict.fromkeys(self.slices, 0)
        for member in self.members.values():
            if member.digest:
                of[member.digest] = max(of[member.digest], member.chunk_record_bytes)
        return list(of.values())

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk's longest records in all slices; 0: not known."""
        limits = self.record_limits
        return sum(limits) if all(limits) else 0

    @property
    def load_rate(self) -> tuple[float, float] | None:
        """How fast the engine loads chunks of all slices: latency in seconds, and bytes a second; None: not known.

        Its processes load at the same time, and the engine waits for the slowest.
        """
        rates = {one.digest: one.load_rate for one in self.members.values() if one.load_rate is not None}
        if not rates or not self.complete or len(rates) < self.engine_slices:
            return None
        latencies_s, bytes_s = zip(*rates.values(), strict=True)
        return max(latencies_s), len(rates) * min(bytes_s)

    @property
    def complete(self) -> bool:
        """Whether every slice of the engine has a present member."""
        return len(self._ordered()[0]) == self.engine_slices

    def changed(self) -> None:
        """Note that members came or went."""
        self._order = None

    def _ordered(self) -> tuple[list[bytes], bytes, list[int], tuple[int, ...]]:
        if self._order is None:
            of = {member.digest: member.span for member in self.members.values() if member.digest}
            slices = sorted(of)
            rows = sorted(member.row for member in self.members.values())
            spans = tuple(of[digest] for digest in slices)
            self._order = slices, b"".join(slices), rows, spans if any(spans) else ()
        return self._order


class AttachedProcess(msgspec.Struct, eq=False):
    """One attached process."""

    session: bytes
    group: EngineGroup
    role: Role
    slice: Slice | None
    row: int
    pid: int
    digest: bytes = b""
    """Of its slice; empty for a scheduler."""
    span: int = 0
    """How many of a hit's last chunks are needed in its slice; 0: all."""
    tenants: frozenset[str] | None = None
    """The tenants that it may name; None: any."""
    engine_url: str = ""
    """Where its engine is reached over HTTP, as it tells; empty: it does not."""
    detached: bool = False
    """Its connection is closed."""
    pinged_s: float = 0.0
    """Time of its last ping by `time.monotonic`; 0: none since it attached."""
    identities: dict[int, DeclaredIdentity] = {}
    copies: dict[str, object] | None = None
    """How the process copies, as it last reported; None if its blocks are in host memory."""
    load_rate: tuple[float, float] | None = None
    """How fast it loads its slice of chunks, as it last reported: latency in seconds, and bytes a second."""
    chunk_record_bytes: int = 0
    """Length of a chunk's longest record, as it declared or reserved it; 0: not known."""
    uses: tuple[Use, ...] = ()
    """What it has under way together with the other sessions of its process, and of its token if there are any."""
    last_seq: int = -1
    """Number of its last request."""
    running: dict[int, Running] = {}
    """Its requests that take time, by number."""
    grants: dict[int, Lease | Reservation] = {}
    """The leases of its lookups whose share it has not released, and its reservations, by number (grants.py)."""

    def has_records_of(self, record_bytes: int) -> None:
        """Note the length of a chunk's record that the process declared, or for which it reserves extents."""
        self.chunk_record_bytes = max(self.chunk_record_bytes, record_bytes)


LeaseId = tuple[bytes, int]
"""(session that looked up, its lookup's seq)"""


class Lease(msgspec.Struct, eq=False):
    """One pool ticket granted to an engine."""

    owner: AttachedProcess
    """The process that looked up, which may be gone."""
    name: LeaseId
    ticket: int
    rows: set[int]
    """The rows that hold a share."""
    sender: Line
    """The connection over which the lookup came."""


class Reservation(msgspec.Struct, eq=False):
    """Chunks of one reserve, counted for their process and token from the beginning of the reserve to their end."""

    uses: tuple[Use, ...]
    bytes_each: int
    keys: bytes
    """Storage keys of all chunks of the reserve."""
    tail: bool
    """Whether the key is that of a tail."""
    replaces: bytes
    """Storage keys of the tails that leave L1 with the first commit."""
    begun_s: float
    ticket: int = 0
    open: set[int] = set()
    """Numbers of the chunks that are neither committed nor given back."""
    n_counted: int = 0

    def count(self, n_chunks: int) -> None:
        """Count the bytes of so many chunks from now on."""
        change = (n_chunks - self.n_counted) * self.bytes_each
        self.n_counted = n_chunks
        for use in self.uses:
            use.reserved_bytes += change


class Running(msgspec.Struct, eq=False):
    """One request that takes time, until it is answered and its task has ended."""

    sender: Line
    process: AttachedProcess
    seq: int
    op: str
    started_s: float
    """When it arrived, by `time.perf_counter`."""
    uses: tuple[Use, ...]
    """Where it is counted; the process may attach again with another token meanwhile."""
    stopped: bool = False
    """It has been answered early; what it is still granted ends with its task."""
    task: asyncio.Task[None] | None = None


class TenantTokens:
    """The tenants that each token allows. If no tokens are configured, every local process may use every tenant."""

    def __init__(self, tokens: Mapping[str, frozenset[str]] | None = None) -> None:
        self._tokens = dict(tokens or {})

    def replace(self, other: TenantTokens) -> bool:
        """Allow what `other` allows, from the next attach on; returns whether that differs. Both must have tokens."""
        assert self._tokens and other._tokens
        before, self._tokens = self._tokens, other._tokens
        return self._tokens != before

    @property
    def without(self) -> frozenset[str] | None:
        """The tenants that a process without a token may use (None: any)."""
        return frozenset({""}) if self._tokens else None

    @property
    def sets(self) -> list[frozenset[str]]:
        """For each token the tenants that it opens."""
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


class SessionLimits(NamedTuple):
    """Maximum number of sessions of one process, and of all processes that may name the same tenants."""

    per_process: int = 64
    per_token: int = 512


LIMITS = SessionLimits()


class ProcessTable:
    """All groups, members and identities of one instance. Single-threaded."""

    def __init__(self, epoch: int) -> None:
        self._groups: dict[bytes, EngineGroup] = {}
        self._processes: dict[bytes, AttachedProcess] = {}
        self._by_root: dict[bytes, DeclaredIdentity] = {}
        self._users: dict[bytes, int] = {}
        self._uses: WeakValueDictionary[Hashable, Use] = WeakValueDictionary()
        """By pid, or session where no pid can be seen; and by token."""
        self._next_number = ((epoch & 0xFFFFFF) << 32) | 1

    @property
    def groups(self) -> list[EngineGroup]:
        """All groups with a process."""
        return list(self._groups.values())

    def __iter__(self) -> Iterator[AttachedProcess]:
        """All attached processes, detached ones included."""
        return iter(list(self._processes.values()))

    def __len__(self) -> int:
        return len(self._processes)

    def get(self, session: bytes) -> AttachedProcess | None:
        """The attached process of a session."""
        return self._processes.get(session)

    def check_room(
        self,
        session: bytes,
        pid: int,
        tenants: frozenset[str] | None,
        limits: SessionLimits = LIMITS,
    ) -> None:
        """Raises Refused if a process, or a token, has as many sessions as it may have, and so no room for this one.

        A session that is attached already needs no room. Sessions of processes in other PID namespaces (`pid` 0) are
        not counted, since these processes look alike. `tenants` None: there are no tokens, so none is counted.
        """
        if session in self._processes:
            return
        of_process = sum(one.pid == pid for one in self._processes.values()) if pid else 0
        if of_process >= limits.per_process:
            raise Refused(
                f"session: process {pid} has {of_process} sessions attached, and one process may have "
                f"{limits.per_process}; close some",
                field="session",
            )
        of_token = 0 if tenants is None else sum(one.tenants == tenants for one in self._processes.values())
        if of_token >= limits.per_token:
            raise Refused(
                f"session: {of_token} sessions are attached with this token, and one token may have "
                f"{limits.per_token}; end other engines of the tenant, or give some another token",
                field="session",
            )

    def attach(self, seen: SessionRow) -> AttachedProcess:
        """Add a process whose declaration was checked; for a session that is known, return its process."""
        request = seen.request
        assert request is not None, "a process attaches by a request"
        process = self._processes.get(seen.session)
        if process is None:
            group = self._groups.get(seen.group)
            if group is None:
                group = self._groups[seen.group] = EngineGroup(
                    seen.group, request.layout, request.engine_slices
                )
            process = AttachedProcess(seen.session, group, request.role, request.slice, seen.row, seen.pid)
            if request.slice is not None:
                process.digest = request.slice.digest()
            process.span = (request.facts or {}).get(SPAN_FACT, 0)
            process.has_records_of(declared_record_bytes(request.facts))
            self._processes[seen.session] = group.members[seen.session] = process
        process.detached, process.row, process.engine_url = False, seen.row, request.engine_url
        process.tenants = seen.tenants  # by which its token is known; None: there are no tokens
        names = [process.pid or process.session, *([] if seen.tenants is None else [seen.tenants])]
        process.uses = tuple(self._uses.setdefault(name, Use()) for name in names)
        process.group.changed()
        return process

    def detached(self, session: bytes) -> None:
        """The process has closed its socket but lives: it stays in its group."""
        process = self._processes.get(session)
        if process is not None:
            process.detached = True

    def gone(self, session: bytes) -> AttachedProcess | None:
        """The process is dead: remove it from its group, and return it."""
        process = self._processes.pop(session, None)
        if process is not None:
            self._leave(process)
            self._drop_identities(process)
        return process

    def identify(self, process: AttachedProcess, request: RequestIdentity) -> DeclaredIdentity:
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
        if process.identities.pop(identity.number, None) is None:
            self._users[root] = self._users.get(root, 0) + 1
        process.identities[identity.number] = identity
        if len(process.identities) > MAX_IDENTITIES:
            self._drop(process.identities.pop(next(iter(process.identities))))
        return identity

    def identity(self, process: AttachedProcess, number: int) -> DeclaredIdentity:
        """The identity that this process declared under that number. Raises UnknownIdentity."""
        identity = process.identities.get(number)
        if identity is None:
            raise UnknownIdentity(
                f"identity_id: {number} was not declared by this session in this epoch; identify again",
                field="identity_id",
            )
        return identity

    def record_limit_of(self, root: bytes) -> int:
        """The length of the longest record of a chunk, over all slices of an identity's engines; 0: not known."""
        identity = self._by_root.get(root)
        if identity is None:
            return 0
        limits = [
            limit
            for group in self._groups.values()
            if group.layout == identity.layout
            for limit in group.record_limits
        ]
        return max(limits, default=0) if all(limits) else 0

    def _leave(self, process: AttachedProcess) -> None:
        process.group.members.pop(process.session, None)
        process.group.changed()
        if not process.group.members:
            self._groups.pop(process.group.name, None)

    def _drop_identities(self, process: AttachedProcess) -> None:
        for identity in process.identities.values():
            self._drop(identity)
        process.identities = {}

    def _drop(self, identity: DeclaredIdentity) -> None:
        users = self._users[identity.root] - 1
        if users:
            self._users[identity.root] = users
        else:
            del self._users[identity.root]
            del self._by_root[identity.root]


class Readiness:
    """Whether the instance is ready: first `starting`, then ready, then `stopping`."""

    def __init__(self) -> None:
        self._why_not = "starting"

    def set(self, why_not: str = "") -> None:
        """Set the reason why the instance is not ready; empty: it is."""
        self._why_not = why_not

    def __call__(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""
        return not self._why_not, self._why_not

    @property
    def ready(self) -> bool:
        return not self._why_not

    @property
    def stopping(self) -> bool:
        """Whether the instance is about to end: it takes no new processes."""
        return self._why_not == "stopping"
