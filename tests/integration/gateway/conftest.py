"""Fixtures of the tests of a real gateway before scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine
from tests.harness.cluster import Cluster, key_files
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import ScriptedEngine
from tests.integration.gateway.controllers_scene import DEADLINE_MS, Scene, answers

Start = Callable[..., Awaitable[GatewayProcess]]


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without limits of its own."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as opened:
        yield opened


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with client() as opened:
        yield opened


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with starting(tmp_path) as starter:
        yield starter


@contextlib.asynccontextmanager
async def starting(folder: Path) -> AsyncIterator[Start]:
    """Starts engines that are not running yet, and a gateway with these settings before them, or before `urls`."""
    async with contextlib.AsyncExitStack() as stack:

        async def starter(
            *engines: ScriptedEngine, urls: Sequence[str] = (), **settings: Any
        ) -> GatewayProcess:
            for engine in engines:
                if not engine.port:
                    await stack.enter_async_context(engine)
            gateway = GatewayProcess(folder, urls or [engine.url for engine in engines], **settings)
            await asyncio.to_thread(gateway.start)
            stack.callback(gateway.kill)
            return gateway

        yield starter


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    l2, flags, more = getattr(request, "param", "none"), (), {}
    if l2 == "shared":
        entry = {"type": "fs", "base_path": str(tmp_path / "shared"), "shared": True, "capacity_gb": 1}
        l2, flags = "embedded", ("--l2-adapter", json.dumps(entry))
    if l2 == "keys":
        controllers, members = key_files(tmp_path)
        l2, flags = "none", ("--cluster-curve-file", str(members))
        more["controller_flags"] = ("--curve-secret-file", str(controllers), "--heartbeat-s", "1")
    with Cluster(tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS, l2=l2, flags=flags, **more) as made:
        yield made


@pytest.fixture
async def scene(cluster: Cluster, session: aiohttp.ClientSession, tmp_path: Path) -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            engines.append(await stack.enter_async_context(ScriptedEngine("m", behaviour=answers)))
        caches = []
        for engine, server in zip(engines, cluster.servers, strict=True):
            settings = {"engine_url": engine.url}
            cache = CacheEngine(server.socket_dir, block_bytes=1024, num_blocks=4096, settings=settings)
            stack.enter_context(cache)
            caches.append(await asyncio.to_thread(cache.connect))
        made = Scene(cluster, engines, caches)
        made.session = session
        members = tmp_path / "members.keys"
        keys = {"curve_file": str(members)} if members.exists() else {}
        made.gateway = GatewayProcess(
            tmp_path / "gateway",
            [one.url for one in engines],
            policy="ttft",
            controllers={"urls": [made.url], "deadline_ms": DEADLINE_MS, "name": "gw", **keys},
            picker={"enabled": True, "port": 0},
        )
        await asyncio.to_thread(made.gateway.start)
        stack.callback(made.gateway.kill)
        await made.until_told()
        yield made
