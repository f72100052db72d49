"""The messages between a server and an adapter host: one frame per message of a SOCK_SEQPACKET pair.

    frame = kind (u8) ‖ 0 (u8) ‖ count (u16) ‖ 0 (u32) ‖ request (u64) ‖ body          little endian, no padding

    server → host    body                              answered with
    CONFIGURE        JSON                              OPENED or REFUSED
    EXISTS, DELETE   count × key                       FOUND; COUNTED
    PUT, LOAD        count × (key, u64 offset, u32 length)   PUT_ENDED; LOAD_ENDED
    KINDS            count × (identity root, slice digest, u16 element bytes, 6 × u32 fp8)   no answer; request is 0
    PREFER           count × key, source               no answer; request is 0
    SCATTER          count × key                       no answer; request is 0
    LIST             u64 cursor, u32 most              LISTED
    CLEAR, USAGE     nothing                           COUNTED; USED
    LEVEL            u8 number of the log level        no answer; request is 0
    CLOSE            nothing                           the host ends, with exit status 0

    host → server    body
    OPENED           JSON: the adapter's capabilities, and its advertisement for other instances
    REFUSED          JSON: kind, message, field; the host ends after it
    FOUND            count × (u8 presence, u32 record bytes, reason)
    PUT_ENDED, LOAD_ENDED   count × (u8 status | 128 where the hold is dropped, reason)
    COUNTED          u64
    LISTED           u8 (0: cannot list now), u64 cursor of the next page, count × key
    USED             u64 used bytes, u64 capacity bytes, u64 records
    RAISED           JSON: kind, message, field; may answer any request
    DROPPED          count × u16: items of a PUT or LOAD whose bytes the adapter has finished with
    EVICTED          count × key: dropped by the adapter's own cap; request is 0
    COUNTS           JSON: the counters of the codecs and of the adapter, by name, and remarks; request is 0
    ADVERTISED       the adapter's advertisement for other instances from now on; request is 0

KINDS describes the payloads of an identity and a slice (PayloadKind; element bytes 0: not known any more, fp8 all 0:
not accepted).  The server sends it before the first PUT of such a record, and again after a change.
A reason is u8 length ‖ UTF-8.  A request may be answered before all its holds are dropped, or after.

Invariants
1. A frame has at most MAX_FRAME_BYTES and MAX_ITEMS items.
2. `read_answer` does not trust the host: it raises ChannelError for anything that is not exactly one valid frame.
   `read_request` runs in the host and trusts the server.
3. Nothing here is pickled or evaluated, and nothing does I/O.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata.errors import ConfigError, KvstrataError, StorageError
from kvstrata.native.batches import pack_found, pack_keys, read_found, split_keys
from kvstrata.storage.base import (
    Capabilities,
    Counts,
    Found,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    PayloadKind,
    PutItem,
    PutOutcome,
    PutStatus,
    Remarks,
    Usage,
    found_of,
)
from kvstrata.storage.host.config import HostConfig
from kvstrata.types import KEY_BYTES

MAX_FRAME_BYTES = 64 << 10
MAX_ITEMS = 1_200
"""Most items of one frame. This many outcomes with the longest reasons fit into it, as do a lookup's 1,024 keys."""
MAX_KINDS = 500
"""Most items of one frame of KINDS."""
MAX_REASON_BYTES = 48
MAX_TEXT_CHARS = 4_000
MAX_FIELD_CHARS = 200

_HEAD = struct.Struct("<BBHIQ")
_ITEM = struct.Struct(f"<{KEY_BYTES}sQI")
_KIND = struct.Struct("<64sH6I")
_OUTCOME = struct.Struct("<BB")
_COUNT = struct.Struct("<Q")
_USAGE = struct.Struct("<QQQ")
_LIST = struct.Struct("<QI")
_LISTED = struct.Struct("<BQ")
_DROPPED = 128


class Kind(enum.IntEnum):
    """The message that a frame carries; see the module."""

    CONFIGURE = 1
    EXISTS = 2
    PUT = 3
    LOAD = 4
    DELETE = 5
    CLEAR = 6
    USAGE = 7
    CLOSE = 8
    KINDS = 9
    PREFER = 10
    LIST = 11
    LEVEL = 12
    SCATTER = 13

    OPENED = 65
    REFUSED = 66
    FOUND = 67
    PUT_ENDED = 68
    LOAD_ENDED = 69
    COUNTED = 70
    USED = 71
    RAISED = 72
    DROPPED = 73
    EVICTED = 74
    COUNTS = 75
    LISTED = 76
    ADVERTISED = 77


class ChannelError(Exception):
    """The other side sent an invalid frame, or one that contradicts the requests; or a frame would be too long."""


class Problem(msgspec.Struct, frozen=True):
    """Body of REFUSED and RAISED. `kind` is the name of the exception's class."""

    kind: str
    message: str
    field: str = ""


class Counted(msgspec.Struct, frozen=True):
    """Body of COUNTS."""

    codec: Counts = {}
    numbers: Counts = {}
    remarks: Remarks = {}


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Body of OPENED."""

    capabilities: Capabilities
    advertisement: bytes = b""


class Item(NamedTuple):
    """One item of a PUT or LOAD."""

    key: bytes
    offset: int
    length: int


class Request(NamedTuple):
    """A frame of the server; only the fields of its kind are set."""

    kind: Kind
    number: int
    keys: list[bytes]
    items: list[Item]
    config: HostConfig | None
    kinds: list[tuple[bytes, PayloadKind | None]]
    """Pairs of identity root ‖ slice digest and the payloads' kind."""
    source: bytes = b""
    cursor: int = 0
    most: int = 0
    level: int = 0
    """As Python's logging numbers it."""


class Answer(msgspec.Struct, frozen=True):
    """A frame of the host; only the fields of its kind are set."""

    kind: Kind
    number: int
    """The request that the frame answers, or whose drops it reports."""
    outcomes: list[Any] = []
    """Each a Found, PutOutcome or LoadOutcome, as the kind says."""
    dropped: list[int] = []
    """Indices of items whose holds are dropped; ascending in PUT_ENDED and LOAD_ENDED."""
    keys: list[bytes] = []
    count: int = 0
    usage: Usage | None = None
    page: KeyPage | None = None
    problem: Problem | None = None
    capabilities: Capabilities | None = None
    advertisement: bytes = b""
    counts: Counted | None = None


_JSON_OF_CONFIG = msgspec.json.Decoder(HostConfig)
_JSON_OF_PROBLEM = msgspec.json.Decoder(Problem)
_JSON_OF_OPENED = msgspec.json.Decoder(Opened)
_JSON_OF_COUNTS = msgspec.json.Decoder(Counted)


# --- what the server sends --------------------------------------------------------------------------------


def configure(config: HostConfig) -> bytes:
    """CONFIGURE. Raises ChannelError when it is too long for a frame."""
    frame = _head(Kind.CONFIGURE, 0, 0) + msgspec.json.encode(config)
    if len(frame) > MAX_FRAME_BYTES:
        raise ChannelError(
            f"its fields take {len(frame)} bytes, but an adapter host accepts at most {MAX_FRAME_BYTES}"
        )
    return frame


def keyed(kind: Kind, number: int, keys: bytes) -> bytes:
    """EXISTS or DELETE of packed keys (native.batches). REQUIRES at most MAX_ITEMS of them."""
    return _head(kind, len(keys) // KEY_BYTES, number) + keys


def moved(kind: Kind, number: int, items: Sequence[PutItem | LoadItem]) -> bytes:
    """PUT or LOAD. REQUIRES at most MAX_ITEMS items with keys of 32 bytes."""
    pack = _ITEM.pack
    return _head(kind, len(items), number) + b"".join(
        [pack(item.key, item.hold.offset, item.hold.length) for item in items]
    )


def kinds(known: Sequence[tuple[bytes, PayloadKind | None]]) -> bytes:
    """KINDS. REQUIRES at most MAX_KINDS, each by identity root ‖ slice digest."""
    rows = []
    for whose, kind in known:
        fp8 = (kind.fp8 if kind else None) or (0,) * 6
        rows.append(_KIND.pack(whose, kind.element_bytes if kind else 0, *fp8))
    return _head(Kind.KINDS, len(rows), 0) + b"".join(rows)


def prefer(keys: bytes, source: bytes) -> bytes:
    """PREFER of packed keys. REQUIRES at most MAX_ITEMS of them."""
    return _head(Kind.PREFER, len(keys) // KEY_BYTES, 0) + keys + source


def scatter(keys: bytes) -> bytes:
    """SCATTER of packed keys. REQUIRES at most MAX_ITEMS of them."""
    return _head(Kind.SCATTER, len(keys) // KEY_BYTES, 0) + keys


def list_keys(number: int, cursor: int, most: int) -> bytes:
    """LIST. REQUIRES `most` ≤ MAX_ITEMS."""
    return _head(Kind.LIST, 0, number) + _LIST.pack(cursor, most)


def level(number: int) -> bytes:
    """LEVEL, with the number that Python's logging gives it."""
    return _head(Kind.LEVEL, 0, 0) + bytes([number])


def bare(kind: Kind, number: int) -> bytes:
    """CLEAR, USAGE or CLOSE."""
    return _head(kind, 0, number)


def read_request(frame: bytes) -> Request:
    """Read a frame of the server. Raises ValueError, struct.error or msgspec.MsgspecError for anything else."""
    kind, _, count, _, number = _HEAD.unpack_from(frame)
    body = memoryview(frame)[_HEAD.size :]
    kind = Kind(kind)
    keys: list[bytes] = []
    items: list[Item] = []
    config = None
    kinds: list[tuple[bytes, PayloadKind | None]] = []
    source, cursor, most, level = b"", 0, 0, 0
    if kind in (Kind.EXISTS, Kind.DELETE, Kind.SCATTER):
        keys = split_keys(body)
    elif kind in (Kind.PUT, Kind.LOAD):
        items = [Item(*fields) for fields in _ITEM.iter_unpack(body)]
    elif kind is Kind.PREFER:
        keys, source = split_keys(body[: count * KEY_BYTES]), bytes(body[count * KEY_BYTES :])
    elif kind is Kind.LIST:
        cursor, most = _LIST.unpack(body)
    elif kind is Kind.LEVEL:
        [level] = body
    elif kind is Kind.CONFIGURE:
        config = _JSON_OF_CONFIG.decode(body)
    elif kind is Kind.KINDS:
        for whose, element_bytes, *fp8 in _KIND.iter_unpack(body):
            known = PayloadKind(element_bytes, tuple(fp8) if any(fp8) else None)
            kinds.append((whose, known if element_bytes else None))
    return Request(kind, number, keys, items, config, kinds, source, cursor, most, level)


# --- what the host sends ----------------------------------------------------------------------------------


def opened(capabilities: Capabilities, advertisement: bytes = b"") -> bytes:
    """OPENED. Raises StorageError if the advertisement is too long for a frame."""
    body = msgspec.json.encode(Opened(capabilities=capabilities, advertisement=advertisement))
    if _HEAD.size + len(body) > MAX_FRAME_BYTES:
        raise _too_long(advertisement)
    return _head(Kind.OPENED, 0, 0) + body


def advertised(advertisement: bytes) -> bytes:
    """ADVERTISED. Raises StorageError if the advertisement is too long for a frame."""
    if _HEAD.size + len(advertisement) > MAX_FRAME_BYTES:
        raise _too_long(advertisement)
    return _head(Kind.ADVERTISED, 0, 0) + advertisement


def _too_long(advertisement: bytes) -> StorageError:
    return StorageError(
        f"the advertisement for other instances has {len(advertisement)} bytes, but an adapter host can pass on only "
        f"about {MAX_FRAME_BYTES * 3 // 4}; make the adapter use fewer network devices",
        field="advertisement",
    )


def problem(kind: Kind, number: int, raised: BaseException) -> bytes:
    """REFUSED or RAISED."""
    name = "ConfigError" if isinstance(raised, ConfigError) else type(raised).__name__
    if isinstance(raised, KvstrataError):
        body = Problem(name, raised.message[:MAX_TEXT_CHARS], raised.field[:MAX_FIELD_CHARS])
    else:
        body = Problem(name, f"{name}: {raised}"[:MAX_TEXT_CHARS])
    return _head(kind, 0, number) + msgspec.json.encode(body)


def found(number: int, outcomes: Sequence[Found]) -> bytes:
    """FOUND."""
    return _head(Kind.FOUND, len(outcomes), number) + pack_found(outcomes, _word)


def ended(
    kind: Kind, number: int, outcomes: Sequence[PutOutcome | LoadOutcome], dropped: Sequence[bool]
) -> bytes:
    """PUT_ENDED or LOAD_ENDED; `dropped` says for each item whether this frame reports its hold as dropped."""
    head = _head(kind, len(outcomes), number)
    if outcomes and not outcomes[0].reason and all(dropped) and outcomes.count(outcomes[0]) == len(outcomes):
        return head + _OUTCOME.pack(outcomes[0].status | _DROPPED, 0) * len(outcomes)  # the usual case
    parts = [head]
    for (status, reason), is_dropped in zip(outcomes, dropped, strict=True):
        word = _word(reason)
        parts += (_OUTCOME.pack(status | (_DROPPED if is_dropped else 0), len(word)), word)
    return b"".join(parts)


def counted(number: int, count: int) -> bytes:
    """COUNTED."""
    return _head(Kind.COUNTED, 0, number) + _COUNT.pack(count)


def used(number: int, usage: Usage) -> bytes:
    """USED."""
    return _head(Kind.USED, 0, number) + _USAGE.pack(*usage)


def listed(number: int, page: KeyPage | None) -> bytes:
    """LISTED. REQUIRES at most MAX_ITEMS keys."""
    keys = page.keys if page is not None else ()
    body = _LISTED.pack(page is not None, page.cursor if page is not None else 0)
    return _head(Kind.LISTED, len(keys), number) + body + pack_keys(keys)


def dropped(number: int, indices: Sequence[int]) -> bytes:
    """DROPPED."""
    return _head(Kind.DROPPED, len(indices), number) + struct.pack(f"<{len(indices)}H", *indices)


def evicted(keys: Sequence[bytes]) -> bytes:
    """EVICTED. REQUIRES at most MAX_ITEMS keys."""
    return _head(Kind.EVICTED, len(keys), 0) + b"".join(keys)


def counts(counted: Counted) -> bytes:
    """COUNTS."""
    return _head(Kind.COUNTS, 0, 0) + msgspec.json.encode(counted)


def read_answer(frame: bytes) -> Answer:
    """Read a frame of the host. Raises ChannelError for anything else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        return _read_answer(frame)
    except (struct.error, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ChannelError(f"{frame[:48].hex()}: {error}") from None


def _read_answer(frame: bytes) -> Answer:
    number_of_kind, zero, count, zeros, number = _HEAD.unpack_from(frame)
    kind = Kind(number_of_kind)
    body = frame[_HEAD.size :]
    if zero or zeros or count > MAX_ITEMS:
        raise ValueError("its head is invalid")
    if kind is Kind.FOUND:
        return Answer(kind, number, outcomes=read_found(body, count, MAX_REASON_BYTES, found_of))
    if kind is Kind.PUT_ENDED or kind is Kind.LOAD_ENDED:
        outcomes, gone = _read_outcomes(kind, body, count)
        return Answer(kind, number, outcomes=outcomes, dropped=gone)
    if kind is Kind.DROPPED:
        return Answer(kind, number, dropped=list(struct.unpack(f"<{count}H", body)))
    if kind is Kind.EVICTED:
        if len(body) != count * KEY_BYTES:
            raise ValueError(f"{len(body)} bytes are not {count} keys")
        return Answer(kind, number, keys=split_keys(body))
    if kind is Kind.LISTED:
        there, cursor = _LISTED.unpack_from(body)
        if len(body) != _LISTED.size + count * KEY_BYTES:
            raise ValueError(f"{len(body) - _LISTED.size} bytes are not {count} keys")
        page = KeyPage(split_keys(body[_LISTED.size :]), cursor) if there else None
        return Answer(kind, number, page=page)
    if count:
        raise ValueError(f"{kind.name} has no items, but its head counts {count}")
    if kind is Kind.COUNTED:
        return Answer(kind, number, count=_COUNT.unpack(body)[0])
    if kind is Kind.USED:
        return Answer(kind, number, usage=Usage(*_USAGE.unpack(body)))
    if kind in (Kind.RAISED, Kind.REFUSED):
        return Answer(kind, number, problem=_JSON_OF_PROBLEM.decode(body))
    if kind is Kind.OPENED:
        opened = _JSON_OF_OPENED.decode(body)
        if opened.capabilities.max_batch < 1:
            raise ValueError("max_batch is less than 1")
        return Answer(kind, number, capabilities=opened.capabilities, advertisement=opened.advertisement)
    if kind is Kind.COUNTS:
        return Answer(kind, number, counts=_JSON_OF_COUNTS.decode(body))
    if kind is Kind.ADVERTISED:
        return Answer(kind, number, advertisement=body)
    raise ValueError(f"{kind.name} is not an answer")


def _read_outcomes(kind: Kind, body: bytes, count: int) -> tuple[list[Any], list[int]]:
    outcomes: list[Any] = []
    gone: list[int] = []
    row = body[: _OUTCOME.size]
    if (
        count > 1 and len(body) == count * _OUTCOME.size and body == row * count
    ):  # equal, as usual, and no reasons
        [outcome], dropped = _read_outcomes(kind, row, 1)
        return [outcome] * count, list(range(count)) if dropped else gone
    at = 0
    for i in range(count):
        status, length = _OUTCOME.unpack_from(body, at)
        at += _OUTCOME.size
        reason = _reason(body, at, length)
        at += length
        if status & _DROPPED:
            gone.append(i)
        if kind is Kind.PUT_ENDED:
            outcomes.append(PutOutcome(PutStatus(status & ~_DROPPED), reason))
        else:
            outcomes.append(LoadOutcome(LoadStatus(status & ~_DROPPED), reason))
    _at_end(body, at)
    return outcomes, gone


def _reason(body: bytes, at: int, length: int) -> str:
    if not length:
        return ""
    word = body[at : at + length]
    if length > MAX_REASON_BYTES or len(word) != length:
        raise ValueError("a reason is cut off or too long")
    return word.decode()


def _at_end(body: bytes, at: int) -> None:
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes too many")


def _word(reason: str) -> bytes:
    if not reason:
        return b""
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore").encode()


def _head(kind: Kind, count: int, number: int) -> bytes:
    return _HEAD.pack(kind, 0, count, 0, number)


def parts_of(sequence: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """Slices of at most MAX_ITEMS."""
    return (sequence[at : at + MAX_ITEMS] for at in range(0, len(sequence), MAX_ITEMS))
