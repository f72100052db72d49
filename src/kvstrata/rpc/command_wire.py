"""Arguments of a controller's commands: the maps in `Command.argument` as structs, one for each kind.

Only `argument_of` checks arguments. It ignores unknown fields of an argument, so a newer controller may send them; it
refuses unknown fields of an `owner`.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.errors import BadRequest
from kvstrata.rpc.cluster_wire import MAX_PEER_KEYS, Command, CommandKind, Owner
from kvstrata.rpc.wire import MAX_SLICES
from kvstrata.types import KEY_BYTES

MAX_FREEZE_MS = 5_000
MAX_PIN_MS = 86_400_000


def _keys(most: int) -> Meta:
    must = f"1 to {most} keys of {KEY_BYTES} bytes"
    return Meta(min_length=KEY_BYTES, max_length=most * KEY_BYTES, extra={"must": must})


def _number(least: int, most: int) -> Meta:
    return Meta(ge=least, le=most, extra={"must": f"a number from {least} to {most}"})


Keys = Annotated[bytes, _keys(MAX_PEER_KEYS)]
"""Storage keys, concatenated."""
Root = Annotated[
    bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES, extra={"must": f"{KEY_BYTES} bytes"})
]
"""The root of an identity."""
Name = Annotated[str, Meta(min_length=1, max_length=200, extra={"must": "a string of 1 to 200 characters"})]


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of the arguments of all kinds."""


class ResyncArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.RESYNC."""

    freeze_ms: Annotated[int, _number(0, MAX_FREEZE_MS)] = 0


class ClearScope(enum.StrEnum):
    """The layers that a clear empties."""

    L1 = "l1"
    """Shared memory."""
    L2 = "l2"
    """All adapters."""
    ALL = "all"
    """Both."""


class ClearArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.CLEAR."""

    tier: Annotated[ClearScope, Meta(extra={"must": "l1, l2 or all"})]
    tenant: Annotated[str | None, Meta(extra={"must": "a string, or null for all tenants"})] = None


class EvictArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.EVICT."""

    keys: Keys


class PinArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.PIN."""

    claim: Name
    keys: Keys
    ttl_ms: Annotated[int, _number(0, MAX_PIN_MS)] = 0


class UnpinArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.UNPIN."""

    claim: Name


class NamedOwner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An Owner whose fields have names, as PULL's `owner` carries it. Unknown fields are refused."""

    instance: str
    incarnation: int
    peer_endpoint: str
    n_keys: int
    confirmed: bool
    peer_key: str

    def owner(self) -> Owner:
        """Return the Owner in the form that WhereReply carries."""
        return Owner(
            self.instance, self.incarnation, self.peer_endpoint, self.n_keys, self.confirmed, self.peer_key
        )


class PullArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.PULL."""

    keys: Keys
    identity: Root
    n_slices: Annotated[int, _number(1, MAX_SLICES)] = 1
    tenant: str = ""
    owner: Annotated[NamedOwner | None, Meta(extra={"must": "an Owner"})] = None
    spans: Annotated[
        list[Annotated[int, _number(0, 2**32 - 1)]],
        Meta(max_length=MAX_SLICES, extra={"must": "a number for each slice, or empty"}),
    ] = []


class DrainArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.DRAIN."""

    on: Annotated[bool, Meta(extra={"must": "true or false"})] = True


class RuntimeArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.RUNTIME."""


class StatusArgument(Argument, frozen=True, kw_only=True):
    """See CommandKind.STATUS."""


_KINDS: dict[CommandKind, type[Argument]] = {
    CommandKind.RESYNC: ResyncArgument,
    CommandKind.CLEAR: ClearArgument,
    CommandKind.EVICT: EvictArgument,
    CommandKind.PIN: PinArgument,
    CommandKind.UNPIN: UnpinArgument,
    CommandKind.PULL: PullArgument,
    CommandKind.DRAIN: DrainArgument,
    CommandKind.RUNTIME: RuntimeArgument,
    CommandKind.STATUS: StatusArgument,
}


def argument_of(command: Command) -> Argument:
    """Return the checked argument of a command.

    Raises BadRequest, which names the wrong field, says what it must be, and shows what it is.
    """
    told = command.argument
    kind = _KINDS[command.kind]
    try:
        argument = msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        raise _bad(kind, told, str(error)) from None
    keys = getattr(argument, "keys", b"")
    if len(keys) % KEY_BYTES:
        raise _refused("keys", _must(kind, "keys"), keys)
    if isinstance(argument, PullArgument) and len(keys) % (argument.n_slices * KEY_BYTES):
        raise BadRequest(
            f"keys: their number must be a multiple of n_slices ({argument.n_slices}), "
            f"found {len(keys) // KEY_BYTES}",
            field="keys",
        )
    return argument


def _bad(kind: type[Argument], told: dict[str, Any], text: str) -> BadRequest:
    """Return the error for msgspec's `text`. It ends with `$.FIELD` for a wrong field, and quotes a missing field."""
    what, _, where = text.partition(" - at `$.")
    if not where:  # Object missing required field `FIELD`
        where = text.partition("`")[2]
    field = where.partition("`")[0].partition(".")[0]
    must = _must(kind, field)
    return _refused(field, must, told.get(field)) if must else BadRequest(f"{field}: {what}", field=field)


def _refused(field: str, must: str, found: object) -> BadRequest:
    return BadRequest(f"{field}: must be {must}, found {found!r:.80}", field=field)


def _must(kind: type[Argument], field: str) -> str:
    """Return the words for what a field must be; empty for a field without such words."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for known in info.fields:
        if known.name == field and isinstance(known.type, msgspec.inspect.Metadata):
            return str((known.type.extra or {}).get("must", ""))
    return ""
