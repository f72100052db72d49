"""The last routing decisions with all their inputs, so that an operator can explain and replay them.

A record is encoded when the decision is made, before the fleet's counters change.  Of each second the first `PER_S`
decisions are kept, and the last `KEPT` of all.
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
"""A larger record, of a very large fleet, is left out; the decision itself is kept."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode


@dataclass(slots=True)
class Kept:
    """A decision, and what came of it."""

    number: int
    """Among all decisions that were kept since the start: a request that is sent again has several."""
    word: str
    model: str
    tokens: int
    decision: Decision
    record: bytes
    time_s: float = field(default_factory=time.time)
    ttft_s: float | None = None
    """Time from the decision to the first token; None: it has not come, or never will."""
    cached_tokens: int | None = None
    """Of the prompt, as the engine tells."""
    prefill: str | None = None
    """What came of the other engine's prefill; None: there is none, or it goes on."""

    def shown(self) -> dict[str, Any]:
        """For the page."""
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
    """See the module. Belongs to the event loop."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._kept: collections.deque[Kept] = collections.deque(maxlen=KEPT)
        self._second = -math.inf
        self._in_second = 0
        self._numbers = itertools.count(1)

    def wanted(self) -> bool:
        """Whether the decision that is made now is kept."""
        second = math.floor(self._now_s())
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        return self._in_second <= PER_S

    def keep(self, record: Record, model: str) -> Kept:
        """Keep a decision."""
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
        """The newest decisions, the newest first."""
        return [kept.shown() for _, kept in zip(range(limit), reversed(self._kept), strict=False)]

    def again(self, word: str, number: int = 0) -> dict[str, Any] | None:
        """Decide again for a request, as for the decision with this number (0: its last); None if it is not kept."""
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
