"""A simulated engine in real time, on the loop of the calling thread.

The engine's times are those of a monotonic clock, `speed` times as fast.  A step ends when a timer fires; if the timer
is late, the next step still begins when the last one should have ended, so that lateness does not add up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_NS, PS_PER_S
from kvstrata.testing.engine_sim.kv_events import Event
from kvstrata.testing.engine_sim.requests import SimRequest


class LiveEngine:
    """Owns an engine and its timer. `tell` gets the KV events of one step, `count` each request that has ended."""

    def __init__(
        self,
        engine: SimEngine,
        *,
        speed: float,
        tell: Callable[[list[Event]], None],
        count: Callable[[SimRequest], None],
    ) -> None:
        self.engine = engine
        self.speed = speed
        self._tell = tell
        self._count = count
        self._origin_ns = time.monotonic_ns()
        self._changed: dict[str, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None

    def now_ps(self) -> int:
        """The engine's time."""
        return int((time.monotonic_ns() - self._origin_ns) * self.speed) * PS_PER_NS

    def check(self, requests: Sequence[SimRequest]) -> None:
        """Raise BadRequest unless each of the requests fits into the engine."""
        for request in requests:
            self.engine.check(request)

    def submit(self, requests: Sequence[SimRequest]) -> asyncio.Event:
        """Submit requests that `check` let pass; the event is set whenever one of them got tokens or ended."""
        changed = asyncio.Event()
        now_ps = self.now_ps()
        for request in requests:
            self.engine.submit(request, now_ps)
            self._changed[request.name] = changed
        self._tick()
        return changed

    def abort(self, requests: Sequence[SimRequest]) -> None:
        """End those of the requests that have not ended."""
        for request in requests:
            if request.end is None and self.engine.abort(request.name, self.now_ps()):
                self._tick()

    def clear_cache(self) -> bool:
        """Forget all stored blocks; returns False while requests run."""
        cleared = self.engine.clear_cache(self.now_ps())
        self._tick()
        return cleared

    def close(self) -> None:
        """Stop. Requests that have not ended get no more tokens. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self.close()
        self.engine.advance(self.now_ps())
        for request in self.engine.take_changed():
            if request.end is None:
                self._changed[request.name].set()
            else:
                self._changed.pop(request.name).set()
                self._count(request)
        for _, events in self.engine.take_events():
            self._tell(events)
        next_ps = self.engine.next_ps()
        if next_ps is not None:
            delay_s = (next_ps + 1 - self.now_ps()) / PS_PER_S / self.speed
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._tick)
