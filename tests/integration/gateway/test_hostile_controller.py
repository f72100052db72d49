"""A gateway whose controller answers garbage, lies or errors: each request goes on, and is answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from kvstrata.rpc.cluster_fields import KvKind
from kvstrata.rpc.cluster_wire import REPLY_REQUESTS, Failure, encode
from kvstrata.rpc.gateway_wire import (
    GatewayBeat,
    GatewayHeard,
    Holding,
    Holdings,
    HoldingsReply,
    Served,
    TierRate,
)
from kvstrata.rpc.zmq_curve import OPEN
from kvstrata.rpc.zmq_server import Address, ZmqServer
from kvstrata.types import LayoutIdentity
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.waiting import eventually_async
from tests.integration.gateway.controllers_scene import COMPLETIONS, answers

pytestmark = pytest.mark.integration

Says = Callable[[Holdings], bytes | None]
LAYOUT = LayoutIdentity(model="m", kv_dtype="bfloat16", chunk_tokens=16)


class Liar:
    """Tells of two instances with one engine each, and answers questions about prompts as the test says."""

    def __init__(self, engines: list[ScriptedEngine]) -> None:
        self.engines = engines
        self.says: Says = lambda asked: encode(HoldingsReply(asked.seq, 1, []))
        self.kinds = [KvKind(LAYOUT, [b"s" * 32], [], 1 << 20)]
        self._server = ZmqServer(asyncio.get_running_loop())
        self.port = self._server.bind_tcp("127.0.0.1", 0, curve=OPEN, clients=lambda: None, insecure=True)
        self._server.start(self._on_frame, lambda _, __: b"")

    def _on_frame(self, address: Address, frame: bytes) -> None:
        asked = REPLY_REQUESTS.decode(frame)
        said: bytes | None = b""
        if isinstance(asked, GatewayBeat):
            rates = [TierRate("l2", 0, 1), TierRate("peer", 3_600_000_000, 1 << 50)]
            instances = [
                Served(f"i{n}", [0, 9], [one.url], True, True, rates) for n, one in enumerate(self.engines)
            ]
            said = encode(GatewayHeard(asked.seq, 1, 500, self.kinds, instances))
        elif isinstance(asked, Holdings):
            said = self.says(asked)
        if said is not None:
            self._server.send(address, said)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
async def liar() -> AsyncIterator[Liar]:
    engines = [ScriptedEngine("m", behaviour=answers) for _ in range(2)]
    for one in engines:
        await one.start()
    made = Liar(engines)
    yield made
    made.close()
    for one in engines:
        await one.stop()


ANSWERS: dict[str, tuple[Says, str]] = {
    "nothing": (lambda asked: None, "late"),
    "deep": (lambda asked: b"\x91" * 50_000, "late"),
    "another form": (
        lambda asked: msgspec.msgpack.encode(["holdings", asked.seq, 1, [["i0", -5, 1]]]),
        "late",
    ),
    "a refusal": (lambda asked: encode(Failure(asked.seq, 1, "internal", "no\n", "", True)), "failed"),
    "too much": (
        lambda asked: encode(HoldingsReply(asked.seq, 1, [Holding("i0", 1 << 62, 1 << 62, 1 << 62)] * 900)),
        "answered",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_whatever_a_controller_answers_requests_are_answered(liar, name, start, session, tmp_path):
    liar.says, outcome = ANSWERS[name]
    controllers = {"urls": [f"tcp://127.0.0.1:{liar.port}"], "insecure": True, "deadline_ms": 100}
    gateway = await start(urls=[one.url for one in liar.engines], policy="ttft", controllers=controllers)

    async def page() -> dict[str, Any]:
        (row,) = (await gateway.status(session))["controllers"]
        return dict(row)

    async def asks() -> bool:
        row = await page()
        return bool(row["asks"] and row["engines"] == 2)

    await eventually_async("the controller has told its instances", asks)
    numbers = itertools.count()

    async def counted() -> bool:
        """Send one more prompt. On a busy machine any answer may be late, so the outcome may need more of them."""
        n = next(numbers)
        body = {"model": "m", "prompt": list(range(n, n + 200)), "max_tokens": 1}
        async with session.post(gateway.url + COMPLETIONS, json=body) as response:
            assert response.status == 200, await response.text()
        counts = await page()
        assert counts[outcome] + counts["late"] * (outcome != "late") == counts["asked"], counts
        return bool(counts[outcome] >= 3)

    await eventually_async(f"three answers count as {outcome}", counted)
