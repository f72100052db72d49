"""Routes that read: the cluster, its instances, tiers, models, chunks, commands and pins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Response

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.metrics import ControllerCollector
from kvstrata.controller.operations import Asked, Operations
from kvstrata.controller.routes import requests, views
from kvstrata.controller.routes.views import Body
from kvstrata.controller.surroundings import Surroundings
from kvstrata.observability.exposition import MEDIA_TYPE, Pages
from kvstrata.types import RequestIdentity

Name = Annotated[str, Path(description="Id of an instance.", max_length=64)]


def asked(body: requests.ChunksBody) -> Asked:
    """The chunks that a body names."""
    request = RequestIdentity(adapter=body.adapter, tenant=body.tenant, salt=body.salt)
    return Asked(body.tokens, body.keys, body.model, body.kind, request)


def router(
    cluster: Cluster,
    operations: Operations,
    around: Surroundings,
    guarded: list[Any],
) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter(dependencies=guarded)
    pages = Pages(ControllerCollector(cluster, around))

    @routes.get("/metrics", tags=["metrics"], response_class=Response)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format; at most 0.25 s old."""
        return Response(pages.page(), media_type=MEDIA_TYPE)

    @routes.get("/v1/cluster", tags=["cluster"])
    async def at_a_glance() -> Body:
        """The cluster at a glance."""
        return views.cluster_body(cluster, around)

    @routes.get("/v1/instances", tags=["instances"])
    async def instances() -> Body:
        """All instances, for a while also dead ones.

        `confirmed`: the directory's knowledge of its chunks is exact. `keys`: chunks by tier, as the directory knows
        them. `drained` and `removed` name instances that an admin has drained, also absent ones, or barred.
        """
        return views.instances(cluster)

    @routes.get("/v1/instances/{name}", tags=["instances"])
    async def instance(name: Name) -> Body:
        """One instance."""
        member = operations.member(name)
        return views.instance_row(cluster, member, views.keys_of(cluster).get(member.group, {}))

    @routes.get("/v1/tiers", tags=["cluster"])
    async def tiers() -> Body:
        """Chunks and bytes by tier, of each instance and of all instances together."""
        return views.tiers(cluster)

    @routes.get("/v1/models", tags=["cluster"])
    async def models() -> Body:
        """The kinds of KV that engines at live instances have."""
        return views.models(cluster)

    @routes.post("/v1/lookup", tags=["chunks"])
    async def lookup(body: requests.LookupBody) -> Body:
        """Where the chunks of a prompt, or of some keys, are, as far as the directory knows.

        `longest`: instances that could serve a hit from L1, the best first. `held_chunks`: chunks of the longest hit
        whose parts some instances have in any tier. `places` of a chunk have all slices that each hit needs.
        """
        named = await operations.name(asked(body))
        found = await operations.find(named)
        return views.placement(cluster, found, body.limit)

    @routes.get("/v1/commands", tags=["commands"])
    async def commands() -> Body:
        """Recent commands, newest first; `done`: none of them is under way."""
        rows = [views.command_row(cluster, issued) for issued in reversed(cluster.commands.recent())]
        return {"done": all(row["state"] in ("done", "failed") for row in rows), "commands": rows}

    @routes.get("/v1/commands/{number}", tags=["commands"])
    async def command(number: int) -> Body:
        """State and result of a command."""
        issued = cluster.commands.get(number)
        if issued is None:
            raise HTTPException(404, f"number: {number} is not among the recent commands")
        return views.command_row(cluster, issued)

    @routes.get("/v1/pins", tags=["chunks"])
    async def pins() -> Body:
        """Pins that have not ended, also from before a restart and from other controllers of the same etcd.

        `asked`: the instance has not answered yet; `unknown`: it does not live now. `keys`: records that it keeps, or
        until it has answered those that it was commanded to keep.
        """
        now_ms = cluster.clock.unix_ms()
        return {"pins": [views.pin_row(cluster, pin, now_ms) for pin in cluster.orders.pins()]}

    return routes
