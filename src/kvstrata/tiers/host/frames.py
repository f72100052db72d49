"""The messages between a server and an adapter host: one msgpack frame for each message of a SOCK_SEQPACKET pair.

A request has a number, by which its answer and the reports of dropped holds name it.  It may be answered before all its
holds are dropped, or after.  Messages without a number have no answer.

Invariants
1. A frame has at most MAX_FRAME_BYTES and MAX_ITEMS items.
2. `read_answer` does not trust the host: it raises ChannelError for anything that is not exactly one valid message.
   `read_request` runs in the host and trusts the server.
3. Nothing here is pickled or evaluated, and nothing does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstrata.errors import ConfigError, KvstrataError, StorageError
from kvstrata.tiers.base import Capabilities, Counts, Remarks
from kvstrata.tiers.structs import Place
from kvstrata.types import KEY_BYTES

MAX_FRAME_BYTES = 64 << 10
MAX_ITEMS = 1_024
"""Maximum number of items of a frame. As many outcomes with the longest reasons fit into it."""
MAX_REASON_BYTES = 48
MAX_TEXT_CHARS = 4_000
MAX_FIELD_CHARS = 200

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_ITEMS)]
Indices = Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ITEMS)]], Meta(max_length=MAX_ITEMS)]
Words = Annotated[list[Annotated[str, Meta(max_length=MAX_REASON_BYTES)]], Meta(max_length=MAX_ITEMS)]


class ChannelError(Exception):
    """The other side sent an invalid frame, or one that contradicts the requests; or a frame would be too long."""


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A frame, decoded."""


# --- what the server sends --------------------------------------------------------------------------------


class Configure(Message):
    """The first frame. Answered with Opened or Refused, after which the host ends."""

    medium: str
    """MODULE:ATTRIBUTE of the medium's type."""
    config: bytes
    """JSON of the type's struct."""
    place: Place
    name: str
    instance_id: str
    region_bytes: int
    import_paths: list[str]
    """The server's sys.path."""
    log_level: int


class Exists(Message):
    number: int
    keys: bytes
    each: bool
    owner: bytes
    """`each` and `owner` of the Ask."""


class Delete(Message):
    number: int
    keys: bytes


class Put(Message):
    number: int
    items: list[tuple[bytes, int, int]]
    """Keys, with offsets and lengths of their extents."""


class Load(Message):
    number: int
    items: list[tuple[bytes, int, int]]
    each: bool = False
    owner: bytes = b""


class ListKeys(Message):
    number: int
    cursor: int
    most: int


class Clear(Message):
    number: int


class GetUsage(Message):
    number: int


class Level(Message):
    """The level of the log, as Python's logging numbers it."""

    level: int


class Close(Message):
    """The host ends, with exit status 0."""


# --- what the host sends ----------------------------------------------------------------------------------


class Opened(Message):
    capabilities: Capabilities
    advertisement: bytes = b""
    """The medium's advertisement for other instances."""


class Refused(Message):
    """`kind` is the name of the exception's class."""

    kind: str
    message: str
    field: str = ""


class Found(Message):
    """Answers Exists: a Presence for each key, and why some are unknown."""

    number: Number
    presences: bytes
    reason: Annotated[str, Meta(max_length=MAX_REASON_BYTES)] = ""


class Ended(Message):
    """Answers Put and Load: a status for each item; reasons only if there are any."""

    number: Number
    statuses: bytes
    dropped: Indices
    """Items whose holds are dropped and were not reported before."""
    reasons: Words = []


class Counted(Message):
    """Answers Delete and Clear."""

    number: Number
    count: Number


class Listed(Message):
    """Answers ListKeys."""

    number: Number
    can_list: bool
    keys: Keys
    cursor: Annotated[int, Meta(ge=0)]


class Used(Message):
    """Answers GetUsage."""

    number: Number
    used_bytes: Number
    capacity_bytes: Number
    records: Number


class Raised(Message):
    """Answers any request."""

    number: Number
    kind: str
    message: str
    field: str = ""


class Dropped(Message):
    """The adapter has finished with the bytes of these items of a Put or Load."""

    number: Number
    indices: Indices


class Evicted(Message):
    """The adapter's own cap has dropped these keys."""

    keys: Keys


class Told(Message):
    """The adapter's counters and remarks."""

    numbers: Counts = {}
    remarks: Remarks = {}


class Advertised(Message):
    """The adapter's advertisement for other instances from now on."""

    advertisement: bytes


Request = Configure | Exists | Delete | Put | Load | ListKeys | Clear | GetUsage | Level | Close
Answer = (
    Opened
    | Refused
    | Found
    | Ended
    | Counted
    | Listed
    | Used
    | Raised
    | Dropped
    | Evicted
    | Told
    | Advertised
)
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


def frame_of(message: Message) -> bytes:
    """The frame. Raises ChannelError if it is too long."""
    frame = _ENCODER.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise ChannelError(f"{len(frame)} bytes, but an adapter host accepts at most {MAX_FRAME_BYTES}")
    return frame


def read_request(frame: bytes) -> Request:
    """A frame of the server. Raises msgspec.MsgspecError for anything else."""
    request: Request = _REQUESTS.decode(frame)
    return request


def read_answer(frame: bytes) -> Answer:
    """A frame of the host. Raises ChannelError for anything else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        answer: Answer = _ANSWERS.decode(frame)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ChannelError(f"{frame[:48].hex()}: {error}") from None
    if isinstance(answer, Opened) and answer.capabilities.max_batch < 1:
        raise ChannelError("max_batch is less than 1")
    return answer


def refused(error: BaseException) -> Refused:
    """The message for an exception of the adapter's `open`."""
    return Refused(*_described(error))


def raised(number: int, error: BaseException) -> Raised:
    """The message for an exception of another call of the adapter."""
    return Raised(number, *_described(error))


def _described(error: BaseException) -> tuple[str, str, str]:
    name = "ConfigError" if isinstance(error, ConfigError) else type(error).__name__
    if isinstance(error, KvstrataError):
        return name, error.message[:MAX_TEXT_CHARS], error.field[:MAX_FIELD_CHARS]
    return name, f"{name}: {error}"[:MAX_TEXT_CHARS].encode(errors="replace").decode(), ""


def advertised_frame(advertisement: bytes) -> bytes:
    """The frame of an Advertised. Raises StorageError if the advertisement is too long for it."""
    try:
        return frame_of(Advertised(advertisement))
    except ChannelError:
        raise StorageError(
            f"the advertisement for other instances has {len(advertisement)} bytes, but an adapter host can pass on "
            f"only about {MAX_FRAME_BYTES}; make the adapter use fewer network devices",
            field="advertisement",
        ) from None


def words_of(reasons: Sequence[str]) -> list[str]:
    """Reasons as a frame has them."""
    return [word_of(reason) for reason in reasons] if any(reasons) else []


def word_of(reason: str) -> str:
    """A reason as a frame has it."""
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")


def parts_of(sequence: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """Slices of at most MAX_ITEMS."""
    return (sequence[at : at + MAX_ITEMS] for at in range(0, len(sequence), MAX_ITEMS))


def key_parts_of(keys: bytes) -> Iterable[bytes]:
    """Concatenated keys, at most MAX_ITEMS at a time."""
    step = MAX_ITEMS * KEY_BYTES
    return (keys[at : at + step] for at in range(0, len(keys), step))
