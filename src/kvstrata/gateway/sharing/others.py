"""Applies the messages of other gateways: their requests in the engines' queues, and the prefixes that they sent.

    unknown ─▶ known ──silent for SILENT_S──▶ forgotten        its next message makes it known again

1. A request of another gateway counts like one of this gateway in the engines' queues and in the samples of prefill
   rates, but not in this gateway's number of requests under way.
2. When a gateway is forgotten, all its requests end; so do requests with numbers in a range that does not list them.
3. At most MAX_GATEWAYS are known, with MAX_FLIGHTS requests each; further ones are ignored and counted.
4. Events with unknown engines are ignored, since gateways that share must use the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.prefixes import KEY_BYTES, Prefixes
from kvstrata.gateway.routing.queues import Flight, Sending
from kvstrata.gateway.sharing.telling import Frame, Sent
from kvstrata.patience import patience

MAX_GATEWAYS = 64
MAX_FLIGHTS = 1 << 16
SILENT_S = 2.0
"""Time without a message after which a gateway is forgotten; each sends its requests under way every 0.5 s."""


class Foreign(NamedTuple):
    """A request of another gateway."""

    engine: ServingEngine
    generation: int
    """The engine's generation when the request was sent."""
    flight: Flight
    keys: list[bytes]


class Others:
    """The state of the other gateways. Belongs to the event loop."""

    def __init__(self, fleet: Fleet, prefixes: Prefixes, now_s: Callable[[], float]) -> None:
        self._fleet, self._prefixes, self._now_s = fleet, prefixes, now_s
        self._flights: dict[str, dict[int, Foreign]] = {}
        self._heard_s: dict[str, float] = {}
        """By gateway: its requests by number, and the time of its last message."""
        self.ignored = 0
        """Number of events and frames that exceed a limit, or name an unknown engine."""

    def __len__(self) -> int:
        """Number of known gateways."""
        return len(self._flights)

    @property
    def in_flight(self) -> int:
        """Number of other gateways' requests under way."""
        return sum(map(len, self._flights.values()))

    def hear(self, frame: Frame) -> None:
        """Apply a frame of another gateway. Raises ValueError for an invalid event; those before it stay applied."""
        if frame.gateway not in self._flights and len(self) >= MAX_GATEWAYS:
            self.ignored += 1
            return
        self._heard_s[frame.gateway] = self._now_s()
        flights = self._flights.setdefault(frame.gateway, {})
        stated = {event.number for event in frame.events}
        for event in frame.events:
            known = flights.get(event.number)
            if event.state in ("answered", "failed") or (known and known.engine.name != event.engine):
                self._ended(flights, event.number, answered=event.state == "answered")
            if event.state in ("sent", "running"):
                known = flights.get(event.number) or self._sent(flights, event, is_whole=frame.end > 0)
                if known is not None and event.state == "running" and not known.flight.running:
                    self._fleet.answers(known.flight)
                    self._note(known, computed=True)
        for number in [one for one in flights if frame.first <= one < frame.end and one not in stated]:
            self._ended(flights, number, answered=False)

    def _sent(self, flights: dict[int, Foreign], event: Sent, *, is_whole: bool) -> Foreign | None:
        """Add a request; `is_whole`: from a range, so sent earlier. Returns None if it is ignored."""
        if len(event.keys) % KEY_BYTES:
            raise ValueError(f"keys: must have a multiple of {KEY_BYTES} bytes, found {len(event.keys)}")
        keys = [event.keys[at : at + KEY_BYTES] for at in range(0, len(event.keys), KEY_BYTES)]
        engine = self._fleet.target(event.engine)
        if engine is None or len(flights) >= MAX_FLIGHTS:
            self.ignored += 1
            return None
        how = Sending(streams=event.streams, ours=False)
        flight = engine.queue.send(event.uncached, self._now_s(), how)
        if event.loads or is_whole or event.state == "running":
            flight.exclude_sample()  # a load, or an unknown time of sending: no sample of the prefill rate
        flights[event.number] = known = Foreign(engine, engine.generation, flight, keys)
        self._note(known, ready_at_s=self._now_s() + event.ready_in_s)
        return known

    def _ended(self, flights: dict[int, Foreign], number: int, *, answered: bool) -> None:
        known = flights.pop(number, None)
        if known is not None:
            known.flight.queue.end(known.flight, self._now_s())
            if not answered:
                self._prefixes.take_back(known.keys, known.engine.name)

    def _note(self, known: Foreign, *, ready_at_s: float = 0.0, computed: bool = False) -> None:
        name, generation, now_s = known.engine.name, known.generation, self._now_s()
        self._prefixes.note(known.keys, name, generation, now_s, computed=computed, ready_at_s=ready_at_s)

    def forget_silent(self) -> list[str]:
        """Forget the gateways without a message for SILENT_S; returns their names."""
        since_s = self._now_s() - patience(SILENT_S)
        silent = [name for name, heard_s in self._heard_s.items() if heard_s < since_s]
        self._forget(silent)
        return silent

    def clear(self) -> None:
        """Forget all gateways."""
        self._forget(list(self._flights))

    def _forget(self, names: list[str]) -> None:
        for name in names:
            flights = self._flights.pop(name)
            del self._heard_s[name]
            for number in list(flights):
                self._ended(flights, number, answered=False)
