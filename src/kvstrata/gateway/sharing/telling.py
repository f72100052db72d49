"""Encodes this gateway's events for the other gateways as they happen, and at intervals all its requests under way.

    Choosing ─▶ EventSender ─▶ frames ─▶ each other gateway ─▶ Others ─▶ the engines' queues, Prefixes

    sent ─▶ running ─▶ answered        or `failed`: it ended before its first token
    a range of numbers                 lists all requests of the range that are under way, to repair lost events

A frame is one msgpack array over CURVE (sockets.py); it names the run of the sending gateway and has the events of
requests in their order.  Prompts are identified by the keys of their pieces (prefixes.py), which reveal nothing without
the gateways' secret; a frame contains no text, token, tenant or client.

1. No request waits for messages.  A gateway that receives none works like a single gateway.
2. An event is only appended to a list of at most MAX_EVENTS; further events are dropped and counted, and a later range
   repairs the others' queues.
3. A frame has at most MAX_FRAME_BYTES: a new one begins before an event that would not fit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstrata.gateway.prefixes import KEY_BYTES, MAX_PIECES

PROTOCOL = 6
MAX_FRAME_BYTES = 1 << 20
MAX_EVENTS = 8_192
MAX_STATED = 1_024
"""Maximum number of requests in one range."""
EVENT_BYTES = 1_200
"""Upper bound of an encoded event's size without its keys."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]


class Sent(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The state of a request that was sent to an engine."""

    number: Number
    """Number of the request in its gateway."""
    engine: Annotated[str, Meta(min_length=1, max_length=1_024)]
    uncached: Tokens
    """Tokens to compute, as its gateway expects."""
    keys: Annotated[bytes, Meta(max_length=MAX_PIECES * KEY_BYTES)]
    """Concatenated keys of its prompt's pieces; empty if they were sent before."""
    ready_in_s: Annotated[float, Meta(ge=0, le=1e6)]
    """Expected time to its first token."""
    streams: bool
    """Whether its answer is streamed."""
    loads: bool
    """Whether a part of its prompt is loaded, so that its time is no sample of the prefill rate."""
    state: Literal["sent", "running", "answered", "failed"] = "sent"
    """`running`: its first token has come; it has ended after that (`answered`), or before (`failed`)."""


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """One frame to another gateway."""

    protocol: int
    gateway: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
    """Random name of a gateway's run."""
    events: Annotated[list[Sent], Meta(max_length=MAX_EVENTS)]
    first: Number = 0
    end: Number = 0
    """If `end` > 0: `events` has all requests under way with numbers in [`first`, `end`)."""


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a frame of any protocol."""

    protocol: int


_FRAMES, _HEADS = msgspec.msgpack.Decoder(Frame), msgspec.msgpack.Decoder(_Head)
encode = msgspec.msgpack.Encoder().encode


def frame_of(data: bytes) -> Frame:
    """Decode a frame. Raises MsgspecError, or ValueError if it has another protocol version."""
    if (found := _HEADS.decode(data).protocol) != PROTOCOL:
        older = "the other" if found < PROTOCOL else "this"
        raise ValueError(
            f"the other gateway speaks protocol {found}, this one {PROTOCOL}; upgrade {older} gateway"
        )
    return _FRAMES.decode(data)


class EventSender:
    """Collects events and makes frames. Belongs to the event loop."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called when an event is added to the empty list."""
        self.name = secrets.token_hex(8)
        """Name of this run of the gateway."""
        self._wake = wake
        self._flights: dict[int, Sent] = {}
        """Requests under way, by number, without keys."""
        self._events: list[Sent] = []
        self.dropped = 0

    def sent(self, event: Sent) -> None:
        """Add a request that is sent to an engine."""
        self._flights[event.number] = msgspec.structs.replace(event, keys=b"", ready_in_s=0.0)
        self._tell(event)

    def first(self, number: int) -> None:
        """Add the first token of a request."""
        flight = self._flights.get(number)
        if flight is not None and flight.state == "sent":
            self._flights[number] = flight = msgspec.structs.replace(flight, state="running")
            self._tell(flight)

    def ended(self, number: int, *, answered: bool) -> None:
        """Add the end of a request at its engine."""
        if (flight := self._flights.pop(number, None)) is not None:
            self._tell(msgspec.structs.replace(flight, state="answered" if answered else "failed"))

    def take(self) -> Iterator[bytes]:
        """Encode all new events into frames, and clear the list."""
        events, self._events = self._events, []
        part: list[Sent] = []
        size = 0
        for event in events:
            more = EVENT_BYTES + len(event.keys)
            if part and size + more > MAX_FRAME_BYTES:
                yield self._frame(part)
                part, size = [], 0
            part.append(event)
            size += more
        if part:
            yield self._frame(part)

    def under_way(self) -> Iterator[bytes]:
        """Encode all requests under way into at least one frame. The frames of `take` must be sent before these."""
        numbers, first = sorted(self._flights), 0
        for at in range(0, max(1, len(numbers)), MAX_STATED):
            end = numbers[at + MAX_STATED] if at + MAX_STATED < len(numbers) else (1 << 63) - 1
            flights = [self._flights[number] for number in numbers[at : at + MAX_STATED]]
            yield self._frame(flights, first, end)
            first = end

    def _tell(self, event: Sent) -> None:
        if len(self._events) >= MAX_EVENTS:
            self.dropped += 1
            return
        self._events.append(event)
        if len(self._events) == 1:
            self._wake()

    def _frame(self, events: list[Sent], first: int = 0, end: int = 0) -> bytes:
        return encode(Frame(PROTOCOL, self.name, events, first, end))
