"""What is there: the cluster, its instances, tiers, models, chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvstrata.controller import explaining
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.metrics import ControllerCollector
from kvstrata.controller.operations import Asked, Operations
from kvstrata.controller.routes import bodies, views
from kvstrata.errors import BadRequest
from kvstrata.types import RequestIdentity

Name = Annotated[str, Path(description="Of an instance.", max_length=64)]


def asked(body: bodies.ChunksBody) -> Asked:
    """What a body names."""
    request = RequestIdentity(adapter=body.adapter, tenant=body.tenant, salt=body.salt)
    return Asked(body.tokens, body.keys, body.model, body.kind, request)


def router(
    cluster: Cluster,
    operations: Operations,
    sockets: Callable[[], dict[str, dict[str, int]]],
    guarded: list[Any],
) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=guarded)
    registry = CollectorRegistry()
    registry.register(ControllerCollector(cluster, sockets))

    @routes.get("/metrics", tags=["metrics"], response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/cluster", tags=["cluster"])
    async def at_a_glance() -> bodies.ClusterBody:
        """The cluster at a glance."""
        return views.cluster_body(cluster, sockets)

    @routes.get("/v1/instances", tags=["instances"])
    async def instances() -> bodies.InstancesBody:
        """All instances, dead ones for a while too."""
        return views.instances(cluster)

    @routes.get("/v1/instances/{name}", tags=["instances"])
    async def instance(name: Name) -> bodies.InstanceRow:
        """One instance."""
        member = operations.member(name)
        return views.instance_row(cluster, member, views.keys_of(cluster).get(member.group, {}))

    @routes.get("/v1/tiers", tags=["cluster"])
    async def tiers() -> bodies.TiersBody:
        """Chunks and bytes by tier, of each instance and of all."""
        return views.tiers(cluster)

    @routes.get("/v1/models", tags=["cluster"])
    async def models() -> bodies.ModelsBody:
        """The kinds of KV that engines of live instances have."""
        return views.models(cluster)

    @routes.post("/v1/lookup", tags=["chunks"])
    async def lookup(body: bodies.LookupBody) -> bodies.PlacementBody:
        """Where the chunks of a prompt, or some keys, are, as far as the directory knows."""
        named = await operations.name(asked(body))
        found = await operations.find(named)
        return views.placement(cluster, found, body.limit)

    @routes.post("/v1/explain", tags=["chunks"])
    async def explain(body: bodies.ExplainBody) -> bodies.ExplainedBody:
        """Where the chunks of a prompt are or why they are missing, or what became of a recent request.

        Every instance is asked at once, for `wait_s` at most; those that did not answer are named.  A controller that
        does not lead asks nobody.
        """
        members = operations.named(body.instances)
        if body.request_id is not None:
            if body.tokens is not None or body.keys is not None:
                raise BadRequest("request_id: give one of request_id, tokens and keys", field="request_id")
            lookups, answers = await explaining.of_request(cluster, members, body.request_id, body.wait_s)
            return views.explained(cluster, lookups, None, [], answers)
        found = await operations.find(await operations.name(asked(body)))
        misses, answers = await explaining.of_chunks(cluster, members, found, body.wait_s)
        placement = views.placement(cluster, found, body.limit)
        return views.explained(cluster, [], placement, misses, answers)

    @routes.get("/v1/commands", tags=["commands"])
    async def commands() -> bodies.CommandsBody:
        """Recent commands, newest first; `done` when none is under way."""
        rows = [views.command_row(cluster, issued) for issued in reversed(cluster.members.commands())]
        return bodies.CommandsBody(done=all(row.state in ("done", "failed") for row in rows), commands=rows)

    @routes.get("/v1/commands/{number}", tags=["commands"])
    async def command(number: int) -> bodies.CommandRow:
        """What came of a command."""
        issued = cluster.members.command(number)
        if issued is None:
            raise HTTPException(404, f"number: {number} is not among the recent commands")
        return views.command_row(cluster, issued)

    @routes.get("/v1/pins", tags=["chunks"])
    async def pins() -> bodies.PinsBody:
        """Pins that have not ended, those of before a restart and of other controllers of the same etcd too."""
        now_ms = cluster.clock.unix_ms()
        return bodies.PinsBody(pins=[views.pin_row(cluster, pin, now_ms) for pin in cluster.orders.pins()])

    return routes
