"""Routes that change something or ask an instance; they answer 202 if the instance has not answered within `wait_s`.

A controller that does not lead redirects the client to the leader (307).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.member import Issued
from kvstrata.controller.operations import Operations
from kvstrata.controller.routes import requests, views
from kvstrata.controller.routes.look import Name, asked
from kvstrata.controller.routes.views import Body
from kvstrata.rpc.cluster_wire import CommandKind

WaitS = Annotated[
    float,
    Query(ge=0, le=requests.MAX_WAIT_S, description="Longest wait for the instance's answer; then 202."),
]


def router(cluster: Cluster, operations: Operations, guarded: list[Any]) -> APIRouter:
    """The routes of this module."""

    async def redirect_to_leader(request: Request) -> None:
        leader = cluster.leadership.election.leader if cluster.leadership.election is not None else None
        if (
            cluster.leadership.token is None
            and leader is not None
            and leader.member.http_url
            and leader.member.name != cluster.name
        ):
            query = f"?{request.url.query}" if request.url.query else ""
            where = f"{leader.member.http_url}{request.url.path}{query}"
            raise HTTPException(
                307, f"this controller does not lead; ask {leader.member.name}", {"Location": where}
            )
        cluster.leadership.must_lead()

    routes = APIRouter(dependencies=[*guarded, Depends(redirect_to_leader)])

    async def ended(issued: Sequence[Issued], wait_s: float, response: Response) -> Body:
        done = await cluster.outcome(issued, wait_s)
        response.status_code = 200 if done else 202
        rows = [views.command_row(cluster, one) for one in issued]
        return {"done": done, "commands": rows}

    async def document(
        name: str, kind: CommandKind, argument: dict[str, Any], wait_s: float, response: Response
    ) -> Body:
        issued = cluster.issue(operations.member(name), kind, argument, ttl_s=max(60.0, wait_s))
        done = await cluster.outcome([issued], wait_s)
        response.status_code = 200 if done else 202
        result = issued.result
        return {
            "instance": name,
            "done": done,
            "command": issued.number,
            "ok": result is not None and result.ok,
            "message": result.message if result is not None else "the instance has not answered yet",
            "document": views.plain(result.body) if result is not None else {},
        }

    # --- instances --------------------------------------------------------------------------------------------

    @routes.post("/v1/instances/{name}/drain", tags=["instances"])
    async def drain(name: Name, body: requests.Wait, response: Response) -> Body:
        """Send no peers to an instance from now on, and command it to lease nothing to peers.

        The order holds until the instance is undrained, also across restarts. If the instance does not live, the answer
        names no command, and the instance gets its command when it comes back.
        """
        return await ended(await operations.drain(name, True), body.wait_s, response)

    @routes.post("/v1/instances/{name}/undrain", tags=["instances"])
    async def undrain(name: Name, body: requests.Wait, response: Response) -> Body:
        """Use a drained instance as before. If it does not live, it gets its command when it comes back."""
        return await ended(await operations.drain(name, False), body.wait_s, response)

    @routes.post("/v1/instances/{name}/resync", tags=["instances"])
    async def resync(name: Name, body: requests.Wait, response: Response) -> Body:
        """Command an instance to begin a full sync."""
        issued = cluster.issue(operations.member(name), CommandKind.RESYNC, {"freeze_ms": 0})
        return await ended([issued], body.wait_s, response)

    @routes.delete("/v1/instances/{name}", tags=["instances"])
    async def remove(name: Name) -> Body:
        """Forget an instance and its chunks at once.

        A live instance goes on without the cluster, and may not join again until it is allowed. The id then belongs to
        no key any more: the next instance that registers under it gets it.
        """
        was = await operations.remove(name)
        return {"id": name, "was": was.value, "barred": name in cluster.orders.removed}

    @routes.post("/v1/instances/{name}/allow", tags=["instances"])
    async def allow(name: Name) -> dict[str, bool]:
        """Let a removed instance join again."""
        if not await cluster.orders.allow(name):
            raise HTTPException(404, f"name: {name!r:.80} was not removed")
        return {"allowed": True}

    @routes.get("/v1/instances/{name}/status", tags=["instances"])
    async def status(name: Name, response: Response, wait_s: WaitS = requests.DEFAULT_WAIT_S) -> Body:
        """The status document of an instance: pool, engine processes (workers), adapters, counters."""
        return await document(name, CommandKind.STATUS, {}, wait_s, response)

    @routes.get("/v1/instances/{name}/runtime", tags=["instances"])
    async def runtime(name: Name, response: Response, wait_s: WaitS = requests.DEFAULT_WAIT_S) -> Body:
        """Threads, memory, garbage collector, lag of the loop and allow-listed environment of an instance."""
        return await document(name, CommandKind.RUNTIME, {}, wait_s, response)

    # --- chunks -----------------------------------------------------------------------------------------------

    @routes.post("/v1/pin", tags=["chunks"])
    async def pin(body: requests.PinBody, response: Response) -> Body:
        """Keep chunks in the L1 of one instance for a while.

        The instance keeps all of these chunks that it has, or none; a pin that keeps none is not listed.
        """
        named = await operations.name(asked(body))
        made, issued, task = await operations.pin(named, body.instance, body.ttl_s)
        await asyncio.wait([task], timeout=body.wait_s)
        outcome = await ended(issued, 0.0, response)
        return {"claim": made.claim, **outcome}

    @routes.post("/v1/unpin", tags=["chunks"])
    async def unpin(body: requests.UnpinBody, response: Response) -> Body:
        """End a pin, which is listed until its instance has ended it."""
        issued, task = await operations.unpin(body.claim, body.instance)
        await asyncio.wait([task], timeout=body.wait_s)
        return await ended(issued, 0.0, response)

    async def copied(body: requests.CopyBody, response: Response, *, move: bool) -> Body:
        named = await operations.name(asked(body))
        issued, task = await operations.copy(named, body.to, body.source, move=move)
        await asyncio.wait([task], timeout=body.wait_s)
        return await ended(issued, 0.0, response)

    @routes.post("/v1/replicate", tags=["chunks"])
    async def replicate(body: requests.CopyBody, response: Response) -> Body:
        """Copy chunks from the L1 of one instance into that of another."""
        return await copied(body, response, move=False)

    @routes.post("/v1/move", tags=["chunks"])
    async def move(body: requests.CopyBody, response: Response) -> Body:
        """Copy chunks into the L1 of another instance, and drop them at the source once all have arrived."""
        return await copied(body, response, move=True)

    @routes.post("/v1/clear", tags=["chunks"])
    async def clear(body: requests.ClearBody, response: Response) -> Body:
        """Drop chunks of all tenants or of one. Bytes in use become free when their use ends."""
        return await ended(operations.clear(body.tier, body.tenant, body.instances), body.wait_s, response)

    @routes.post("/v1/evict", tags=["chunks"])
    async def evict(body: requests.EvictBody, response: Response) -> Body:
        """Drop chunks from L1."""
        issued = await operations.evict_chunks(await operations.name(asked(body)), body.instances)
        return await ended(issued, body.wait_s, response)

    return routes
