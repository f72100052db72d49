"""A cluster for the dashboard's eyes: the controller's HTTP API over documents that a test changes as it likes.

It lets a test show what a real cluster shows only after hours, or never on one machine: forty instances, hostile names,
a failed sync, a stream that a proxy swallows.  What the documents look like is docs/controller-api.md.
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

from kvstrata.controller.routes.dashboard import add_dashboard

GIB = 1 << 30
CHUNK_TOKENS = 256
CHUNK_BYTES = 4 << 20
KEPT_S = 900


def now_ms() -> int:
    return int(time.time() * 1000)


def instance(name: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    """An instance as it is after some hours of work; `number` varies its figures."""
    chance = random.Random(number)
    l1_keys, disk_keys = chance.randint(2_000, 15_000), chance.randint(30_000, 50_000)
    return {
        "instance": name,
        "incarnation": 1_763_700_000_000 + number,
        "state": "ready",
        "zone": "abc"[number % 3],
        "host": f"node-{number:02}.example.net",
        "pid": 4_000 + number,
        "version": "0.1.0",
        "http_url": f"http://node-{number:02}.example.net:8080",
        "peer_endpoint": f"tcp://node-{number:02}.example.net:5600",
        "tiers": {
            "l1": {"keys": l1_keys, "used_bytes": l1_keys * CHUNK_BYTES, "capacity_bytes": 64 * GIB},
            "disk-0": {"keys": disk_keys, "used_bytes": disk_keys * CHUNK_BYTES, "capacity_bytes": 200 * GIB},
        },
        "hits_total": {"l1": 812_000 + number, "l2": 91_000, "peer": 44_000, "miss": 260_000},
        "hit_rate": 0.6 + chance.random() * 0.3,
        "peer_leased_bytes": 12 * CHUNK_BYTES * number,
        "peer_sent_bytes_total": chance.randint(1, 900) * GIB // 7,
        "peer_read_bytes_total": chance.randint(1, 900) * GIB // 9,
        "sessions": 2,
        "chunk_tokens": CHUNK_TOKENS,
        "models": [
            {
                "model": "meta-llama/Llama-3.1-8B-Instruct",
                "revision": "0e9e39f249a16976918f6564b8830bc894c89659",
                "dtype": "bfloat16",
                "slices": 2,
                "chunk_tokens": CHUNK_TOKENS,
            }
        ],
        "registered_ms": now_ms() - 7_200_000,
        "heartbeat_age_ms": chance.randint(0, 9_900),
        "last_event": 481_220 + number,
        "events_behind": 0,
        "sync": None,
        "commands_waiting": 0,
        **changes,
    }


class Cluster:
    """What the API tells. Every field may be changed at any time; `requests` are those of methods other than GET."""

    def __init__(self, *instances: dict[str, Any], token: str = "") -> None:
        self.instances = {one["instance"]: one for one in instances}
        self.token = token
        self.events: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.streams = True
        self.lookup: dict[str, Any] = {
            "chunk_tokens": CHUNK_TOKENS,
            "chunks": [],
            "best": [],
            "missing": None,
        }
        self.explained: dict[str, Any] = {}
        self.slow_commands = False
        self._changed = asyncio.Event()
        self._started_ms = now_ms() - 86_400_000

    def tell(self, kind: str, name: str, message: str) -> None:
        """Something happened."""
        cursor = len(self.events) + 1
        self.events.append(
            {"cursor": cursor, "ms": now_ms(), "kind": kind, "instance": name, "message": message}
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def document(self) -> dict[str, Any]:
        """/v1/cluster."""
        states = [one["state"] for one in self.instances.values()]
        counted = {
            name: states.count(name) for name in ("syncing", "frozen", "draining", "unconfirmed", "dead")
        }
        tiers = self.tiers()
        return {
            "controller": {
                "id": "controller-0",
                "version": "0.1.0",
                "epoch": 7,
                "pid": 812,
                "uptime_s": (now_ms() - self._started_ms) / 1000,
                "started_ms": self._started_ms,
                "monitor_ports": {"pull": 8300, "reply": 8400, "heartbeat": 8082},
            },
            "instances": {"live": len(states) - counted["dead"] - counted["unconfirmed"], **counted},
            "keys": {tier["tier"]: tier["keys"] for tier in tiers},
            "bytes": {
                tier["tier"]: {"used": tier["used_bytes"], "capacity": tier["capacity_bytes"]}
                for tier in tiers
            },
            "registry": {
                "placements": sum(tier["keys"] for tier in tiers),
                "bytes": 11 * sum(tier["keys"] for tier in tiers) + 65_536,
                "slots_used": 2 * len(states),
                "slots_free": 65_535 - 2 * len(states),
                "slots_sweeping": 0,
            },
            "events": {
                "keys_total": 12_884_231,
                "batches_total": 402_133,
                "gaps_total": 1,
                "rejected_total": 0,
            },
            "lookups_total": 9_120_443,
            "snapshot": {
                "path": "/var/lib/kvstrata/controller.snapshot",
                "last_ms": now_ms() - 12_000,
                "placements": 391_000,
                "state": "written",
                "ignored_total": 0,
            },
        }

    def tiers(self) -> list[dict[str, Any]]:
        """/v1/tiers."""
        found: dict[str, dict[str, Any]] = {}
        for one in self.instances.values():
            for name, tier in one["tiers"].items():
                row = found.setdefault(
                    name, {"tier": name, "instances": 0, "keys": 0, "used_bytes": 0, "capacity_bytes": 0}
                )
                row["instances"] += 1
                for number in ("keys", "used_bytes", "capacity_bytes"):
                    row[number] += tier[number]
        return [found[name] for name in sorted(found)]

    def series(self, seconds: int) -> dict[str, Any]:
        """/v1/series: a day's wave, with a burst of misses in the middle."""
        newest = now_ms() // 1000
        times = list(range(newest - min(seconds, KEPT_S) + 1, newest + 1))
        wave = [math.sin(at / 90) + 0.3 * math.sin(at / 11) for at in times]
        noise = [random.Random(at).random() for at in times]
        burst = [math.exp(-(((at % 600) - 300) ** 2) / 900) for at in times]
        tiers = {tier["tier"]: tier for tier in self.tiers()}
        grow = [1 - 0.1 * (newest - at) / KEPT_S for at in times]
        series = {
            "hits.l1": [620 + 140 * w + 30 * n for w, n in zip(wave, noise, strict=True)],
            "hits.l2": [120 + 40 * w + 20 * n for w, n in zip(wave, noise, strict=True)],
            "hits.peer": [90 - 30 * w + 25 * n for w, n in zip(wave, noise, strict=True)],
            "hits.miss": [110 + 40 * n + 420 * b for n, b in zip(noise, burst, strict=True)],
            "events": [
                2_400 + 900 * w + 500 * n + 3_000 * b for w, n, b in zip(wave, noise, burst, strict=True)
            ],
            "lookups": [48 + 12 * w + 6 * n for w, n in zip(wave, noise, strict=True)],
            "instances": [len(self.instances)] * len(times),
        }
        for name, tier in tiers.items():
            series[f"bytes.{name}"] = [int(tier["used_bytes"] * part) for part in grow]
            series[f"keys.{name}"] = [int(tier["keys"] * part) for part in grow]
        return {"step_s": 1, "times_ms": [at * 1000 for at in times], "series": series}


def make_app(cluster: Cluster) -> FastAPI:
    """The API over these documents, with the real dashboard."""
    app = FastAPI()
    registry = CollectorRegistry()
    Counter("kvstrata_controller_events", "Keys that instances told of.", registry=registry).inc(12_884_231)
    states = Gauge("kvstrata_controller_instances", "Instances by state.", ["state"], registry=registry)
    for state in ("ready", "syncing", "dead"):
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
        guarded = request.url.path.startswith(("/v1", "/metrics"))
        if guarded and cluster.token and request.headers.get("authorization") != f"Bearer {cluster.token}":
            return JSONResponse(
                {"code": "not_permitted", "message": "missing or wrong bearer token", "field": ""}, 401
            )
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
            raise HTTPException(404, f"instance: {name!r:.80} is not a member")
        return cluster.instances[name]

    def events(after: int | None, limit: int) -> dict[str, Any]:
        found = cluster.events[-limit:] if after is None else cluster.events[after : after + limit]
        return {"events": found, "cursor": len(cluster.events)}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain")

    @app.get("/v1/cluster")
    async def whole() -> dict[str, Any]:
        return cluster.document()

    @app.get("/v1/series")
    async def series(seconds: int = KEPT_S) -> dict[str, Any]:
        return cluster.series(seconds)

    @app.get("/v1/instances")
    async def instances() -> dict[str, Any]:
        return {"instances": [cluster.instances[name] for name in sorted(cluster.instances)]}

    @app.get("/v1/instances/{name}/workers")
    async def workers(name: str) -> dict[str, Any]:
        model = one(name)["models"][0]["model"] if one(name)["models"] else ""
        rows = [
            {"session": f"{number:02x}" * 16, "group": "ab" * 16, "role": role, "pid": 5_000 + number, "row": number,
             "detached": False, "model": model, "complete": True}
            for number, role in enumerate(["scheduler", "worker"] if model else [])
        ]  # fmt: skip
        return {"workers": rows, "age_ms": 1_200}

    @app.get("/v1/instances/{name}/runtime")
    async def runtime(name: str) -> dict[str, Any]:
        one(name)
        return {
            "threads": [
                {"name": "MainThread", "id": 4_011, "daemon": False, "cpu_s": 122.4, "stack": "uvloop.run"},
                {
                    "name": "lane-load-0",
                    "id": 4_016,
                    "daemon": True,
                    "cpu_s": 61.2,
                    "stack": "io_uring_enter",
                },
            ],
            "memory": {"rss_bytes": 182 << 20, "peak_rss_bytes": 210 << 20, "shared_bytes": 64 * GIB},
            "gc": {"enabled": True, "collections": 1_288, "uncollectable": 0, "tracked_objects": 91_202},
            "loop": {"lag_ms": 0.21, "lag_p99_ms": 1.7, "tasks": 31},
            "environment": {
                "KVSTRATA_L1_SIZE_GB": "64",
                "KVSTRATA_HTTP_TOKEN": "(masked)",
                "OMP_NUM_THREADS": "4",
            },
            "age_ms": 240,
        }

    @app.post("/v1/instances/{name}/drain")
    async def drain(name: str, body: dict[str, bool]) -> Response:
        one(name)["state"] = "draining" if body["on"] else "ready"
        cluster.tell("drained", name, "leases nothing to peers" if body["on"] else "serves peers again")
        if cluster.slow_commands:
            return JSONResponse({"commands": [41]}, 202)
        return JSONResponse({"results": [{"instance": name, "ok": True, "message": "", "body": {}}]})

    @app.get("/v1/commands/{number}")
    async def command(number: int) -> dict[str, Any]:
        return {
            "number": number,
            "instance": "a",
            "kind": "drain",
            "state": "done",
            "ok": True,
            "message": "",
            "body": {},
        }

    @app.delete("/v1/instances/{name}")
    async def remove(name: str) -> dict[str, str]:
        one(name)
        del cluster.instances[name]
        cluster.tell("removed", name, "removed by hand")
        return {"removed": name}

    @app.get("/v1/tiers")
    async def tiers() -> dict[str, Any]:
        return {"tiers": cluster.tiers()}

    @app.post("/v1/lookup")
    async def lookup() -> dict[str, Any]:
        return cluster.lookup

    @app.get("/v1/explain/{request_id:path}")
    async def explain(request_id: str) -> dict[str, Any]:
        if request_id not in cluster.explained:
            raise HTTPException(
                404, f"request_id: {request_id!r:.80} is not among the recent requests of any instance"
            )
        found: dict[str, Any] = cluster.explained[request_id]
        return found

    @app.get("/v1/events")
    async def tail(after: int | None = None, limit: int = 200) -> dict[str, Any]:
        return events(after, limit)

    @app.get("/v1/live")
    async def live() -> Response:
        if not cluster.streams:
            raise HTTPException(404, "no stream here")

        async def told() -> AsyncIterator[str]:
            cursor = len(cluster.events)
            while True:
                changed = cluster._changed
                rows = {"instances": [cluster.instances[name] for name in sorted(cluster.instances)]}
                for kind, document in (("cluster", cluster.document()), ("instances", rows)):
                    yield f"event: {kind}\ndata: {json.dumps(document)}\n\n"
                if len(cluster.events) > cursor:
                    yield f"event: events\ndata: {json.dumps(events(cursor, 1_000))}\n\n"
                    cursor = len(cluster.events)
                try:
                    await asyncio.wait_for(changed.wait(), 1.0)
                except TimeoutError:
                    pass

        return StreamingResponse(
            told(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    add_dashboard(app)
    return app


@asynccontextmanager
async def served(cluster: Cluster, port: int = 0) -> AsyncIterator[str]:
    """The address of its dashboard while it runs on this loop; `port`: one that it had before."""
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
