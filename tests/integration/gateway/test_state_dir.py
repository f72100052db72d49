"""A gateway that is killed and started again knows which engine has which prefix; a damaged file only costs that."""

from __future__ import annotations

import asyncio
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvstrata.gateway.state_file import read_state
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.waiting import eventually_async
from tests.integration.gateway.test_proxy import CHAT

pytestmark = pytest.mark.integration


def simulated(port: int) -> subprocess.Popen[bytes]:
    """Start a simulated engine."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvstrata", "sim", "--port", str(port), "--model", "m", "--speed", "10"],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


async def cached(gateway: GatewayProcess, session: aiohttp.ClientSession, text: str) -> int:
    """Send a prompt; returns how many of its tokens its engine had cached."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    async with session.post(gateway.url + CHAT, json=body) as response:
        document = await response.json()
        assert response.status == 200, document
    return int((document["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


async def test_routing_is_warm_after_a_kill_and_cold_after_garbage(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    ports, draw = [free_port() for _ in range(3)], random.Random(7)
    engines = [simulated(port) for port in ports]
    file = tmp_path / "state" / "gateway.state"
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    gateway = GatewayProcess(tmp_path, urls, policy="ttft", state_dir=str(file.parent))

    async def all_up() -> bool:
        return all(row["state"] == "up" for row in (await gateway.status(session))["engines"])

    async def pieces() -> int:
        page: dict[str, Any] = (await gateway.status(session))["gateway"]
        return int(page["prefix_pieces"])

    try:
        await asyncio.to_thread(gateway.start)
        await eventually_async("all engines are up", all_up)
        prompts = ["".join(draw.choices(string.ascii_lowercase + " ", k=12_000)) for _ in range(6)]
        for prompt in prompts:
            assert await cached(gateway, session, prompt) == 0
        known = await pieces()

        async def saved() -> bool:
            state = read_state(file.parent)
            return state is not None and len(state.pieces) == known

        await eventually_async("the state is saved", saved)
        gateway.kill()
        await asyncio.to_thread(gateway.start)
        await eventually_async("all engines are up again", all_up)
        assert await pieces() == known > 0
        for prompt in prompts:
            assert await cached(gateway, session, prompt) > 0
        gateway.kill()
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        await asyncio.to_thread(gateway.start)
        assert await pieces() == 0
        assert "state_refused" in gateway.log.read_text() and "checksum" in gateway.log.read_text()
    finally:
        gateway.kill()
        for engine in engines:
            engine.kill()
            engine.wait()
