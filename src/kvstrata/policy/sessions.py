"""Who belongs together: attached processes, their engine groups, identities and tenants.

A *group* is one engine: a scheduler and its workers, or one process that is both.  Each worker declares the
slice of every chunk's KV that it holds; a group is *complete* when as many distinct slices are known as the
engine has, and only then can a chunk count as a hit (all of its slices must be there).

Invariants:

1. All members of a group declared the same LayoutIdentity and the same number of slices.
2. Processes that declare the same layout identity and the same part of the model (layers, heads, group)
   declare the same layout facts, in whatever group they are: otherwise the later one is refused.
3. An identity id is given once per epoch and names one (layout, request) for ever; ids that are dropped are
   not given again.

It does not know outcomes (rpc/session.py), sockets or the pool.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from kvstrata.errors import (
    BadRequest,
    LayoutRefused,
    NotPermitted,
    UnknownIdentity,
    WrongVersion,
)
from kvstrata.types import (
    FORMAT_VERSION,
    LayoutIdentity,
    RequestIdentity,
    Role,
    Slice,
    facts_digest,
    identity_root,
)

MAX_IDENTITIES = 4096
"""Identities one session may have declared; the one declared or used longest ago is dropped."""
MAX_NAME_CHARS = 4096
"""Longest adapter, tenant or salt."""


def tenant_number(tenant: str) -> int:
    """The 32-bit number by which the pool counts a tenant's bytes; 0 for the unnamed tenant."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4], "little") or 1


class Declaration(Protocol):
    """What a process says of itself when it attaches (`rpc.wire.AttachRequest` has these fields)."""

    @property
    def session(self) -> bytes: ...
    @property
    def group(self) -> bytes: ...
    @property
    def role(self) -> Role: ...
    @property
    def layout(self) -> LayoutIdentity: ...
    @property
    def engine_slices(self) -> int: ...
    @property
    def slice(self) -> Slice | None: ...
    @property
    def facts(self) -> dict[str, Any] | None: ...
    @property
    def token(self) -> str: ...


class Identity(NamedTuple):
    """What `identify` declared."""

    number: int
    layout: LayoutIdentity
    request: RequestIdentity
    root: bytes
    tenant: int


class Group:
    """One engine: its members and the slices they hold."""

    __slots__ = ("_order", "engine_slices", "layout", "members", "name")

    def __init__(self, name: bytes, layout: LayoutIdentity, engine_slices: int) -> None:
        self.name = name
        self.layout = layout
        self.engine_slices = engine_slices
        self.members: dict[bytes, Member] = {}
        self._order: tuple[list[bytes], bytes, list[int]] | None = None

    @property
    def slices(self) -> list[bytes]:
        """Digests of the slices of present members, sorted: the order of extents in a lookup's reply."""
        return self._ordered()[0]

    @property
    def packed_slices(self) -> bytes:
        """The same, concatenated."""
        return self._ordered()[1]

    @property
    def rows(self) -> list[int]:
        """Pool rows of all members; a lease is granted to each of them."""
        return self._ordered()[2]

    @property
    def complete(self) -> bool:
        """Whether every slice of the engine has a present member."""
        return len(self._ordered()[0]) == self.engine_slices

    def changed(self) -> None:
        """Members came or went."""
        self._order = None

    def _ordered(self) -> tuple[list[bytes], bytes, list[int]]:
        if self._order is None:
            slices = sorted({member.digest for member in self.members.values() if member.digest})
            rows = sorted(member.row for member in self.members.values())
            self._order = slices, b"".join(slices), rows
        return self._order


class Member:
    """One attached process. `digest` is empty for a scheduler; `detached` while its socket is closed."""

    __slots__ = (
        "detached",
        "digest",
        "facts",
        "group",
        "identities",
        "pid",
        "role",
        "row",
        "session",
        "slice",
        "tenants",
    )

    def __init__(self, declared: Declaration, group: Group, row: int, pid: int) -> None:
        self.session = declared.session
        self.group = group
        self.role = declared.role
        self.row = row
        self.pid = pid
        self.slice = declared.slice
        self.digest = declared.slice.digest() if declared.slice is not None else b""
        self.facts = declared.facts
        self.tenants: frozenset[str] | None = None
        """Tenants that it may name; None: any."""
        self.detached = False
        self.identities: dict[int, Identity] = {}


class TenantTokens:
    """Which tenants a token opens. Without any token on file, every local peer may use every tenant."""

    def __init__(self, tokens: Mapping[str, frozenset[str]] | None = None) -> None:
        self._tokens = dict(tokens or {})

    def allowed(self, token: str) -> frozenset[str] | None:
        """Tenants for a peer with this token (None: any). Raises NotPermitted for an unknown token."""
        if not self._tokens:
            return None
        if not token:
            return frozenset({""})
        for known, tenants in self._tokens.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                return tenants
        raise NotPermitted(
            "token: opens no tenant of this server; check it against its tenants file", field="token"
        )


class Registry:
    """All groups, members and identities of one instance. Single-threaded."""

    def __init__(self, epoch: int, tokens: TenantTokens | None = None) -> None:
        self._tokens = tokens or TenantTokens()
        self._groups: dict[bytes, Group] = {}
        self._members: dict[bytes, Member] = {}
        self._by_root: dict[bytes, Identity] = {}
        self._users: dict[bytes, int] = {}
        self._next_number = ((epoch & 0xFFFFFF) << 32) | 1

    @property
    def groups(self) -> list[Group]:
        """All groups with a member."""
        return list(self._groups.values())

    @property
    def members(self) -> list[Member]:
        """All attached processes, detached ones included."""
        return list(self._members.values())

    def member(self, session: bytes) -> Member | None:
        """The attached process of a session."""
        return self._members.get(session)

    def check(self, request: Declaration) -> None:
        """Whether the process may attach. Changes nothing; raises what the peer is to be told."""
        if request.layout.format_version != FORMAT_VERSION:
            raise WrongVersion(
                f"layout.format_version: peer uses {request.layout.format_version}, "
                f"this server {FORMAT_VERSION}; upgrade the older side",
                field="layout.format_version",
            )
        if request.layout.chunk_tokens < 1:
            raise BadRequest(
                f"layout.chunk_tokens: must be at least 1, found {request.layout.chunk_tokens}",
                field="layout.chunk_tokens",
            )
        self._tokens.allowed(request.token)
        if request.role is Role.SCHEDULER:
            if request.slice is not None:
                raise BadRequest("slice: a scheduler holds none; leave it out", field="slice")
        else:
            self._check_slice(request)
        group = self._groups.get(request.group)
        if group is not None and any(other != request.session for other in group.members):
            self._check_group(group, request)
        member = self._members.get(request.session)
        if member is not None and member.group.name != request.group:
            raise BadRequest(
                "group: this session is attached in another group; use a new session", field="group"
            )

    def attach(self, request: Declaration, row: int, pid: int) -> Member:
        """The process is attached (checked before). The same session again replaces its earlier self."""
        identities: dict[int, Identity] = {}
        old = self._members.get(request.session)
        if old is not None:
            if old.group.layout == request.layout:
                identities = old.identities
            else:
                self._drop_identities(old)
            self._leave(old)
        group = self._groups.get(request.group)
        if group is None:
            group = self._groups[request.group] = Group(request.group, request.layout, request.engine_slices)
        member = Member(request, group, row, pid)
        member.tenants = self._tokens.allowed(request.token)
        member.identities = identities
        self._members[request.session] = member
        group.members[request.session] = member
        group.changed()
        return member

    def detached(self, session: bytes) -> None:
        """Its socket is closed, the process lives: it stays a member."""
        member = self._members.get(session)
        if member is not None:
            member.detached = True

    def gone(self, session: bytes) -> Member | None:
        """The process is dead: it leaves its group."""
        member = self._members.pop(session, None)
        if member is not None:
            self._leave(member)
            self._drop_identities(member)
        return member

    def identify(self, member: Member, request: RequestIdentity) -> Identity:
        """The identity of a request under the member's layout. Raises NotPermitted for a foreign tenant."""
        for name in ("adapter", "tenant", "salt"):
            if len(getattr(request, name)) > MAX_NAME_CHARS:
                raise BadRequest(
                    f"request.{name}: longer than {MAX_NAME_CHARS} characters; send a digest",
                    field=f"request.{name}",
                )
        if member.tenants is not None and request.tenant not in member.tenants:
            raise NotPermitted(
                f"request.tenant: this process may not use tenant {request.tenant!r}; attach with its token",
                field="request.tenant",
            )
        root = identity_root(member.group.layout, request)
        identity = self._by_root.get(root)
        if identity is None:
            identity = Identity(
                self._next_number, member.group.layout, request, root, tenant_number(request.tenant)
            )
            self._next_number += 1
            self._by_root[root] = identity
        if member.identities.pop(identity.number, None) is None:
            self._users[root] = self._users.get(root, 0) + 1
        member.identities[identity.number] = identity
        if len(member.identities) > MAX_IDENTITIES:
            self._drop(member.identities.pop(next(iter(member.identities))))
        return identity

    def identity(self, member: Member, number: int) -> Identity:
        """The identity that this member declared under that number. Raises UnknownIdentity."""
        identity = member.identities.get(number)
        if identity is None:
            raise UnknownIdentity(
                f"identity_id: {number} was not declared by this session in this epoch; identify again",
                field="identity_id",
            )
        return identity

    def by_root(self, root: bytes) -> Identity | None:
        """A declared identity by its root."""
        return self._by_root.get(root)

    def _check_slice(self, request: Declaration) -> None:
        part = request.slice
        if part is None:
            raise BadRequest(f"slice: a {request.role} must declare the slice it holds", field="slice")
        for name in ("layers", "kv_heads"):
            first, end = getattr(part, name)
            if not 0 <= first < end:
                raise BadRequest(
                    f"slice.{name}: [{first}, {end}) is no range; give first and end, half-open",
                    field=f"slice.{name}",
                )
        if request.facts is not None and facts_digest(request.facts) != part.layout:
            raise BadRequest("slice.layout: is not the digest of the facts sent along", field="slice.layout")
        for member in self._members.values():
            if member.session != request.session and member.group.layout == request.layout:
                _check_same_facts(member, part, request.facts)

    def _check_group(self, group: Group, request: Declaration) -> None:
        if group.engine_slices != request.engine_slices:
            raise LayoutRefused(
                f"engine_slices: this engine's other processes declared {group.engine_slices}, "
                f"found {request.engine_slices}; give all of them the same",
                field="engine_slices",
            )
        field = first_difference(group.layout, request.layout)
        if field:
            raise LayoutRefused(
                f"layout.{field}: this engine's other processes declared {getattr(group.layout, field)!r}, "
                f"found {getattr(request.layout, field)!r}; give all of them the same",
                field=f"layout.{field}",
            )

    def _leave(self, member: Member) -> None:
        member.group.members.pop(member.session, None)
        member.group.changed()
        if not member.group.members:
            self._groups.pop(member.group.name, None)

    def _drop_identities(self, member: Member) -> None:
        for identity in member.identities.values():
            self._drop(identity)
        member.identities = {}

    def _drop(self, identity: Identity) -> None:
        users = self._users[identity.root] - 1
        if users:
            self._users[identity.root] = users
        else:
            del self._users[identity.root]
            del self._by_root[identity.root]


def _check_same_facts(member: Member, part: Slice, facts: dict[str, Any] | None) -> None:
    known = member.slice
    if known is None or known.layout == part.layout:
        return
    if (known.layers, known.kv_heads, known.group) != (part.layers, part.kv_heads, part.group):
        return
    field = "slice.layout"
    before: Any = known.layout
    now: Any = part.layout
    if member.facts is not None and facts is not None:
        name = first_fact_difference(member.facts, facts)
        field, before, now = f"facts.{name}", member.facts.get(name), facts.get(name)
    raise LayoutRefused(
        f"{field}: an attached process with the same identity declared {before!r:.100}, found {now!r:.100}; "
        "run both with the same settings, or give them different identities (layout.weights, .revision)",
        field=field,
    )


def first_difference(known: msgspec.Struct, found: msgspec.Struct) -> str:
    """Name of the first field in which two identities differ, empty if none."""
    for name in known.__struct_fields__:
        if getattr(known, name) != getattr(found, name):
            return name
    return ""


def first_fact_difference(known: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Name of the first layout fact, in sorted order, that differs or is missing on one side."""
    for name in sorted({*known, *found}):
        if known.get(name) != found.get(name):
            return name
    return ""
