"""What happens: events by cursor or as a stream, and numbers over time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.history import SAMPLE_S, Happened
from kvstrata.controller.routes import bodies, views
from kvstrata.errors import Refused

MAX_STREAMS = 16
"""Readers of the stream at a time; each has a connection of its own."""
KEEP_ALIVE_S = 10.0
LIVE_S = 1.0
"""Between two looks at the cluster."""
MAX_EVENTS = 1_000

STREAMED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

After = Annotated[
    int | None,
    Query(ge=-1, description="Number of the last event that is known; left out: the newest are told."),
]


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
    async def watch() -> StreamingResponse:
        """The cluster every second (server-sent events): `cluster` as /v1/cluster, `instances` as /v1/instances, and
        `events` as /v1/events when there are new ones."""
        room()
        return StreamingResponse(seen(), media_type="text/event-stream", headers=STREAMED)

    def room() -> None:
        if streams >= MAX_STREAMS:
            raise Refused(f"{MAX_STREAMS} readers have a stream already; use /v1/events with wait_s")

    async def seen() -> AsyncIterator[str]:
        nonlocal streams
        streams += 1
        try:
            number = cluster.events.last
            while True:
                told_now: dict[str, BaseModel] = {
                    "cluster": views.cluster_body(cluster, sockets),
                    "instances": views.instances(cluster),
                }
                found, lost = cluster.events.after(number, MAX_EVENTS)
                if found:
                    number = found[-1].number
                    told_now["events"] = tail_body(found, number, lost)
                for kind, body in told_now.items():
                    yield f"event: {kind}\ndata: {body.model_dump_json()}\n\n"
                await asyncio.sleep(LIVE_S)
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
