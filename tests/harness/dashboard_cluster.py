"""A stand-in for a cluster, for tests of the dashboard: serves the controller's HTTP API with bodies that a test fills.

So a test can show states that a real cluster reaches only after hours, or never on one machine: forty instances,
hostile names, a frozen report, a stream that a proxy swallows.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvstrata.controller.feed import Feed, State
from kvstrata.controller.routes import bodies, requests
from kvstrata.controller.routes.dashboard import add_dashboard

GIB = 1 << 30
CHUNK_TOKENS = 256
CHUNK_BYTES = 4 << 20
KEPT_S = 3_600
LOOK_S = 0.2


def now_ms() -> int:
    """Return Unix milliseconds."""
    return int(time.time() * 1000)


def gateway(name: str, **changes: Any) -> bodies.GatewayBody:
    """Make a gateway that asks the controller."""
    fields: dict[str, Any] = {
        "name": name,
        "host": "10.0.0.9",
        "port": 8090,
        "version": "0.1.0",
        "policy": "ttft",
        "engines": 4,
        "engines_up": 3,
        "in_flight": 17,
        "requests_total": 12_345,
        "heard_ago_s": 1.2,
    }
    return bodies.GatewayBody(**{**fields, **changes})


def instance(name: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    """Make the fields of a `bodies.InstanceRow` as after some hours of work; `number` varies the figures."""
    chance = random.Random(number)
    keys = {"l1": chance.randint(2_000, 15_000), "disk-0": chance.randint(30_000, 50_000)}
    return {
        "id": name,
        "state": "live",
        "reported_state": "ready",
        "draining": False,
        "confirmed": True,
        "incarnation": str(1_763_700_000_000 + number),
        "version": "0.1.0",
        "host": f"node-{number:02}.example.net",
        "pid": 4_000 + number,
        "zone": "abc"[number % 3],
        "http_url": f"http://node-{number:02}.example.net:8080",
        "peer_endpoint": f"tcp://node-{number:02}.example.net:5600",
        "tiers": list(keys),
        "chunk_tokens": CHUNK_TOKENS,
        "l1_bytes": 64 * GIB,
        "heard_ago_s": chance.random() * 9.9,
        "joined_ago_s": 7_200.0,
        "keys": keys,
        "used_bytes": {tier: count * CHUNK_BYTES for tier, count in keys.items()},
        "capacity_bytes": {"l1": 64 * GIB, "disk-0": 200 * GIB},
        "hits_total": {"l1": 812_000 + number, "l2": 91_000, "peer": 44_000, "miss": 260_000},
        "peer_leased_bytes": 12 * CHUNK_BYTES * number,
        "peer_sent_bytes_total": chance.randint(1, 900) * GIB // 7,
        "peer_read_bytes_total": chance.randint(1, 900) * GIB // 9,
        "sessions": 2,
        "engines": ["http://10.0.0.1:8000"],
        "sync": {"state": "exact", "count": 2, "last_took_s": 0.081, "last_ended_ago_s": 6_100.0},
        "event_batches": 48_120 + number,
        "last_event": 48_120 + number,
        "waiting_commands": 0,
        **changes,
    }


class Cluster:
    """The state that the API reports. A test may change every field at any time."""

    def __init__(self, *instances: dict[str, Any]) -> None:
        self.instances = {one["id"]: one for one in instances}
        self.removed: list[str] = []
        self.started_ms = now_ms()
        self.asked_every_s = 5
        self.gateways: list[bodies.GatewayBody] = []
        self.events: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, Any]] = []
        """(method, path, body) of each request that was not a GET."""
        self.streams = True
        self.models = ["meta-llama/Llama-3.1-8B-Instruct"]
        self.lookup: dict[str, Any] = {}
        self.explained: dict[str, dict[str, Any]] = {}
        """Explanations that one of the instances remembers, by request id."""
        self.misses: list[dict[str, Any]] = []
        self.silent: list[str] = []
        """Instances that do not answer questions about a chunk or a request."""
        self.slow_commands = False
        self.election = bodies.ElectionBody(
            leads=True,
            leader="controller-0",
            leader_url="",
            token=0,
            cluster_id=0,
            members=["controller-0"],
            no_leader_s=0.0,
            problem="",
        )

    def tell(self, kind: str, name: str = "", **facts: Any) -> None:
        """Add an event."""
        number = len(self.events) + 1
        self.events.append(
            {"number": number, "unix_ms": now_ms(), "kind": kind, "instance": name, "facts": facts}
        )

    def tail(self, after: int | None, limit: int) -> bodies.EventsBody:
        """Return at most `limit` events after number `after`, or the last ones if that is None."""
        found = self.events[-limit:] if after is None else self.events[after : after + limit]
        last = found[-1]["number"] if found else after if after is not None else len(self.events)
        return bodies.EventsBody(events=found, next_after=last, lost=False)

    def members(self) -> bodies.InstancesBody:
        """Return the body about all instances."""
        rows = [self.instances[name] for name in sorted(self.instances)]
        return bodies.InstancesBody(instances=rows, drained=[], removed=self.removed)

    def state(self) -> State:
        """Return the state that the live feed sends."""
        rows = {}
        for name, one in self.instances.items():
            ended_s = one["sync"].get("last_ended_ago_s")
            times = {
                "heard_unix_ms": self._at(one["heard_ago_s"]),
                "joined_unix_ms": self._at(one["joined_ago_s"]),
            }
            sync = {**one["sync"], "last_ended_unix_ms": None if ended_s is None else self._at(ended_s)}
            rows[name] = bodies.LiveRow.model_validate({**one, **times, "sync": sync}).model_dump()
        whole = self.whole().model_dump(mode="json")
        return State(whole, rows, {"drained": [], "removed": list(self.removed)}, len(self.events))

    def _at(self, ago_s: float) -> int:
        return self.started_ms - int(1000 * ago_s)

    def tiers(self) -> bodies.TiersBody:
        """Return the body about all tiers, summed up from the instances."""
        rows, sums = [], dict[str, bodies.TierSum]()
        for one in self.members().instances:
            for tier in one.tiers if one.state != "dead" else ():
                numbers = {
                    "keys": one.keys[tier],
                    "used_bytes": one.used_bytes[tier],
                    "capacity_bytes": one.capacity_bytes[tier],
                }
                rows.append(bodies.TierRow(instance=one.id, tier=tier, confirmed=one.confirmed, **numbers))
                found = sums.setdefault(
                    tier, bodies.TierSum(tier=tier, instances=0, keys=0, used_bytes=0, capacity_bytes=0)
                )
                found.instances += 1
                for name, value in numbers.items():
                    setattr(found, name, getattr(found, name) + value)
        return bodies.TiersBody(tiers=list(sums.values()), rows=rows)

    def whole(self) -> bodies.ClusterBody:
        """Return the body about the whole cluster."""
        members, tiers = self.members().instances, self.tiers().tiers
        placements = sum(tier.keys for tier in tiers)
        states = [one.state for one in members]
        return bodies.ClusterBody(
            name="controller-0",
            version="0.1.0",
            epoch=7,
            unix_ms=now_ms(),
            up_s=86_400.0,
            restarts=0,
            last_end="",
            ready=True,
            why_not_ready="",
            heartbeat_s=10.0,
            dead_after_s=30.0,
            instances={
                **{state: states.count(state) for state in ("live", "dead", "restored")},
                "draining": sum(one.draining for one in members),
                "unconfirmed": sum(one.state == "live" and not one.confirmed for one in members),
            },
            keys={tier.tier: tier.keys for tier in tiers},
            used_bytes={tier.tier: tier.used_bytes for tier in tiers},
            capacity_bytes={tier.tier: tier.capacity_bytes for tier in tiers},
            hits_total={"l1": 9_120_000, "l2": 812_000, "peer": 430_000, "miss": 2_100_000},
            directory=bodies.DirectoryBody(
                placements=placements,
                bytes=11 * placements + 65_536,
                max_bytes=4 * GIB,
                shared_tags=210,
                slots=2 * len(members),
                retired_slots=0,
                rebuilds=3,
                admitted_keys_total=9_100_000,
                evicted_keys_total=8_500_000,
                synced_keys_total=1_200_000,
                refused_keys_total=0,
                waiting_bytes=0,
            ),
            lookups=bodies.LookupsBody(
                total=9_120_443, hits_total=410_222, keys_total=88_000_000, mean_ms=0.031
            ),
            gateways=self.gateways,
            dropped_event_batches={},
            refused_requests={},
            sockets={},
            monitor_ports={"pull": 8300, "reply": 8400, "heartbeat": 8082},
            snapshot={
                "path": "/var/lib/kvstrata/directory.snapshot",
                "written_unix_ms": now_ms() - 12_000,
                "written_bytes": 4_400_000,
                "ignored_reason": "",
            },
            election=self.election,
            last_event=len(self.events),
        )

    def series(self, after_unix_ms: int) -> bodies.SeriesBody:
        """Return the points after this time: a smooth wave, with a burst of misses every ten minutes."""
        newest = now_ms() // 5_000 * 5
        tiers = self.tiers().tiers
        points = []
        for at in range(newest - KEPT_S + 5, newest + 5, 5):
            if at * 1000 <= after_unix_ms:
                continue
            wave, noise = math.sin(at / 90) + 0.3 * math.sin(at / 11), random.Random(at).random()
            burst = math.exp(-(((at % 600) - 300) ** 2) / 900)
            grown = 1 - 0.1 * (newest - at) / KEPT_S
            points.append(
                bodies.PointBody(
                    unix_ms=at * 1000,
                    live=len(self.instances),
                    dead=0,
                    keys={tier.tier: int(tier.keys * grown) for tier in tiers},
                    used_bytes={tier.tier: int(tier.used_bytes * grown) for tier in tiers},
                    hits_per_s={}
                    if at % self.asked_every_s
                    else {
                        "l1": 620 + 140 * wave + 30 * noise,
                        "l2": 120 + 40 * wave + 20 * noise,
                        "peer": 90 - 30 * wave + 25 * noise,
                        "miss": 110 + 40 * noise + 420 * burst,
                    },
                    event_keys_per_s=2_400 + 900 * wave + 500 * noise + 3_000 * burst,
                    sync_keys_per_s=12_000.0 if at % 900 < 10 else 0.0,
                    lookups_per_s=48 + 12 * wave + 6 * noise,
                    directory_bytes=4_400_000,
                )
            )
        return bodies.SeriesBody(sample_s=5.0, points=points)


def make_app(cluster: Cluster) -> FastAPI:
    """Make the app: the API over these documents, and the real dashboard."""
    app = FastAPI()
    registry = CollectorRegistry()
    Counter("kvstrata_controller_events", "Keys that instances told of.", registry=registry).inc(12_884_231)
    states = Gauge("kvstrata_controller_instances", "Instances by state.", ["state"], registry=registry)
    for state in ("live", "dead"):
        states.labels(state).set(sum(one["state"] == state for one in cluster.instances.values()))
    Gauge("kvstrata_controller_registry_bytes", "Memory of the directory.", registry=registry).set(4_400_000)
    answered = Histogram(
        "kvstrata_controller_lookup_seconds", "Time to answer a lookup.", ["source"], registry=registry,
        buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    )  # fmt: skip
    for number in range(500):
        answered.labels("zmq").observe(0.0001 + (number % 40) * 0.00003)

    @app.middleware("http")
    async def guard(request: Request, handle: Any) -> Response:
        if request.method != "GET":
            body = await request.body()
            cluster.requests.append((request.method, request.url.path, json.loads(body) if body else None))
        answer: Response = await handle(request)
        return answer

    @app.exception_handler(StarletteHTTPException)
    async def failed(_: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"code": "not_found", "message": error.detail, "field": ""}, error.status_code)

    def one(name: str) -> dict[str, Any]:
        if name not in cluster.instances:
            raise HTTPException(404, f"instance: there is no {name!r:.80}")
        return cluster.instances[name]

    def row(name: str, kind: str, state: str, message: str = "", **result: Any) -> dict[str, Any]:
        return {"number": 41, "instance": name, "kind": kind, "state": state, "message": message, "age_s": 0.1,
                "argument": {}, "result": result}  # fmt: skip

    def ended(name: str, kind: str) -> Response:
        rows = [row(name, kind, "sent" if cluster.slow_commands else "done")]
        body = bodies.CommandsBody.model_validate({"done": not cluster.slow_commands, "commands": rows})
        return JSONResponse(body.model_dump(), 202 if cluster.slow_commands else 200)

    def document(name: str, content: dict[str, Any]) -> bodies.DocumentBody:
        return bodies.DocumentBody(
            instance=one(name)["id"], done=True, command=1, ok=True, message="", document=content
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain")

    @app.get("/v1/cluster")
    async def whole() -> bodies.ClusterBody:
        return cluster.whole()

    @app.get("/v1/series")
    async def series(after_unix_ms: int = 0) -> bodies.SeriesBody:
        return cluster.series(after_unix_ms)

    @app.get("/v1/instances")
    async def instances() -> bodies.InstancesBody:
        return cluster.members()

    @app.get("/v1/models")
    async def models() -> bodies.ModelsBody:
        layout = {
            "revision": "0e9e39f249a16976918f6564b8830bc894c89659",
            "kv_dtype": "bfloat16",
            "chunk_tokens": 256,
        }
        rows = [
            {
                "kind": kind,
                "layout": {**layout, "model": model},
                "slices": 2,
                "instances": list(cluster.instances),
            }
            for kind, model in enumerate(cluster.models)
        ]
        return bodies.ModelsBody.model_validate({"models": rows})

    @app.get("/v1/instances/{name}/status")
    async def status(name: str) -> bodies.DocumentBody:
        peers = [
            {"session": f"{number:02x}" * 16, "group": "ab" * 16, "role": role, "pid": 5_000 + number, "row": number,
             "detached": False, "model": cluster.models[0], "complete": True}
            for number, role in enumerate(["scheduler", "worker"])
        ]  # fmt: skip
        return document(name, {"peers": peers})

    @app.get("/v1/instances/{name}/runtime")
    async def runtime(name: str) -> bodies.DocumentBody:
        content = {
            "pid": 4_011,
            "threads": 19,
            "python_threads": ["MainThread", "lane-load-0"],
            "rss_bytes": 182 << 20,
            "gc_count": [12, 3, 1],
            "gc_collections": [1_288, 117, 9],
            "gc_frozen": 91_202,
            "loop_lag_ms": 0.21,
            "tasks": 31,
            "open_files": 64,
            "environment": {
                "KVSTRATA_L1_SIZE_GB": "64",
                "KVSTRATA_HTTP_TOKEN": "(masked)",
                "OMP_NUM_THREADS": "4",
            },
        }
        return document(name, content)

    @app.post("/v1/instances/{name}/{what}")
    async def act(name: str, what: str) -> Response:
        if what == "allow":
            cluster.removed.remove(name)
            return JSONResponse({"allowed": True})
        if what in ("drain", "undrain"):
            one(name)["draining"] = what == "drain"
        cluster.tell(what, name)
        return ended(name, what)

    @app.get("/v1/commands/{number}")
    async def command(number: int) -> bodies.CommandRow:
        return bodies.CommandRow.model_validate(row("a-0", "drain", "done"))

    @app.delete("/v1/instances/{name}")
    async def remove(name: str) -> bodies.RemovedBody:
        was = one(name)["state"]
        del cluster.instances[name]
        if was != "dead":
            cluster.removed.append(name)
        cluster.tell("removed", name)
        return bodies.RemovedBody(id=name, was=was, barred=was != "dead")

    @app.get("/v1/tiers")
    async def tiers() -> bodies.TiersBody:
        return cluster.tiers()

    @app.post("/v1/explain")
    async def explain(body: requests.ExplainBody) -> bodies.ExplainedBody:
        live = sorted(name for name, row in cluster.instances.items() if row["state"] == "live")
        known = cluster.explained.get(body.request_id or "")
        there = [{"instance": live[0], "document": known, "missing_now": []}] if known else []
        return bodies.ExplainedBody.model_validate(
            {
                "lookups": there,
                "placement": None if body.request_id else cluster.lookup,
                "misses": [] if body.request_id else cluster.misses,
                "answered": [name for name in live if name not in cluster.silent],
                "unanswered": [{"instance": name, "why": "no answer within 5 s"} for name in cluster.silent],
            }
        )

    @app.get("/v1/events")
    async def tail(after: int | None = None, limit: int = 200) -> bodies.EventsBody:
        return cluster.tail(after, limit)

    feed = Feed(
        time.time_ns(), time.monotonic, cluster.state, lambda number: cluster.events[number:], look_s=LOOK_S
    )

    @app.get("/v1/live")
    async def live(after: str = "") -> Response:
        if not cluster.streams:
            raise HTTPException(404, "no stream here")

        async def told(number: int) -> AsyncIterator[bytes]:
            while True:
                feed.look()
                while change := feed.after(number):
                    number = change.number
                    yield b"event: change\ndata: %b\n\n" % change.body
                await asyncio.sleep(feed.due_s())

        return StreamingResponse(
            told(feed.number_of(after)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    @app.get("/v1/changes")
    async def changes(after: str = "") -> Response:
        feed.look()
        number, found = feed.number_of(after), list[bytes]()
        while change := feed.after(number):
            number = change.number
            found.append(change.body)
        return Response(b'{"changes":[%b]}' % b",".join(found), media_type="application/json")

    add_dashboard(app)
    return app


@asynccontextmanager
async def served(cluster: Cluster, port: int = 0) -> AsyncIterator[str]:
    """Serve the dashboard on this loop until the end of the block, on `port` if given; yield its URL."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        config = uvicorn.Config(
            make_app(cluster), log_level="critical", lifespan="off", timeout_graceful_shutdown=0
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
        task = asyncio.create_task(server._serve([listener]))
        try:
            while not server.started:
                if task.done():
                    await task
                await asyncio.sleep(0)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            await task
