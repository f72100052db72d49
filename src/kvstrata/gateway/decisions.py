"""The last routing decisions with all their inputs, so that an operator can explain and replay them.

A record is encoded when the decision is made, before the fleet's counters change.  Only the first `PER_S` decisions of
each second are kept, and at most `KEPT` in total.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvstrata.gateway.routing.choose import Record, replay
from kvstrata.gateway.routing.model import Decision

KEPT = 512
PER_S = 50
MAX_RECORD_BYTES = 256 << 10
"""Maximum size of a record. A larger one, of a very large fleet, is left out; the decision itself is kept."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode


@dataclass(slots=True)
class Kept:
    """A decision and its observed outcome."""

    number: int
    """Number of the decision among all kept ones since the start; a request that is sent again has several."""
    word: str
    model: str
    tokens: int
    decision: Decision
    record: bytes
    time_s: float = field(default_factory=time.time)
    ttft_s: float | None = None
    """Time from the decision to the first token; None: no first token so far."""
    cached_tokens: int | None = None
    """Cached tokens of the prompt, as the engine reports them."""
    prefill: str | None = None
    """Outcome of the other engine's prefill; None: there is no such prefill, or it still runs."""

    def shown(self) -> dict[str, Any]:
        """The decision as JSON for /gateway/decisions."""
        way = self.decision.way
        return {
            "number": self.number,
            "request": self.word,
            "time_s": round(self.time_s, 3),
            "model": self.model,
            "tokens": self.tokens,
            "decision": msgspec.to_builtins(self.decision),
            "expected": {name: getattr(way, name, None) for name in ("ttft_s", "cached_tokens")},
            "observed": {"ttft_s": self.ttft_s, "cached_tokens": self.cached_tokens, "prefill": self.prefill},
            "recorded": bool(self.record),
        }


class Decisions:
    """The kept decisions. Belongs to the event loop."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._kept: collections.deque[Kept] = collections.deque(maxlen=KEPT)
        self._second = -math.inf
        self._in_second = 0
        self._numbers = itertools.count(1)

    def wanted(self) -> bool:
        """Count a decision that is made now; returns whether it is to be kept."""
        second = math.floor(self._now_s())
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        return self._in_second <= PER_S

    def keep(self, record: Record, model: str) -> Kept:
        """Keep a decision with its inputs."""
        encoded = _encode(record)
        kept = Kept(
            next(self._numbers),
            record.request.id,
            model,
            record.request.tokens,
            record.decision,
            encoded if len(encoded) <= MAX_RECORD_BYTES else b"",
        )
        self._kept.append(kept)
        return kept

    def page(self, limit: int) -> list[dict[str, Any]]:
        """The `limit` newest decisions, newest first."""
        return [kept.shown() for _, kept in zip(range(limit), reversed(self._kept), strict=False)]

    def again(self, word: str, number: int = 0) -> dict[str, Any] | None:
        """Replay a request's decision with this number (0: its last); None if it or its record is not kept."""
        for kept in reversed(self._kept):
            if kept.word == word and number in (0, kept.number) and kept.record:
                record = _decode(kept.record)
                decided = replay(record)
                return {
                    **kept.shown(),
                    "again": msgspec.to_builtins(decided),
                    "equal": decided == record.decision,
                    "record": msgspec.to_builtins(record),
                }
        return None
