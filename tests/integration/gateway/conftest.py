"""Fixtures of the tests of a real gateway before scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import ScriptedEngine

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


async def status_of(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> int:
    """The status of an answer that is read to its end: one that is not may count as cancelled by the client."""
    async with request as response:
        await response.read()
        return response.status


async def at_rest(gateway: GatewayProcess, session: aiohttp.ClientSession) -> None:
    def nothing(status: dict[str, Any]) -> bool:
        of_engines = [engine["in_flight"] for engine in status["engines"]]
        return not any([*of_engines, status["gateway"]["in_flight"], *status["tenants"].values()])

    await gateway.until(session, "nothing is under way", nothing)


def folder_of(pid: int) -> Path:
    """Where an Envoy's configuration lies."""
    return Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[2]).parent


def resident_mb(pid: int) -> float:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


async def envoy_mb(gateway: GatewayProcess, session: aiohttp.ClientSession) -> float:
    """The most memory that the gateway and its Envoy have had."""
    status = await gateway.status(session)
    return resident_mb(gateway.pid) + resident_mb(status["envoy_pid"])
