"""Frames between gateways: one msgpack array each, over CURVE (sockets.py).

A frame names the life of the gateway that sent it and has events in their order.  Prompts are named by the keys of
their pieces (prefixes.py), which say nothing to somebody without the gateways' secret; no text, token, tenant or client
is in it.

    Sent ─▶ First ─▶ Ended        Ended may come first
    UnderWay                      every request of a range of numbers: what was lost before is mended by it
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.gateway.prefixes import KEY_BYTES, MAX_PIECES

PROTOCOL = 3
MAX_FRAME_BYTES = 1 << 20
MAX_EVENTS = 8_192
MAX_STATED = 1_024
"""Requests in one UnderWay."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]
Engine = Annotated[str, Meta(min_length=1, max_length=1_024)]
Keys = Annotated[bytes, Meta(max_length=MAX_PIECES * KEY_BYTES)]


class Event(msgspec.Struct, array_like=True, frozen=True):
    """Base of all events."""


class Sent(Event, frozen=True, tag="sent"):
    """A request is sent to an engine."""

    number: Number
    """Of the request, among those of its gateway."""
    engine: Engine
    uncached: Tokens
    """To be computed, as its gateway expects."""
    tokens: Tokens
    keys: Keys
    """Of its pieces, one after the other."""
    ready_in_s: Annotated[float, Meta(ge=0, le=1e6)]
    """Expected time to its first token."""
    streams: bool
    """Whether its answer does not come whole."""
    loads: bool
    """Whether a part of its prompt is loaded, so that its time tells nothing of how fast the engine computes."""


class First(Event, frozen=True, tag="first"):
    """Its first token has come."""

    number: Number


class Ended(Event, frozen=True, tag="ended"):
    """It has ended at this engine; `answered`: after its first token."""

    number: Number
    answered: bool


class Flight(msgspec.Struct, array_like=True, frozen=True):
    """A request under way."""

    number: Number
    engine: Engine
    uncached: Tokens
    tokens: Tokens
    running: bool
    """Whether its first token has come."""
    streams: bool
    """See Sent."""


class UnderWay(Event, frozen=True, tag="under_way"):
    """All requests of this gateway that are under way, of the numbers from `first` to below `end`."""

    first: Number
    end: Number
    flights: Annotated[list[Flight], Meta(max_length=MAX_STATED)]


AnyEvent = Sent | First | Ended | UnderWay


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """See the module."""

    protocol: int
    gateway: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
    """A random name of one life of a gateway's process."""
    events: Annotated[list[AnyEvent], Meta(max_length=MAX_EVENTS)]


FRAMES = msgspec.msgpack.Decoder(Frame)
encode = msgspec.msgpack.Encoder().encode


def split(keys: bytes) -> list[bytes]:
    """The keys one by one. Raises ValueError unless they are whole."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys: {len(keys)} bytes; they must be a multiple of {KEY_BYTES}")
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
