"""What this gateway tells the others: events as they happen, and now and then all its requests under way.

1. Telling only appends to a list of at most MAX_EVENTS; what does not fit is dropped and counted, and UnderWay mends
   the queues of the others later.
2. A frame has at most MAX_FRAME_BYTES: a new one begins before an event that would not fit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvstrata.gateway.sharing.messages import (
    MAX_EVENTS,
    MAX_FRAME_BYTES,
    MAX_STATED,
    PROTOCOL,
    AnyEvent,
    Ended,
    First,
    Flight,
    Frame,
    Sent,
    UnderWay,
    encode,
)

EVENT_BYTES = 1_200
"""More than any event has without its keys."""
LAST = (1 << 63) - 1


class Teller:
    """See the module. Belongs to the event loop."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called when there is something to tell after there was nothing."""
        self.name = secrets.token_hex(8)
        """Of this life of the gateway."""
        self._wake = wake
        self._flights: dict[int, Flight] = {}
        """Those under way, by number."""
        self._events: list[AnyEvent] = []
        self.dropped = 0

    def sent(
        self,
        number: int,
        engine: str,
        uncached: int,
        tokens: int,
        keys: Sequence[bytes],
        ready_in_s: float,
        *,
        streams: bool,
        loads: bool,
    ) -> None:
        """A request is sent to an engine: see messages.Sent."""
        self._flights[number] = Flight(number, engine, uncached, tokens, False, streams)
        joined = b"".join(keys)
        self._tell(Sent(number, engine, uncached, tokens, joined, max(0.0, ready_in_s), streams, loads))

    def first(self, number: int) -> None:
        """Its first token has come."""
        flight = self._flights.get(number)
        if flight is not None and not flight.running:
            self._flights[number] = msgspec.structs.replace(flight, running=True)
            self._tell(First(number))

    def ended(self, number: int, *, answered: bool) -> None:
        """It has ended at this engine."""
        if self._flights.pop(number, None) is not None:
            self._tell(Ended(number, answered))

    def take(self) -> Iterator[bytes]:
        """Frames of all that was not taken yet."""
        events, self._events = self._events, []
        part: list[AnyEvent] = []
        size = 0
        for event in events:
            more = EVENT_BYTES + (len(event.keys) if isinstance(event, Sent) else 0)
            if part and size + more > MAX_FRAME_BYTES:
                yield self._frame(part)
                part, size = [], 0
            part.append(event)
            size += more
        if part:
            yield self._frame(part)

    def under_way(self) -> Iterator[bytes]:
        """Frames of all requests under way, at least one. Events that were not taken belong before them."""
        numbers = sorted(self._flights)
        first = 0
        while True:
            part, numbers = numbers[:MAX_STATED], numbers[MAX_STATED:]
            end = numbers[0] if numbers else LAST
            yield self._frame([UnderWay(first, end, [self._flights[number] for number in part])])
            first = end
            if not numbers:
                return

    def _tell(self, event: AnyEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            self.dropped += 1
            return
        self._events.append(event)
        if len(self._events) == 1:
            self._wake()

    def _frame(self, events: list[AnyEvent]) -> bytes:
        return encode(Frame(PROTOCOL, self.name, events))
