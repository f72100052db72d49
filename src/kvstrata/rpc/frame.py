"""Frames of requests, before they are decoded: `[proof] message`.

    frame of a session       C4 20 <32 bytes: the session's secret> <message>
    frame without a session  <message>

The secret comes with the reply to an attach (`attach_wire`).  A server compares it before it does or remembers anything
in the session's name, because others may know the names of sessions.

A frame is scanned before anything else is done with it (`native/message.pyi`).  A message that exceeds the limits of
`SCAN` is never decoded, so that even the longest invalid frame costs the server only some microseconds.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import NamedTuple

from kvstrata.errors import BadRequest
from kvstrata.native.message import Scan
from kvstrata.rpc.wire import MAX_CHUNKS, MAX_LIVE, MAX_MISSES, SECRET_BYTES
from kvstrata.types import KEY_BYTES

PROOF_PREFIX = bytes((0xC4, SECRET_BYTES))
"""The start of a msgpack byte string of 32 bytes; no message begins with it, because every message is an array."""
PROOF_BYTES = len(PROOF_PREFIX) + SECRET_BYTES
MAX_UNPROVEN_BYTES = 64 << 10
"""Longest frame that does not come from an attached session."""
MAX_DEPTH = 8
MAX_VALUES = MAX_LIVE + 8 * MAX_MISSES + 256
"""The longest ping has the most values."""
MAX_TEXT_BYTES = 16 << 10
MAX_BINARY_BYTES = MAX_CHUNKS * KEY_BYTES
SCAN = Scan(depth=MAX_DEPTH, elements=MAX_VALUES, text_bytes=MAX_TEXT_BYTES, binary_bytes=MAX_BINARY_BYTES)
_LIMITS = {
    "too deep": f"nests values deeper than {MAX_DEPTH}",
    "too many values": f"has more than {MAX_VALUES} values",
    "too long a text": f"has a text of more than {MAX_TEXT_BYTES} bytes",
    "too long a byte string": f"has a byte string of more than {MAX_BINARY_BYTES} bytes",
}
"""Faults of a scan that get an error of their own; a broken message fails when it is decoded."""


class Head(NamedTuple):
    """The beginning of a frame, as `SCAN` gives it. A part that cannot be read is empty or 0."""

    proof: bytes
    """The secret that the frame carries."""
    op: bytes
    session: bytes
    seq: int
    fault: str
    """Empty for a whole message within the limits."""

    @property
    def start(self) -> int:
        """Where the message begins."""
        return PROOF_BYTES if self.proof else 0


def prove(secret: bytes, message: bytes) -> bytes:
    """The frame of a session's message."""
    return PROOF_PREFIX + secret + message


def read_head(frame: bytes | memoryview) -> Head:
    """The beginning of a frame. Never fails, and takes some microseconds however long the frame is."""
    return Head(*SCAN(frame))


def proves(proof: bytes, secret: bytes) -> bool:
    """Whether a frame's proof is this secret. The time that the comparison takes reveals nothing about the secret."""
    return bool(proof) and compare_digest(proof, secret)


def check_limits(head: Head) -> None:
    """Raises BadRequest for a message that must not be decoded."""
    if (what := _LIMITS.get(head.fault)) is not None:
        raise BadRequest(f"message: {what}; no request needs that, so send a smaller one", field="message")
