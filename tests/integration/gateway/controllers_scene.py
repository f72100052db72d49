"""Two engines, their servers, a controller and a gateway that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster, key_files
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async

COMPLETIONS = "/v1/completions"
CHUNKS = 64
TOKENS = CHUNKS * CHUNK_TOKENS
TOKENS_S = 2_000
"""Rate at which the engines seem to compute: so slow that a stall of 100 ms moves the measured rate little."""
DEADLINE_MS = 1_000
"""A busy machine may not let a controller answer within 2 ms."""


async def answers(got: Got, line: Line) -> None:
    tokens = len(got.document["prompt"])
    await asyncio.sleep(tokens / TOKENS_S)
    details = {"cached_tokens": 0}
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": details}
    await line.answer({"id": "x", "choices": [{"text": "a"}], "usage": usage})


class Scene:
    """Two engines, each attached to a server of its own, a controller that knows both servers, and a gateway."""

    def __init__(self, cluster: Cluster, engines: list[ScriptedEngine], caches: list[CacheEngine]) -> None:
        self.cluster, self.engines, self.caches = cluster, engines, caches
        self.gateway: GatewayProcess
        self.session: aiohttp.ClientSession
        self.seeds: dict[int, set[int]] = {}
        """Of the prompts that were stored, by server."""

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.cluster.controller.ports['reply']}"

    async def store(self, number: int, seed: int) -> list[int]:
        """Store a prompt at a server; returns it once the controller knows of it."""
        tokens = prompt(CHUNKS, seed)
        cache = self.caches[number]
        await asyncio.to_thread(
            eventually, "the prompt is stored", lambda: set(cache.stored(tokens)) <= {"stored", "present"}
        )
        self.seeds.setdefault(number, set()).add(seed)
        await asyncio.to_thread(self.cluster.until_known, number)
        return tokens

    async def page(self) -> dict[str, Any]:
        rows = (await self.gateway.status(self.session))["controllers"]
        return dict(rows[0]) if rows else {"connected": False}

    async def until_told(self, count: int = 2) -> None:
        """Wait until the gateway knows all instances and their engines."""

        async def told() -> bool:
            row = await self.page()
            return bool(row["connected"] and row["asks"] and row["engines"] == count == row["instances"])

        await eventually_async("the gateway knows the instances", told)

    async def only_in_l2(self, number: int) -> None:
        """Drop what a server has in L1, once its L2 has it."""
        controller = self.cluster.controller

        def in_l2() -> bool:
            row = self.cluster.member(number)
            wanted = CHUNKS * len(self.seeds[number])
            return row is not None and sum(row["keys"].values()) - row["keys"]["l1"] >= wanted

        await asyncio.to_thread(eventually, "the chunks are in L2", in_l2)
        body = {"tier": "l1", "instances": [f"instance-{number}"], "wait_s": 10}
        await asyncio.to_thread(controller.ask, "/v1/clear", body)
        await asyncio.to_thread(
            eventually, "the controller knows L1 is empty", lambda: not self.cluster.known(number)
        )

    async def reloaded(self) -> None:
        self.gateway.write()
        self.gateway.signal(signal.SIGHUP)

    async def send(self, tokens: list[int], word: str = "", **more: Any) -> None:
        body = {"model": "m", "prompt": tokens, "max_tokens": 1, **more}
        headers = {"X-Request-ID": word} if word else {}
        async with self.session.post(self.gateway.url + COMPLETIONS, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()

    async def decided(self, tokens: list[int], word: str, **more: Any) -> dict[str, Any]:
        await self.send(tokens, word, **more)
        operators = {"Authorization": f"Bearer {self.gateway.token}"}
        path = f"{self.gateway.url}/gateway/decisions/{word}"
        async with self.session.get(path, headers=operators, raise_for_status=True) as response:
            return dict(await response.json())

    async def l1_latencies(self, tokens: list[int], word: str) -> list[float]:
        """The latency that the gateway takes a load from L1 to have, by engine."""
        engines = (await self.decided(tokens, word))["record"]["engines"]
        paths = {one["name"]: one["paths"]["l1"] for one in engines}
        return [paths[engine.name].get("latency_s", 0.0) for engine in self.engines]

    async def known(self, tokens: list[int], word: str, **more: Any) -> set[tuple[str, str, int, str]]:
        """What the gateway knew of a prompt by its controller: engine, tier, tokens, source."""
        copies = (await self.decided(tokens, word, **more))["record"]["knowledge"].get("copies", [])
        return {
            (one.get("engine", ""), one["tier"], one["tokens"], one.get("source", ""))
            for one in copies
            if one["tier"] != "l0"
        }


@contextlib.asynccontextmanager
async def opened(folder: Path, kind: str = "none", n_servers: int = 2) -> AsyncIterator[Scene]:
    """A scene. `kind`: `keys` for key files, `fs` for an L2 at each server, `shared` for one of both."""
    l2, more, keys = kind, dict[str, Any](), dict[str, str]()
    if kind == "shared":
        entry = {"type": "fs", "base_path": str(folder / "shared"), "shared": True, "capacity_gb": 1}
        l2, more = "embedded", {"flags": ("--l2-adapter", json.dumps(entry))}
    if kind == "keys":
        controllers, members = key_files(folder)
        l2, keys = "none", {"curve_file": str(members)}
        more["flags"] = ("--cluster-curve-file", str(members))
        more["controller_flags"] = ("--curve-secret-file", str(controllers), "--heartbeat-s", "1")
    async with contextlib.AsyncExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(folder, l1_mb=64, n_servers=n_servers, chunk_tokens=CHUNK_TOKENS, l2=l2, **more)
        )
        engines, caches = [], []
        for number, server in enumerate(cluster.servers):
            engine = await stack.enter_async_context(
                ScriptedEngine("m", f"only-at-{number}", behaviour=answers)
            )
            settings = {"engine_url": engine.url}
            cache = CacheEngine(server.socket_dir, block_bytes=1024, num_blocks=4096, settings=settings)
            stack.enter_context(cache)
            engines.append(engine)
            caches.append(await asyncio.to_thread(cache.connect))
        made = Scene(cluster, engines, caches)
        made.session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60))
        )
        made.gateway = GatewayProcess(
            folder / "gateway",
            [one.url for one in engines],
            policy="ttft",
            controllers={"urls": [made.url], "deadline_ms": DEADLINE_MS, "name": "gw", **keys},
            picker={"listen": "127.0.0.1:0"},
        )
        await asyncio.to_thread(made.gateway.start)
        stack.callback(made.gateway.kill)
        await made.until_told(n_servers)
        yield made
