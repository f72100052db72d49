"""What the other gateways have told: their requests in the engines' queues, and the prefixes that they sent.

    unknown ─▶ heard ──silent for SILENT_S──▶ forgotten        a gateway that is heard again begins anew

1. A request of another gateway counts as one of ours in the queues and in the busy periods, under the name
   `GATEWAY/NUMBER`, and never in the numbers of requests that this gateway has under way.
2. When a gateway is forgotten, all its requests end; so do those that its UnderWay does not name.
3. At most MAX_GATEWAYS are known, with MAX_FLIGHTS requests each; further ones are ignored and counted.
4. Names of engines that this gateway does not have are ignored: gateways that share have the same names for them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.gateway.busy_periods import TimedPrompt
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.prefixes import Prefixes
from kvstrata.gateway.sharing.messages import (
    AnyEvent,
    Ended,
    First,
    Flight,
    Frame,
    Sent,
    UnderWay,
    split,
)
from kvstrata.patience import patience

MAX_GATEWAYS = 64
MAX_FLIGHTS = 1 << 16
SILENT_S = 2.0
"""Each gateway tells what it has under way every 0.5 s."""


class Foreign:
    """A request of another gateway."""

    __slots__ = ("engine", "generation", "keys", "running", "timed")

    def __init__(self, engine: ServingEngine, timed: TimedPrompt, keys: list[bytes]) -> None:
        self.engine = engine
        self.generation = engine.generation
        self.timed = timed
        self.keys = keys
        self.running = False


class Other:
    """Another gateway."""

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.flights: dict[int, Foreign] = {}


class Others:
    """See the module. Belongs to the event loop."""

    def __init__(self, fleet: Fleet, prefixes: Prefixes, now_s: Callable[[], float]) -> None:
        self._fleet = fleet
        self._prefixes = prefixes
        self._now_s = now_s
        self._others: dict[str, Other] = {}
        self.ignored = 0
        """Events and frames that exceed a bound, or name an engine that is not known here."""

    def __len__(self) -> int:
        """Gateways that are heard."""
        return len(self._others)

    @property
    def in_flight(self) -> int:
        """Requests of other gateways under way."""
        return sum(len(other.flights) for other in self._others.values())

    def hear(self, frame: Frame) -> None:
        """Apply a frame of another gateway. Raises ValueError, after the events before the wrong one."""
        other = self._others.get(frame.gateway)
        if other is None:
            if len(self._others) >= MAX_GATEWAYS:
                self.ignored += 1
                return
            other = self._others[frame.gateway] = Other()
        other.heard_s = self._now_s()
        for event in frame.events:
            self._apply(frame.gateway, other, event)

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
        for number in list(other.flights):
            self._end(name, other, number, answered=False)

    def _apply(self, name: str, other: Other, event: AnyEvent) -> None:
        match event:
            case Sent():
                self._begin(name, other, event, split(event.keys), timed=not event.loads)
                self._note(other, event.number, ready_at_s=self._now_s() + event.ready_in_s)
            case First():
                self._first(name, other, event.number)
            case Ended():
                self._end(name, other, event.number, answered=event.answered)
            case UnderWay():
                self._mend(name, other, event)

    def _begin(self, name: str, other: Other, sent: Sent | Flight, keys: list[bytes], *, timed: bool) -> None:
        self._end(name, other, sent.number, answered=False)
        known = self._fleet.target(sent.engine)
        if known is None or len(other.flights) >= MAX_FLIGHTS:
            self.ignored += 1
            return
        word = f"{name}/{sent.number}"
        prompt = self._fleet.began(known, word, sent.uncached, sent.tokens, streams=sent.streams, ours=False)
        if not timed:
            prompt.spoil()
        other.flights[sent.number] = Foreign(known, prompt, keys)

    def _note(self, other: Other, number: int, *, ready_at_s: float = 0.0, computed: bool = False) -> None:
        flight = other.flights.get(number)
        if flight is not None:
            self._prefixes.note(
                flight.keys,
                flight.engine.name,
                flight.generation,
                self._now_s(),
                computed=computed,
                ready_at_s=ready_at_s,
            )

    def _first(self, name: str, other: Other, number: int) -> None:
        flight = other.flights.get(number)
        if flight is not None and not flight.running:
            flight.running = True
            self._fleet.answers(flight.engine, f"{name}/{number}", flight.timed)
            self._note(other, number, computed=True)

    def _end(self, name: str, other: Other, number: int, *, answered: bool) -> None:
        flight = other.flights.pop(number, None)
        if flight is None:
            return
        if not answered:
            flight.timed.spoil()
        self._fleet.ended(flight.engine, f"{name}/{number}", ours=False)
        if not answered:
            self._prefixes.take_back(flight.keys, flight.engine.name)

    def _mend(self, name: str, other: Other, event: UnderWay) -> None:
        stated = {one.number for one in event.flights if event.first <= one.number < event.end}
        for number in [one for one in other.flights if event.first <= one < event.end and one not in stated]:
            self._end(name, other, number, answered=False)
        for one in event.flights:
            if one.number not in stated:
                continue
            if one.number not in other.flights:
                self._begin(name, other, one, [], timed=False)
            if one.running:
                self._first(name, other, one.number)
