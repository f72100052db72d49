"""Parses Envoy's report of a request: a line of its access log with the timestamps (marks) of the watcher filter.

The line's format is configuration.LINE; watch.c and watch.lua set the marks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

CANCELLED, BROKE_OFF, OK, CLIENT_ERROR = "cancelled", "broke_off", "ok", "client_error"
END = "DownstreamEnd"
ELSEWHERE = frozenset((429, 502, 503, 504))
"""Statuses of an engine that has not begun the request."""
NO_FLAGS: frozenset[str] = frozenset()
_UNREACHED = frozenset(("UF", "URX", "UH", "NC"))


class Marks(NamedTuple):
    """What is known of a request so far, or at its end. Times are by the wall clock, 0: not yet."""

    number: int
    """The picker's; -1: the picker has not chosen."""
    stream: str
    """Envoy's name of the request (configuration.STREAM_ID); empty: not told."""
    is_end: bool
    status: int = 0
    """0: the client went before the answer's head."""
    served: str = ""
    """`ip:port` of the engine that has answered, or was tried last; empty: none was."""
    flags: frozenset[str] = frozenset()
    """Envoy's response flags."""
    attempts: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    """When content came for the first and the last time."""
    events: int = 0
    """Events of a stream with content."""
    whole: bool = False
    """Whether the answer's last byte has come."""
    failed: bool = False
    """Whether the answer is an error inside a 200."""
    tokens: Mapping[str, int] = {}
    """Those that `usage` tells: `prompt`, `cached`, `completion`."""
    reason: str = ""
    """Why the answer ended, in the API's word (`tool_calls`, `end_turn`)."""
    response: str = ""
    """The id of the stored response that the answer names."""

    @property
    def outcome(self) -> str:
        """A word for the metrics."""
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
    """Read a line; None if it is something else."""
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
    """What a line says, with what the watcher has `told`; something else than its words says nothing."""
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
    """Tokens by kind. `/v1/messages` counts what was read from the cache, or created, beside its prompt."""
    found = {"prompt": prompt, "cached": max(cached, read), "completion": completion}
    if prompt >= 0:
        found["prompt"] += max(0, read) + max(0, created)
    return {kind: count for kind, count in found.items() if count >= 0}


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 20
