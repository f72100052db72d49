"""The messages between a server and an adapter host, and their channel: one msgpack frame for each message of a
SOCK_SEQPACKET pair.

A call has a number, by which its answer and the reports of dropped holds name it.  It may be answered before all its
holds are dropped, or after.  Other messages have no answer.

Invariants
1. A frame has at most MAX_FRAME_BYTES and MAX_ITEMS items.
2. `read_answer` and `result_of` do not trust the host: they raise ChannelError for anything that is not exactly one
   valid message or result.  `read_request` runs in the host and trusts the server.
3. Nothing here is pickled or evaluated.
4. Sending never blocks, and every received frame is delivered.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.errors import ConfigError, KvstrataError
from kvstrata.tiers.base import (
    Capabilities,
    Counts,
    KeyPage,
    Outcome,
    Presence,
    Remarks,
    Usage,
)
from kvstrata.tiers.structs import Place
from kvstrata.types import KEY_BYTES

MAX_FRAME_BYTES = 64 << 10
MAX_ITEMS = 1_024
"""Maximum number of items of a frame, which has space for as many outcomes with the longest reasons."""
MAX_REASON_BYTES = 48
MAX_TEXT_CHARS = 4_000
MAX_FIELD_CHARS = 200
QUEUE_BYTES = 1 << 20
"""Number of unsent bytes above which `is_full` is true."""
FRAMES_AT_A_TIME = 16
"""Number of frames that are read in one turn of the loop."""
LAST_FRAMES = 10_000
"""Maximum number of frames that are read after the other side has ended; a socket buffers fewer."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_ITEMS)]
Indices = Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ITEMS)]], Meta(max_length=MAX_ITEMS)]
Word = Annotated[str, Meta(max_length=MAX_REASON_BYTES)]
Words = Annotated[list[Word], Meta(max_length=MAX_ITEMS)]
Operation = Literal["exists", "put", "load", "delete", "clear", "list_keys", "usage"]


class ChannelError(Exception):
    """The other side sent an invalid frame, or one that contradicts the calls; or a frame would be too long."""


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A frame, decoded."""


# --- messages of the server --------------------------------------------------------------------------------


class Configure(Message):
    """The first frame. Answered with Opened or Raised, after which the host ends."""

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


class Call(Message):
    """A call of the adapter. Answered with Answer or Raised."""

    number: int
    operation: Operation
    items: list[tuple[bytes, int, int, bool]] = []
    """For a put or load: (key, offset and length of its extent, `each` of its Ask)."""
    keys: bytes = b""
    each: bool = False
    owner: bytes = b""
    """`owner` of the Ask."""
    log_level: int = logging.NOTSET
    """The server's current log level, as a number of Python's logging."""
    cursor: int = 0
    most: int = 0


class Close(Message):
    """Ends the host, with exit status 0."""


# --- messages of the host ----------------------------------------------------------------------------------


class Opened(Message):
    capabilities: Capabilities
    advertisement: bytes = b""
    """The medium's advertisement for other instances."""


class Raised(Message):
    """The adapter raised in the call with this number; 0: when it was made or opened."""

    number: Number
    kind: str
    """Name of the exception's class."""
    message: str
    field: str = ""
    dropped: Indices = []
    """As in Answer."""


class Answer(Message):
    number: Number
    result: msgspec.Raw
    """See `result_of`."""
    dropped: Indices = []
    """Items whose holds are dropped and were not reported before."""


class Dropped(Message):
    """The adapter has finished with the bytes of these items of a put or load."""

    number: Number
    dropped: Indices


class Report(Message):
    """Other changes; a field that is None has not changed."""

    numbers: Counts | None = None
    """The adapter's counters; with them come its remarks."""
    remarks: Remarks = {}
    evicted: Keys = []
    """Keys that the adapter's own cap has dropped."""
    advertisement: bytes | None = None
    """The adapter's advertisement for other instances from now on."""


_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Configure | Call | Close)
_ANSWERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Opened | Raised | Answer | Dropped | Report)
_OUTCOMES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[bytes, Words])
_COUNT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Number)
_RESULTS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "exists": msgspec.msgpack.Decoder(tuple[bytes, Word]),
    "put": _OUTCOMES,
    "load": _OUTCOMES,
    "delete": _COUNT,
    "clear": _COUNT,
    "list_keys": msgspec.msgpack.Decoder(tuple[Keys, Annotated[int, Meta(ge=0)]] | None),
    "usage": msgspec.msgpack.Decoder(tuple[Number, Number, Number]),
}


def frame_of(message: Message) -> bytes:
    """The frame. Raises ChannelError if it is too long."""
    frame = _ENCODER.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise ChannelError(f"{len(frame)} bytes, but an adapter host accepts at most {MAX_FRAME_BYTES}")
    return frame


def read_request(frame: bytes) -> Any:
    """A frame of the server. Raises msgspec.MsgspecError for anything else."""
    return _REQUESTS.decode(frame)


def read_answer(frame: bytes) -> Any:
    """A frame of the host. Raises ChannelError for anything else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    answer = _decoded(_ANSWERS, frame)
    if isinstance(answer, Opened) and answer.capabilities.max_batch < 1:
        raise ChannelError("max_batch is less than 1")
    return answer


def _decoded(decoder: msgspec.msgpack.Decoder[Any], frame: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(frame)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ChannelError(f"{bytes(frame)[:48].hex()}: {error}") from None


def raised(number: int, error: BaseException) -> Raised:
    """The message for an exception of the adapter."""
    kind = "ConfigError" if isinstance(error, ConfigError) else type(error).__name__
    if isinstance(error, KvstrataError):
        return Raised(number, kind, error.message[:MAX_TEXT_CHARS], error.field[:MAX_FIELD_CHARS])
    return Raised(number, kind, f"{kind}: {error}"[:MAX_TEXT_CHARS].encode(errors="replace").decode())


def answer_of(number: int, result: object, dropped: list[int]) -> Answer:
    """The answer; for items their outcomes and, if any has one, their reasons."""
    if isinstance(result, list):
        reasons = [word_of(item.reason) for item in result] if any(item.reason for item in result) else []
        result = bytes([item.outcome for item in result]), reasons
    return Answer(number, msgspec.Raw(_ENCODER.encode(result)), dropped)


def result_of(operation: Operation, count: int, answer: Answer) -> Any:
    """The return value of the adapter's method for `count` keys; for items, their outcomes and reasons.

    Raises ChannelError.
    """
    result = _decoded(_RESULTS[operation], answer.result)
    if operation == "usage":
        return Usage(*result)
    if operation == "list_keys":
        return None if result is None else KeyPage(*result)
    if operation not in ("exists", "put", "load"):
        return result
    statuses, reasons = result
    if len(statuses) != count:
        raise ChannelError(f"{len(statuses)} outcomes for {count} items")
    if operation == "exists":
        if statuses.translate(None, bytes(Presence)):
            raise ChannelError(f"a presence in {statuses.hex():.40} is none")
        return result
    if reasons and len(reasons) != count:
        raise ChannelError(f"{len(reasons)} reasons for {count} items")
    try:
        return list(map(Outcome, statuses)), reasons or [""] * count
    except ValueError as error:
        raise ChannelError(f"{operation}: {error}") from None


def word_of(reason: str) -> str:
    """A reason as it is sent in a frame."""
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")


class Channel:
    """One end of the pair, which it owns. Belongs to the event loop."""

    def __init__(self, sock: socket.socket, take: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        """`take(frame)` gets each frame; `ended()` is called when no more frames can come. Either may close it."""
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = sock
        self._take = take
        self._ended = ended
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        sock.setblocking(False)
        self._loop.add_reader(sock, self.read)

    @property
    def is_full(self) -> bool:
        """Whether more than QUEUE_BYTES wait to be sent, because the other side does not read."""
        return self._queued_bytes > QUEUE_BYTES

    @property
    def is_idle(self) -> bool:
        """Whether all frames are sent."""
        return not self._queue

    def close(self) -> None:
        """Stop reading and sending. Idempotent."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None

    def send(self, frame: bytes) -> None:
        """Send a frame now, or once the socket has room; frames keep their order. `close` discards unsent frames."""
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if len(self._queue) == 1 and not self._write() and self._socket is not None:
            self._loop.add_writer(self._socket, self._write_rest)

    def flush(self) -> None:
        """Send all waiting frames, however long the other side takes to read them."""
        if self._socket is not None:
            self._socket.setblocking(True)
            self._write()

    def _write_rest(self) -> None:
        if self._write() and self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _write(self) -> bool:
        """Send frames; returns whether all are sent."""
        try:
            while self._queue and self._socket is not None:
                self._socket.send(self._queue[0])
                self._queued_bytes -= len(self._queue.popleft())
        except BlockingIOError:
            return False
        except OSError:  # the other side has gone, as reading will show after its last frames
            self._queue.clear()
        return True

    def read(self, most: int = FRAMES_AT_A_TIME) -> None:
        """Read some frames; the loop calls again while more are left."""
        for _ in range(most):
            if self._socket is None:
                return
            try:
                frame = self._socket.recv(MAX_FRAME_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Raised once if the other side ended without reading all frames; those that it sent can still be read.
                continue
            except OSError:
                frame = b""
            if not frame:
                self._ended()
                return
            self._take(frame)
