"""Routes that follow the cluster: events by cursor, the live feed, and numbers over time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from kvstrata.clock import Clock
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.feed import MAX_EVENTS, Feed, State
from kvstrata.controller.history import SAMPLE_S, Happened
from kvstrata.controller.routes import bodies, requests, views
from kvstrata.controller.surroundings import Surroundings
from kvstrata.errors import Refused
from kvstrata.process.http_gate import Access

MAX_STREAMS = 16
"""Most readers of streams at a time; each holds a connection."""

STREAMED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

After = Annotated[
    int | None,
    Query(
        ge=-1,
        description="Number of the last event that the client knows; without it the newest events are answered.",
    ),
]


Look = Annotated[
    str, Query(max_length=64, description="Name of the last look that the client knows (`look` of a change).")
]
CLOCK_SET_MS = 1_000
"""A greater difference between the clocks is no inaccuracy: the clock was set."""


class Steady:
    """Converts monotonic times to times of day; the same one always gives the same time, until the clock is set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = 0.0

    def look(self) -> None:
        """Take over the clock's new time, if it was set."""
        offset_ms = self._clock.unix_ms() - 1000 * self._clock.monotonic_s()
        if abs(offset_ms - self._offset_ms) > CLOCK_SET_MS:
            self._offset_ms = offset_ms

    def unix_ms(self, monotonic_s: float) -> int:
        """Milliseconds since 1970."""
        return round(1000 * monotonic_s + self._offset_ms)


def tail_body(events: list[Happened], next_after: int, lost: bool) -> bodies.EventsBody:
    """The body of an answer with these events."""
    rows = [views.event_row(event) for event in events]
    return bodies.EventsBody(events=rows, next_after=next_after, lost=lost)


def router(cluster: Cluster, around: Surroundings, access: Access, guarded: list[Any]) -> APIRouter:
    """The routes of this module. A stream ends with the session of the browser that reads it."""
    routes = APIRouter(dependencies=guarded, tags=["events"])
    streams = 0
    clock = Steady(cluster.clock)

    def happened(number: int) -> list[dict[str, Any]]:
        found, _ = cluster.journal.tail.after(number, cluster.journal.tail.last - number)
        return [views.event_row(event).model_dump(mode="json") for event in found[-MAX_EVENTS:]]

    def see() -> State:
        clock.look()
        return views.state(cluster, around, clock.unix_ms)

    feed = Feed(cluster.epoch, cluster.clock.monotonic_s, see, happened)

    @routes.get("/v1/events")
    async def events(
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100,
        wait_s: Annotated[
            float,
            Query(
                ge=0, le=requests.MAX_WAIT_S, description="Longest wait for the first event after `after`."
            ),
        ] = 0.0,
    ) -> bodies.EventsBody:
        """Recent events of the cluster, oldest first."""
        tail = cluster.journal.tail
        if after is None:
            found, lost = tail.latest(limit), False
            after = tail.last
        else:
            if wait_s:
                await tail.wait(after, wait_s)
            found, lost = tail.after(after, limit)
        return tail_body(found, found[-1].number if found else after, lost)

    @routes.get("/v1/live", response_class=StreamingResponse)
    async def watch(request: Request, after: Look = "") -> StreamingResponse:
        """The cluster every second (server-sent events): each `change` is a ChangeBody, its `id` the name of its look.
        The first change is a whole state; a reader that is too slow for the kept changes gets a whole state again.
        A reader that reconnects names its last look as `Last-Event-ID` or `after`."""
        room()
        number = feed.number_of(request.headers.get("last-event-id", "") or after)
        return StreamingResponse(seen(number, request), media_type="text/event-stream", headers=STREAMED)

    @routes.get("/v1/changes", response_model=bodies.ChangesBody)
    async def changes(after: Look = "") -> Response:
        """The changes since `after`, or a whole state, as in `/v1/live`; for clients that cannot read a stream."""
        feed.look()
        number, found = feed.number_of(after), list[bytes]()
        while change := feed.after(number):
            number = change.number
            found.append(change.body)
        return Response(b'{"changes":[%b]}' % b",".join(found), media_type="application/json")

    def room() -> None:
        if streams >= MAX_STREAMS:
            raise Refused(f"{MAX_STREAMS} readers already have a stream; use /v1/events with wait_s")

    async def seen(number: int, request: Request) -> AsyncIterator[bytes]:
        nonlocal streams
        headers = dict(request.headers.raw)
        streams += 1
        try:
            while access.proven(headers):
                feed.look()
                # One change at a time: while the reader does not read, no changes pile up here.
                while change := feed.after(number):
                    number = change.number
                    yield b"id: %b\nevent: change\ndata: %b\n\n" % (feed.name(number).encode(), change.body)
                await asyncio.sleep(feed.due_s())
        finally:
            streams -= 1

    @routes.get("/v1/series")
    async def series(
        after_unix_ms: Annotated[int, Query(ge=0, description="Only points after this time.")] = 0,
    ) -> bodies.SeriesBody:
        """Numbers over the last hour."""
        points = [
            bodies.PointBody(**point._asdict()) for point in cluster.sampling.series.since(after_unix_ms)
        ]
        return bodies.SeriesBody(sample_s=SAMPLE_S, points=points)

    return routes
