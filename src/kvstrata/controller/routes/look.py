"""What is there: the cluster, its instances, tiers, models, chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.metrics import ControllerCollector
from kvstrata.controller.operations import Asked, Operations
from kvstrata.controller.routes import bodies, views
from kvstrata.types import RequestIdentity

Name = Annotated[str, Path(description="Of an instance.", max_length=64)]
MAX_PLACES = 65_536


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
        members = {member.group: member for member in cluster.members}
        longest = [
            bodies.HolderBody(
                instance=members[one.group].id,
                chunks=one.n_chunks,
                tokens=one.n_chunks * named.chunk_tokens,
                confirmed=members[one.group].confirmed,
            )
            for one in found.longest
            if one.group in members
        ]
        keys, chunks, told = named.keys, [], 0
        for index, places in enumerate(found.places[: body.limit]):
            told += len(places)
            if told > MAX_PLACES:
                break
            first = index * named.n_slices * 32
            chunks.append(
                bodies.ChunkPlaces(
                    index=index,
                    keys=[keys[at : at + 32].hex() for at in range(first, first + named.n_slices * 32, 32)],
                    places=[
                        bodies.PlaceBody(
                            instance=members[place.group].id,
                            tier=place.tier,
                            confirmed=members[place.group].confirmed,
                        )
                        for place in places
                        if place.group in members
                    ],
                )
            )
        return bodies.PlacementBody(
            n_chunks=named.n_chunks,
            n_slices=named.n_slices,
            chunk_tokens=named.chunk_tokens,
            identity=named.root.hex(),
            held_chunks=found.held_chunks,
            longest=longest,
            chunks=chunks,
        )

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
        """Pins made here that have not ended, those of before a restart too."""
        now_ms = cluster.clock.unix_ms()
        return bodies.PinsBody(
            pins=[
                bodies.PinRow(
                    claim=pin.claim,
                    instance=pin.instance,
                    keys=pin.n_keys,
                    left_s=round((pin.expires_unix_ms - now_ms) / 1000, 1),
                )
                for pin in cluster.pins.all()
            ]
        )

    return routes
