"""A real Envoy before scripted engines, asking a real picker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.harness import envoy as envoy_program
from tests.harness.envoy import Envoy
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine, chat, delta
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start
from tests.tools import fetch_wheels

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
PICKED = "x-gateway-destination-endpoint"


def ask(content: str = "hello", **more: Any) -> dict[str, Any]:
    """The body of a streamed chat completion."""
    return {"model": "m", "messages": [{"role": "user", "content": content}], "stream": True, **more}


class Scene(NamedTuple):
    """Everything between a client and the engines."""

    engines: list[ScriptedEngine]
    picker: GatewayProcess
    envoy: Envoy

    @property
    def got(self) -> list[list[Got]]:
        """Requests of each engine, those of the start left out."""
        return [[one for one in engine.got if one.target != "/health"] for engine in self.engines]


@pytest.fixture
async def scene(start: Start, tmp_path: Path) -> AsyncIterator[Scene]:
    """Two engines, a picker with the policy `ttft`, and Envoy."""
    try:
        envoy_program.program()
    except fetch_wheels.Unavailable as error:
        pytest.skip(str(error))
    engines = [ScriptedEngine(), ScriptedEngine()]
    picker = await start(*engines, policy="ttft", picker={"enabled": True, "port": 0})
    async with Envoy(tmp_path, picker.ready["picker_port"], [one.port for one in engines]) as envoy:
        yield Scene(engines, picker, envoy)


async def is_idle(scene: Scene, session: aiohttp.ClientSession) -> None:
    """Wait until the picker holds nothing of any request."""

    async def zero() -> bool:
        page = await scene.picker.status(session)
        return page["gateway"]["in_flight"] == 0 and not any(one["in_flight"] for one in page["engines"])

    await eventually_async("the picker's counts are zero", zero)


async def test_a_stream_passes_and_the_conversation_keeps_its_engine(
    scene: Scene, session: aiohttp.ClientSession
) -> None:
    history = "x" * 20_000
    for turn in range(4):
        history += f"turn {turn} " + "y" * 2_000
        async with session.post(scene.envoy.url + CHAT, json=ask(history)) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
    mine, other = sorted(scene.got, key=len, reverse=True)
    assert (len(mine), len(other)) == (4, 0)
    assert mine[-1].document == ask(history)
    chosen = next(one for one in scene.engines if one.got and one.got[-1] is mine[-1])
    assert mine[-1].headers[PICKED] == chosen.name
    await is_idle(scene, session)
