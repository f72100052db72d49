"""What happens: events by cursor or as a stream, and numbers over time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from kvstrata.clock import Clock
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.feed import MAX_EVENTS, Feed, State
from kvstrata.controller.history import SAMPLE_S, Happened
from kvstrata.controller.routes import bodies, views
from kvstrata.errors import Refused

MAX_STREAMS = 16
"""Readers of the stream at a time; each has a connection of its own."""
KEEP_ALIVE_S = 10.0

STREAMED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

After = Annotated[
    int | None,
    Query(ge=-1, description="Number of the last event that is known; left out: the newest are told."),
]


Look = Annotated[
    str, Query(max_length=64, description="Name of the last look that is known (`look` of a change).")
]
CLOCK_SET_MS = 1_000
"""A difference that is no inaccuracy any more: somebody has set the clock."""


class Steady:
    """Times of the day for monotonic ones: always the same time for the same one, until the clock is set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = 0.0

    def look(self) -> None:
        """Follow the clock where it was set."""
        offset_ms = self._clock.unix_ms() - 1000 * self._clock.monotonic_s()
        if abs(offset_ms - self._offset_ms) > CLOCK_SET_MS:
            self._offset_ms = offset_ms

    def unix_ms(self, monotonic_s: float) -> int:
        """Milliseconds since 1970."""
        return round(1000 * monotonic_s + self._offset_ms)


def tail_body(events: list[Happened], next_after: int, lost: bool) -> bodies.EventsBody:
    """A piece of the tail."""
    rows = [views.event_row(event) for event in events]
    return bodies.EventsBody(events=rows, next_after=next_after, lost=lost)


def router(
    cluster: Cluster, sockets: Callable[[], dict[str, dict[str, int]]], guarded: list[Any]
) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=guarded, tags=["events"])
    streams = 0
    clock = Steady(cluster.clock)

    def happened(number: int) -> list[dict[str, Any]]:
        found, _ = cluster.events.after(number, cluster.events.last - number)
        return [views.event_row(event).model_dump(mode="json") for event in found[-MAX_EVENTS:]]

    def see() -> State:
        clock.look()
        return views.state(cluster, sockets, clock.unix_ms)

    feed = Feed(cluster.epoch, cluster.clock.monotonic_s, see, happened)

    @routes.get("/v1/events")
    async def events(
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100,
        wait_s: Annotated[
            float,
            Query(ge=0, le=bodies.MAX_WAIT_S, description="Longest wait for the first one behind `after`."),
        ] = 0.0,
    ) -> bodies.EventsBody:
        """The tail of what happened in the cluster, oldest first."""
        tail = cluster.events
        if after is None:
            found, lost = tail.latest(limit), False
            after = tail.last
        else:
            if wait_s:
                await tail.wait(after, wait_s)
            found, lost = tail.after(after, limit)
        return tail_body(found, found[-1].number if found else after, lost)

    @routes.get("/v1/events/stream", response_class=StreamingResponse)
    async def stream(request: Request, after: After = None) -> StreamingResponse:
        """Events as they happen (server-sent events): `id` is the number, `data` a JSON event; `event: lost` when some
        behind `after` are not kept any more. `Last-Event-ID` goes before `after`."""
        room()
        last = request.headers.get("last-event-id", "")
        cursor = int(last) if last.isdecimal() and len(last) < 20 else after
        first = cluster.events.last if cursor is None else cursor
        return StreamingResponse(told(first), media_type="text/event-stream", headers=STREAMED)

    @routes.get("/v1/live", response_class=StreamingResponse)
    async def watch(request: Request, after: Look = "") -> StreamingResponse:
        """The cluster every second (server-sent events): each `change` is a ChangeBody, its `id` the name of its look.
        The first is a whole state, and so is one for a reader that was too slow for the changes in between to be kept.
        A reader that comes back names its last look as `Last-Event-ID` or `after`."""
        room()
        number = feed.number_of(request.headers.get("last-event-id", "") or after)
        return StreamingResponse(seen(number), media_type="text/event-stream", headers=STREAMED)

    @routes.get("/v1/changes", response_model=bodies.ChangesBody)
    async def changes(after: Look = "") -> Response:
        """What `/v1/live` tells, for who cannot have a stream: the changes since `after`, or a whole state."""
        feed.look()
        number, found = feed.number_of(after), list[bytes]()
        while change := feed.after(number):
            number = change.number
            found.append(change.body)
        return Response(b'{"changes":[%b]}' % b",".join(found), media_type="application/json")

    def room() -> None:
        if streams >= MAX_STREAMS:
            raise Refused(f"{MAX_STREAMS} readers have a stream already; use /v1/events with wait_s")

    async def seen(number: int) -> AsyncIterator[bytes]:
        nonlocal streams
        streams += 1
        try:
            while True:
                feed.look()
                # One at a time: while the reader does not read, changes are kept by the feed or not at all.
                while change := feed.after(number):
                    number = change.number
                    yield b"id: %b\nevent: change\ndata: %b\n\n" % (feed.name(number).encode(), change.body)
                await asyncio.sleep(feed.due_s())
        finally:
            streams -= 1

    async def told(number: int) -> AsyncIterator[str]:
        nonlocal streams
        streams += 1
        try:
            yield ": connected\n\n"
            while True:
                found, lost = cluster.events.after(number, MAX_EVENTS)
                if lost:
                    yield "event: lost\ndata: {}\n\n"
                for event in found:
                    number = event.number
                    yield f"id: {number}\ndata: {views.event_row(event).model_dump_json()}\n\n"
                if not found:
                    await cluster.events.wait(number, KEEP_ALIVE_S)
                    if cluster.events.last <= number:
                        yield ": alive\n\n"
        finally:
            streams -= 1

    @routes.get("/v1/series")
    async def series(
        after_unix_ms: Annotated[int, Query(ge=0, description="Only points behind this time.")] = 0,
    ) -> bodies.SeriesBody:
        """Numbers over the last hour."""
        points = [bodies.PointBody(**point._asdict()) for point in cluster.series.since(after_unix_ms)]
        return bodies.SeriesBody(sample_s=SAMPLE_S, points=points)

    return routes
