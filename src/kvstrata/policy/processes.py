"""Who belongs together: attached processes, their engine groups, identities and tenants.

A *group* is one engine: a scheduler and its workers, or one process that is both.  Each worker declares the
slice of every chunk's KV that it holds; a group is *complete* when as many distinct slices are known as the
engine has, and only then can a chunk count as a hit (all of its slices must be there).

Invariants:

1. All members of a group declared the same LayoutIdentity and the same number of slices (the attach handshake
   refuses others, memory/attach/checks.py).
2. An identity id is given once per epoch and names one (layout, request) for ever; ids that are dropped are
   not given again.

It does not know outcomes (rpc/session.py), sockets or the pool.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import NamedTuple

from kvstrata.errors import BadRequest, NotPermitted, UnknownIdentity
from kvstrata.types import LayoutIdentity, RequestIdentity, Role, Slice, identity_root

MAX_IDENTITIES = 4096
"""Identities one session may have declared; the one declared or used longest ago is dropped."""
MAX_NAME_CHARS = 4096
"""Longest adapter, tenant or salt."""


def tenant_number(tenant: str) -> int:
    """The 32-bit number by which the pool counts a tenant's bytes; 0 for the unnamed tenant."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4], "little") or 1


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
        "copies",
        "detached",
        "digest",
        "group",
        "identities",
        "pid",
        "role",
        "row",
        "session",
        "slice",
        "tenants",
    )

    def __init__(
        self, session: bytes, group: Group, role: Role, part: Slice | None, row: int, pid: int
    ) -> None:
        self.session = session
        self.group = group
        self.role = role
        self.row = row
        self.pid = pid
        self.slice = part
        self.digest = part.digest() if part is not None else b""
        self.tenants: frozenset[str] | None = None
        """Tenants that it may name; None: any."""
        self.detached = False
        self.identities: dict[int, Identity] = {}
        self.copies: dict[str, object] | None = None
        """How it copies, as it said last; None where its blocks are in host memory."""


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

    def __init__(self, epoch: int) -> None:
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

    def attach(
        self,
        session: bytes,
        *,
        group: bytes,
        role: Role,
        layout: LayoutIdentity,
        engine_slices: int,
        part: Slice | None,
        tenants: frozenset[str] | None,
        row: int,
        pid: int,
    ) -> Member:
        """The process is attached, its declaration was checked. The same session again: the same member.

        `part`: the slice it holds, None for a scheduler. `tenants`: those it may name, None for any.
        """
        member = self._members.get(session)
        if member is not None:
            member.detached = False
            member.tenants = tenants
            member.row = row
            member.group.changed()
            return member
        engine = self._groups.get(group)
        if engine is None:
            engine = self._groups[group] = Group(group, layout, engine_slices)
        member = Member(session, engine, role, part, row, pid)
        member.tenants = tenants
        self._members[session] = member
        engine.members[session] = member
        engine.changed()
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
