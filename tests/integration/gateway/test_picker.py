"""A real Envoy before scripted engines, asking a real picker."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.harness import envoy_program, tokenizer_folder
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine, delta
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start, status_of
from tests.integration.gateway.envoy import Envoy
from tests.integration.gateway.test_door import bearer, tenants
from tests.integration.gateway.test_kv_events import Sim, is_whole, operators

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
PICKED = "x-gateway-destination-endpoint"


def ask(content: str = "hello", **more: Any) -> dict[str, Any]:
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
async def scene(start: Start, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """Two engines, a picker with the policy `ttft`, and Envoy; a parameter is the picker's `probe_s`."""
    envoy_program.program()
    engines = [ScriptedEngine(), ScriptedEngine()]
    health = {"probe_s": getattr(request, "param", 0.1)}
    picker = await start(*engines, policy="ttft", picker={"listen": "127.0.0.1:0"}, health=health)
    async with Envoy(tmp_path, picker.ready["picker_port"], [one.port for one in engines]) as envoy:
        yield Scene(engines, picker, envoy)


async def is_idle(scene: Scene, session: aiohttp.ClientSession) -> None:
    def zero(page: dict[str, Any]) -> bool:
        return page["gateway"]["in_flight"] == 0 and not any(one["in_flight"] for one in page["engines"])

    await scene.picker.until(session, "the picker's counts are zero", zero)


async def test_a_stream_passes_and_the_conversation_keeps_its_engine(scene, session):
    history = "x" * 20_000
    for turn in range(4):
        history += f"turn {turn} " + "y" * 2_000
        async with session.post(scene.envoy.url + CHAT, json=ask(history)) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await is_idle(scene, session)
    mine, other = sorted(scene.got, key=len, reverse=True)
    assert (len(mine), len(other)) == (4, 0)
    assert mine[-1].document == ask(history)
    chosen = next(one for one in scene.engines if one.got and one.got[-1] is mine[-1])
    others = [one.name for one in scene.engines if one is not chosen]
    assert mine[-1].headers[PICKED].split(",") == [chosen.name, *others]


@pytest.mark.parametrize("scene", [3_600], indirect=True)
async def test_an_engine_that_cannot_be_reached_is_passed_over_for_the_next_named(scene, session):
    """The picker does not know yet that the engine has died, and learns who has answered in its place."""
    history = "x" * 20_000
    async with session.post(scene.envoy.url + CHAT, json=ask(history)) as response:
        await response.read()
    await is_idle(scene, session)  # Envoy's log has told how it ended
    [first] = [one for one in scene.engines if any(got.target == CHAT for got in one.got)]
    [other] = [one for one in scene.engines if one is not first]
    await first.stop()
    async with session.post(scene.envoy.url + CHAT, json=ask(history + "y" * 2_000)) as response:
        assert response.status == 200
        await response.read()
    [got] = [one for one in other.got if one.target == CHAT]
    assert got.headers[PICKED] == f"{first.name},{other.name}"
    labels = f'engine="{other.name}",model="m",outcome="ok",tenant=""'
    await scene.picker.until_sample(session, f"requests_total{{{labels}}}", 1)
    await is_idle(scene, session)
    await scene.picker.until_engine(session, first.name, "down")  # probed because another one has answered


async def test_a_body_in_several_frames_arrives_as_it_was_sent(scene, session):
    body = json.dumps(ask("z" * 300_000)).encode()
    first_half = asyncio.Event()

    async def frames() -> AsyncIterator[bytes]:
        yield body[:100_000]
        first_half.set()
        yield body[100_000:250_001]
        yield body[250_001:]

    async with session.post(scene.envoy.url + CHAT, data=frames()) as response:
        assert response.status == 200 and first_half.is_set()
        await response.read()
    [got] = [one for each in scene.got for one in each]
    assert got.body == body
    await is_idle(scene, session)


async def test_parts_come_as_they_are_made_and_a_client_that_leaves_frees_its_engine(scene, session):
    await is_idle(scene, session)  # Envoy's log has told of the request that waited for Envoy
    left = asyncio.Event()

    async def endless(got: Got, line: Line) -> None:
        await line.begin()
        await line.event(delta("a"))
        await line.gone()
        left.set()

    for engine in scene.engines:
        engine.behaviour = endless
    async with session.post(scene.envoy.url + CHAT, json=ask()) as response:
        assert b'"content": "a"' in await response.content.readany()
        page = await scene.picker.status(session)
        assert sorted(one["in_flight"] for one in page["engines"]) == [0, 1]
    await left.wait()
    await is_idle(scene, session)
    labels = f'engine="{next(one.name for one in scene.engines if one.got)}",model="m",outcome="cancelled",tenant=""'
    await scene.picker.until_sample(session, f"requests_total{{{labels}}}", 1)


async def test_refusals_have_the_shape_of_the_api(scene: Scene, session: aiohttp.ClientSession) -> None:
    async def refusal(path: str, data: bytes) -> tuple[int, str]:
        async with session.post(scene.envoy.url + path, data=data) as response:
            error = (await response.json())["error"]
            assert error["message"] and response.headers["x-request-id"]
            return response.status, error["code"]

    assert await refusal(CHAT, b"{") == (400, "invalid_json")
    assert await refusal(CHAT, json.dumps(ask(model="other")).encode()) == (404, "model_not_found")
    assert await refusal("/sleep", b"{}") == (404, "unknown_path")
    assert await refusal(CHAT, b" " * (65 << 20)) == (413, "body_too_large")
    assert await status_of(session.post(scene.envoy.url + CHAT, data=slices(b" " * (65 << 20)))) == 413
    assert scene.got == [[], []]
    one, other = scene.engines  # another one serves, or Envoy would soon hear that the picker is not ready
    one.healthy, other.models = False, ["another"]
    await scene.picker.until_engine(session, one.name, "down")
    rest = {"state": "up", "models": ["another"]}
    await scene.picker.until(session, f"{rest}", lambda page: rest.items() <= page["engines"][1].items())

    async def refuses() -> bool:
        """Envoy goes on without a picker that does not run for a second, as on a busy machine."""
        async with session.post(scene.envoy.url + CHAT, data=json.dumps(ask()).encode()) as response:
            told = await response.read()
            return response.status == 503 and json.loads(told)["error"]["code"] == "no_engine"

    await eventually_async("the picker refuses", refuses)
    await is_idle(scene, session)


async def slices(body: bytes) -> AsyncIterator[bytes]:
    """A body whose length is not told before."""
    for at in range(0, len(body), 50_000):
        yield body[at : at + 50_000]


@pytest.mark.parametrize("how", ("killed", "frozen"))
async def test_without_a_picker_requests_go_on(scene, session, how):
    async def passes(number: int) -> bool | None:
        """Send one request. Returns whether a picker chose its engine; None if it failed."""
        async with session.post(scene.envoy.url + CHAT, json=ask(f"number {number}")) as response:
            await response.read()
            if response.status != 200:
                return None
        [got] = [one for each in scene.got for one in each if one.document == ask(f"number {number}")]
        return PICKED in got.headers

    numbers = itertools.count()

    async def unpicked() -> bool:
        return await passes(next(numbers)) is False

    async def picked() -> bool:
        return bool(await passes(next(numbers)))

    await eventually_async("the picker is asked", picked)
    if how == "killed":
        scene.picker.kill()
    else:
        scene.picker.freeze()
    await eventually_async("Envoy goes on without a picker", unpicked)
    assert all(await asyncio.gather(*(unpicked() for _ in range(8))))
    if how == "frozen":
        scene.picker.thaw()
        await eventually_async("the picker is asked again", picked)
        await is_idle(scene, session)


async def test_a_tenants_kv_is_its_own_whatever_other_filters_envoy_has(start, session, tmp_path):
    engine = ScriptedEngine()
    own: dict[str, Any] = {"kv_transfer_params": {"kvstrata.tenant": "red-kv"}, "cache_salt": "red-kv"}
    named = tenants(tmp_path, red={"kv_tenant": "red-kv"})
    picker = await start(engine, tenants=named, picker={"listen": "127.0.0.1:0"})
    async with Envoy(tmp_path, picker.ready["picker_port"], [engine.port, engine.port]) as envoy:
        for size in (1, 10_000_000):
            body, headers = ask("x" * size), bearer("red")
            assert await status_of(session.post(envoy.url + CHAT, json=body, headers=headers)) == 200
            assert [one.document for one in engine.got if one.document] == [{**own, **body}]
            engine.got.clear()


async def test_text_goes_where_kv_events_say_that_it_is_cached(start, session, tmp_path):
    folder = tokenizer_folder.bytes_only(tmp_path / "model")
    sims = [Sim(), Sim(ranks=2)]
    program = envoy_program.program()
    assert program.exists()
    try:
        await asyncio.gather(*(one.start(session) for one in sims))
        picker = await start(
            urls=[one.url for one in sims],
            policy="ttft",
            picker={"listen": "127.0.0.1:0"},
            tokens={"tokenizers": [{"model": "m", "path": str(folder)}], "deadline_ms": 10_000},
        )
        async with Envoy(tmp_path, picker.ready["picker_port"], [one.port for one in sims]) as envoy:

            def heard(status: dict[str, Any]) -> bool:
                page = status["kv_events"]
                return len(page) == 3 and all(map(is_whole, page.values()))

            await picker.until(session, "all ranks are heard", heard)
            words = itertools.count()
            for sim, rank in ((sims[0], ""), (sims[1], "@0"), (sims[1], "@1")):

                async def goes_there(sim: Sim = sim, rank: str = rank) -> bool:
                    """Let the rank compute a new conversation, and send its next turn through Envoy."""
                    word, name = f"text-{next(words)}", sim.name + rank
                    first = {"role": "user", "content": f"{word} " * 400}
                    body = {"model": "m", "messages": [first], "max_tokens": 1}
                    # The engine closes a connection that was idle for 5 s, as on a machine that stood still.
                    direct = {"X-data-parallel-rank": rank[1:] or "0", "Connection": "close"}
                    async with session.post(sim.url + CHAT, json=body, headers=direct) as response:
                        answer = (await response.json())["choices"][0]["message"]
                    body["messages"] = [first, answer, {"role": "user", "content": "and then?"}]
                    await asyncio.sleep(0.1)  # for its events; otherwise the next try will do
                    async with session.post(
                        envoy.url + CHAT, json=body, headers={"X-Request-ID": word}
                    ) as response:
                        assert response.status == 200, await response.text()
                        usage = (await response.json())["usage"]
                    try:
                        page = await operators(picker, session, f"/gateway/decisions/{word}")
                    except (
                        aiohttp.ClientResponseError
                    ):  # 404: Envoy did not wait for a picker that stands still
                        return False
                    known = page["record"]["knowledge"]["cached"].get(name, 0)
                    if page["decision"]["engine"] != name or known < 2_800:
                        return False
                    assert usage["prompt_tokens_details"]["cached_tokens"] >= known
                    return True

                await eventually_async(f"what {sim.name}{rank} has is known", goes_there)
            prompts = (await picker.status(session))["tokens"]["prompts"]
            assert set(prompts) == {"m/tokenizer"}, prompts
    finally:
        for one in sims:
            await one.kill()
