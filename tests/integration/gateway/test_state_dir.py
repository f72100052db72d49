"""A gateway that is killed and started again knows which engine has which prefix; a damaged file only costs that."""

from __future__ import annotations

import asyncio
import contextlib
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvstrata.gateway.state_file import decoded, read_state
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.namespaces import small_disk, why_not
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


def fill(path: Path) -> None:
    """Write a file until there is no room left."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4_096))


@pytest.mark.skipif(bool(why_not()), reason=why_not())
async def test_a_full_disk_is_shown_until_there_is_room_and_ends_nothing(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    port, draw = free_port(), random.Random(7)
    engine = simulated(port)
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    gateway = GatewayProcess(tmp_path, [f"http://127.0.0.1:{port}"], policy="ttft", state_dir=str(folder))
    gateway.within = small_disk(folder)

    async def state() -> dict[str, Any]:
        return dict((await gateway.status(session))["state"])

    async def ask() -> None:
        await cached(gateway, session, "".join(draw.choices(string.ascii_lowercase + " ", k=12_000)))

    try:
        await asyncio.to_thread(gateway.start)
        await gateway.until_sample(session, f'engine_up{{engine="127.0.0.1:{port}"}}', 1)
        seen = Path(f"/proc/{gateway.ready['pid']}/root") / folder.relative_to("/")
        await ask()

        async def saved() -> bool:
            return (await state())["saves"] > 0

        await eventually_async("the state is saved", saved)
        fill(seen / "filler")

        async def full() -> bool:
            await ask()
            return "No space left" in (await state())["error"]

        await eventually_async("the full disk is shown", full)
        await gateway.until_sample(session, "state_unsaved", 1)
        assert sorted(path.name for path in seen.iterdir()) == ["filler", "gateway.lock", "gateway.state"]
        (seen / "filler").unlink()
        # Nothing changes any more, and it is saved all the same.
        await gateway.until_sample(session, "state_unsaved", 0)
        assert not (await state())["error"]
        log = gateway.log.read_text()
        assert "state_not_saved" in log and "state_saved_again" in log
        assert decoded((seen / "gateway.state").read_bytes()).rates
    finally:
        gateway.kill()
        engine.kill()
        engine.wait()
