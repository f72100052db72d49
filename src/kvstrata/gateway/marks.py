"""Parses Envoy's report of a request: a line of its access log with the watcher's marks (times, tokens, reason).

The line's format is configuration.LINE; watch.c and watch.lua write the marks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

CANCELLED, BROKE_OFF, OK, CLIENT_ERROR = "cancelled", "broke_off", "ok", "client_error"
END = "DownstreamEnd"
ELSEWHERE = frozenset((429, 502, 503, 504))
"""Statuses of an engine that has not begun the request, so that another may serve it."""
NO_FLAGS: frozenset[str] = frozenset()
_UNREACHED = frozenset(("UF", "URX", "UH", "NC"))


class Marks(NamedTuple):
    """The state of a request, under way or at its end. Times are wall-clock seconds; 0: not yet."""

    number: int
    """The request's number in the picker; -1: the picker has not chosen an engine."""
    stream: str
    """Envoy's id of the request (configuration.STREAM_ID); empty: not reported."""
    is_end: bool
    status: int = 0
    """HTTP status; 0: the client left before the response's head."""
    served: str = ""
    """`ip:port` of the engine that has answered, or was tried last; empty: no engine was tried."""
    flags: frozenset[str] = frozenset()
    """Envoy's response flags."""
    attempts: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    """Times of the first and the last content."""
    events: int = 0
    """Number of a stream's events with content."""
    whole: bool = False
    """Whether the answer's last byte has arrived."""
    failed: bool = False
    """Whether the answer is an error inside a 200."""
    tokens: Mapping[str, int] = {}
    """Token counts in the answer's `usage`, by kind: `prompt`, `cached`, `completion`."""
    reason: str = ""
    """The API's finish reason of the answer (`tool_calls`, `end_turn` …)."""
    response: str = ""
    """The id of the stored response that the answer names; empty: none."""

    @property
    def outcome(self) -> str:
        """The request's outcome, as in metrics."""
        status, flags = self.status, self.flags
        if "DC" in flags or not status:
            return CANCELLED
        if status < 400:
            return OK if self.whole else BROKE_OFF
        if flags:
            return "connect" if flags & _UNREACHED else "no_answer"
        if status in ELSEWHERE:
            return "engine_busy"
        return CLIENT_ERROR if status < 500 else "engine_error"


def marks_of(line: bytes) -> Marks | None:
    """Parse a line of the access log; None if it has another format."""
    words = line.decode("latin-1").split()
    if len(words) != 8:
        return None
    number, kind, status, served, flags, attempts, told, stream = words
    if not (_is_count(status) and (_is_count(number) or number == "-")):
        return None
    known = frozenset(flags.split(",")) if flags != "-" else NO_FLAGS
    tried = int(attempts) if _is_count(attempts) else 0
    return marks(
        number, stream, kind == END, int(status), served if served != "-" else "", known, tried, told
    )


def marks(
    number: str,
    stream: str,
    is_end: bool,
    status: int,
    served: str,
    flags: frozenset[str],
    attempts: int,
    told: str,
) -> Marks:
    """The marks of a request; `told`: the watcher's part, which is ignored if it has another format."""
    at, parts = int(number) if _is_count(number) else -1, told.split(",")
    if len(parts) == 12:
        with contextlib.suppress(ValueError):
            first_s, last_s = float(parts[0]), float(parts[1])
            events, whole, failed, *counts = map(int, parts[2:10])
            return Marks(
                at, stream, is_end, status, served, flags, attempts, first_s, last_s, events, bool(whole), bool(failed),
                _tokens(*counts), parts[10], parts[11],
            )  # fmt: skip
    return Marks(at, stream, is_end, status, served, flags, attempts)


def _tokens(prompt: int, cached: int, completion: int, read: int, created: int) -> dict[str, int]:
    """Tokens by kind. In `/v1/messages` the prompt's count excludes tokens read from or written to the cache."""
    found = {"prompt": prompt, "cached": max(cached, read), "completion": completion}
    if prompt >= 0:
        found["prompt"] += max(0, read) + max(0, created)
    return {kind: count for kind, count in found.items() if count >= 0}


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 20
