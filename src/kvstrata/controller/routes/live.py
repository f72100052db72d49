"""Routes that follow the cluster: events by cursor, its whole state for dashboards, and numbers over time."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Response

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.history import SAMPLE_S
from kvstrata.controller.routes import requests, views
from kvstrata.controller.routes.views import Body
from kvstrata.controller.surroundings import Surroundings

MAX_EVENTS = 1_000
"""Maximum number of events in one answer."""
FRESH_S = 1.0
"""Age up to which a state is given to further readers."""

After = Annotated[
    int | None,
    Query(
        ge=-1,
        description="Number of the last event that the client knows; without it the newest events are answered.",
    ),
]


def router(cluster: Cluster, around: Surroundings, guarded: list[Any]) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter(dependencies=guarded, tags=["events"])
    made_s, made = float("-inf"), b""

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
    ) -> Body:
        """Recent events of the cluster, oldest first; `lost`: some after `after` are no longer kept.

        `next_after` is the `after` of the next request.
        """
        tail = cluster.journal.tail
        if after is None:
            found, lost = tail.latest(limit), False
            after = tail.last
        else:
            if wait_s:
                await tail.wait(after, wait_s)
            found, lost = tail.after(after, limit)
        rows = [views.event_row(event) for event in found]
        return {"events": rows, "next_after": found[-1].number if found else after, "lost": lost}

    @routes.get("/v1/state")
    async def state() -> Response:
        """The whole cluster, as the dashboard shows it; made anew once a second at most, for all readers."""
        nonlocal made_s, made
        now_s = cluster.clock.monotonic_s()
        if now_s - made_s >= FRESH_S:
            made_s, made = now_s, msgspec.json.encode(views.state(cluster, around))
        return Response(made, media_type="application/json")

    @routes.get("/v1/series")
    async def series(
        after_unix_ms: Annotated[int, Query(ge=0, description="Only points after this time.")] = 0,
    ) -> Body:
        """Numbers over the last hour; rates (`_per_s`) are since the point before."""
        points = [point._asdict() for point in cluster.sampling.series.since(after_unix_ms)]
        return {"sample_s": SAMPLE_S, "points": points}

    return routes
