"""What the other gateways have told: their requests in the engines' queues, and the prefixes that they sent.

    unknown ─▶ heard ──silent for SILENT_S──▶ forgotten        a gateway that is heard again begins anew

1. A request of another gateway counts as one of ours in the queues and in the times of prompts, and never in the
   numbers of requests that this gateway has under way.
2. When a gateway is forgotten, all its requests end; so do those that its UnderWay does not name.
3. At most MAX_GATEWAYS are known, with MAX_FLIGHTS requests each; further ones are ignored and counted.
4. Names of engines that this gateway does not have are ignored: gateways that share have the same names for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.prefixes import KEY_BYTES, Prefixes
from kvstrata.gateway.routing.queues import Flight, Sending
from kvstrata.gateway.sharing.telling import Ended, First, Frame, Sent, UnderWay
from kvstrata.patience import patience

MAX_GATEWAYS = 64
MAX_FLIGHTS = 1 << 16
SILENT_S = 2.0
"""Each gateway tells what it has under way every 0.5 s."""


class Foreign(NamedTuple):
    """A request of another gateway."""

    engine: ServingEngine
    generation: int
    """Of the engine, when it was sent."""
    flight: Flight
    keys: list[bytes]


class Other:
    """Another gateway."""

    def __init__(self, fleet: Fleet, prefixes: Prefixes, now_s: Callable[[], float]) -> None:
        self._fleet, self._prefixes, self._now_s = fleet, prefixes, now_s
        self.heard_s = 0.0
        self.flights: dict[int, Foreign] = {}
        self.ignored = 0

    def sent(self, event: Sent) -> None:
        """A request is sent. Raises ValueError unless its keys are whole."""
        if len(event.keys) % KEY_BYTES:
            raise ValueError(f"keys: {len(event.keys)} bytes; they must be a multiple of {KEY_BYTES}")
        keys = [event.keys[at : at + KEY_BYTES] for at in range(0, len(event.keys), KEY_BYTES)]
        self.ended(event.number, answered=False)
        engine = self._fleet.target(event.engine)
        if engine is None or len(self.flights) >= MAX_FLIGHTS:
            self.ignored += 1
            return
        flight = self._fleet.began(
            engine, event.uncached, event.tokens, Sending(streams=event.streams, ours=False)
        )
        if event.loads:
            flight.spoil()
        self.flights[event.number] = known = Foreign(engine, engine.generation, flight, keys)
        self._note(known, ready_at_s=self._now_s() + event.ready_in_s)

    def first(self, number: int) -> None:
        """Its first token has come."""
        known = self.flights.get(number)
        if known is not None and not known.flight.running:
            self._fleet.answers(known.flight)
            self._note(known, computed=True)

    def ended(self, number: int, *, answered: bool) -> None:
        """It has ended."""
        known = self.flights.pop(number, None)
        if known is not None:
            self._fleet.ended(known.engine, known.flight)
            if not answered:
                self._prefixes.take_back(known.keys, known.engine.name)

    def under_way(self, event: UnderWay) -> None:
        """Have exactly these requests of a range of numbers."""
        stated = {one.number: one for one in event.flights if event.first <= one.number < event.end}
        for number in [one for one in self.flights if event.first <= one < event.end and one not in stated]:
            self.ended(number, answered=False)
        for number, one in stated.items():
            if number not in self.flights:
                self.sent(one)
                if number in self.flights:
                    self.flights[number].flight.spoil()  # when it was sent is not known
            if one.running:
                self.first(number)

    def _note(self, known: Foreign, *, ready_at_s: float = 0.0, computed: bool = False) -> None:
        name, generation, now_s = known.engine.name, known.generation, self._now_s()
        self._prefixes.note(known.keys, name, generation, now_s, computed=computed, ready_at_s=ready_at_s)


class Others:
    """See the module. Belongs to the event loop."""

    def __init__(self, fleet: Fleet, prefixes: Prefixes, now_s: Callable[[], float]) -> None:
        self._fleet, self._prefixes, self._now_s = fleet, prefixes, now_s
        self._others: dict[str, Other] = {}
        self._ignored = 0
        """Frames of gateways above the bound, and events that gateways were silent after."""

    def __len__(self) -> int:
        """Gateways that are heard."""
        return len(self._others)

    @property
    def in_flight(self) -> int:
        """Requests of other gateways under way."""
        return sum(len(other.flights) for other in self._others.values())

    @property
    def ignored(self) -> int:
        """Events and frames that exceed a bound, or name an engine that is not known here."""
        return self._ignored + sum(other.ignored for other in self._others.values())

    def hear(self, frame: Frame) -> None:
        """Apply a frame of another gateway. Raises ValueError, after the events before the wrong one."""
        other = self._others.get(frame.gateway)
        if other is None:
            if len(self._others) >= MAX_GATEWAYS:
                self._ignored += 1
                return
            other = self._others[frame.gateway] = Other(self._fleet, self._prefixes, self._now_s)
        other.heard_s = self._now_s()
        for event in frame.events:
            match event:
                case Sent():
                    other.sent(event)
                case First():
                    other.first(event.number)
                case Ended():
                    other.ended(event.number, answered=event.answered)
                case UnderWay():
                    other.under_way(event)

    def forget_silent(self) -> list[str]:
        """Forget the gateways that have said nothing for SILENT_S; returns their names."""
        since_s = self._now_s() - patience(SILENT_S)
        silent = [name for name, other in self._others.items() if other.heard_s < since_s]
        for name in silent:
            self._forget(name)
        return silent

    def clear(self) -> None:
        """Forget all gateways."""
        for name in list(self._others):
            self._forget(name)

    def _forget(self, name: str) -> None:
        other = self._others.pop(name)
        self._ignored += other.ignored
        for number in list(other.flights):
            other.ended(number, answered=False)
