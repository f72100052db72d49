"""A gateway asks a controller by all that decides a prompt's KV, and goes on whatever it answers."""

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
from kvstrata.types import LayoutIdentity, canonical_json
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.waiting import eventually_async
from tests.integration.gateway.controllers_scene import COMPLETIONS, TOKENS, Scene, answers

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

    def asks(status: dict[str, Any]) -> bool:
        (row,) = status["controllers"]
        return row["asks"] and row["engines"] == 2

    await gateway.until(session, "the controller has told its instances", asks)
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


def lora(name: str, content: str) -> str:
    """An adapter, as the connector for vLLM puts it into a request's identity."""
    return canonical_json([name, content]).decode()


async def holders(scene: Scene, tokens: list[int], word: str, **more: Any) -> set[tuple[str, str, int]]:
    """By what engine and tier how many tokens of a prompt are known; a peer's is every engine's."""
    return {one[:3] for one in await scene.known(tokens, word, **more) if one[1] != "peer"}


@pytest.mark.asyncio(loop_scope="module")
async def test_prompts_of_a_lora_adapter_are_looked_up_by_the_content_that_each_instance_has(scene):
    names, numbers = [one.name for one in scene.engines], itertools.count()
    for engine in scene.engines:
        engine.models.append("sql")
        engine.parents["sql"] = "m"
    # The same name stands for other files at each engine; what was stored under older files counts no more.
    stored = {}
    for number, content in ((0, "older"), (0, "newer"), (1, "other")):
        scene.caches[number].adapter = lora("sql", content)
        stored[content] = await scene.store(number, len(stored))
    for cache in scene.caches:
        cache.adapter = ""

    async def found(content: str, model: str) -> set[tuple[str, str, int]]:
        return await holders(scene, stored[content], f"{next(numbers)}", model=model)

    async def adapters_told() -> bool:
        return await found("newer", "sql") == {(names[0], "l1", TOKENS)}

    async def serves() -> bool:
        engines = (await scene.gateway.status(scene.session))["engines"]
        return all("sql" in engine["models"] for engine in engines)

    await eventually_async("both engines are known to serve the adapter", serves)
    await eventually_async("the gateway knows the adapters", adapters_told)
    assert await found("other", "sql") == {(names[1], "l1", TOKENS)}
    assert not await found("older", "sql") and not await found("newer", "m")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_is_looked_up_under_the_tenant_that_it_names(scene: Scene) -> None:
    scene.caches[1].tenant = "blue"
    tokens = await scene.store(1, 13)
    named = {"kv_transfer_params": {"kvstrata.tenant": "blue"}}
    assert await holders(scene, tokens, "blue", **named) == {(scene.engines[1].name, "l1", TOKENS)}
    others = {"kv_transfer_params": {"kvstrata.tenant": "red"}}
    assert not await holders(scene, tokens, "red", **others) and not await holders(scene, tokens, "none")
    scene.caches[1].tenant = ""


@pytest.mark.asyncio(loop_scope="module")
async def test_prompts_are_looked_up_under_the_weights_that_an_engine_has_now(scene: Scene) -> None:
    numbers = itertools.count()
    before = await scene.store(0, 11)
    scene.caches[0].adapter = canonical_json(["weights", "step 7", ""]).decode()
    after = await scene.store(0, 12)

    async def weights_told() -> bool:
        found = await holders(scene, after, f"after-{next(numbers)}")
        return found == {(scene.engines[0].name, "l1", TOKENS)}

    await eventually_async("the gateway knows the weights", weights_told)
    assert not await holders(scene, before, "before")
