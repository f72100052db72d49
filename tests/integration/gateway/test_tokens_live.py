"""A real gateway with a tokenizer before simulated and scripted engines."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.harness import tokenizer_folder
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async
from tests.integration.gateway.test_proxy import CHAT

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def sim() -> Iterator[str]:
    """URL of a simulated engine that renders."""
    port = free_port()
    command = [
        "-m",
        "kvstrata",
        "sim",
        "--port",
        str(port),
        "--model",
        "m",
        "--speed",
        "100",
        "--enable-scale-out",
    ]
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL, start_new_session=True)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


async def ask(gateway: GatewayProcess, session: aiohttp.ClientSession, path: str = CHAT, **body: Any) -> Any:
    """Post a request for `m`; its answer."""
    async with session.post(gateway.url + path, json={"model": "m", "max_tokens": 3, **body}) as response:
        document = await response.json()
        assert response.status == 200, document
        return document


async def page(gateway: GatewayProcess, session: aiohttp.ClientSession, path: str) -> str:
    """A page for operators."""
    async with session.get(
        gateway.url + path, headers={"Authorization": f"Bearer {gateway.token}"}
    ) as answer:
        return await answer.text()


async def prompts(gateway: GatewayProcess, session: aiohttp.ClientSession) -> dict[str, int]:
    """Prompts of text by how their ids are known."""
    found: dict[str, int] = json.loads(await page(gateway, session, "/gateway/status"))["tokens"]["prompts"]
    return {name.split("/")[1]: count for name, count in found.items()}


def user(text: Any) -> list[dict[str, Any]]:
    """A conversation's first turn."""
    return [{"role": "user", "content": text}]


async def test_a_verified_tokenizer_tells_what_the_engine_will_tokenise(sim, start, session, tmp_path):
    folder = tokenizer_folder.bytes_only(tmp_path / "model")
    tokens = {"tokenizers": [{"model": "m", "path": str(folder)}], "deadline_ms": 10_000, "render": True}
    gateway = await start(urls=[sim], policy="ttft", tokens=tokens)

    async def verified() -> bool:
        status = json.loads(await page(gateway, session, "/gateway/status"))
        return {"plain", "system", "completion"} <= set(status["tokens"]["models"]["m"]["features"])

    await eventually_async("the comparison with the engine", verified)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
    messages = user("Was kostet 5 € in ¥?")
    for _ in range(3):
        answer = await ask(gateway, session, messages=messages)
        messages += [answer["choices"][0]["message"], *user("And now?")]
    await ask(gateway, session, "/v1/completions", prompt="one two")
    assert await prompts(gateway, session) == {"tokenizer": 4}
    await ask(gateway, session, "/v1/completions", prompt=[1, 2, 3])
    await ask(gateway, session, "/v1/responses", input="one two", max_output_tokens=16)
    await ask(gateway, session, messages=messages, tools=[tool])  # spelled otherwise than by vLLM
    assert await prompts(gateway, session) == {"tokenizer": 4, "render": 2}
    for _ in range(3):  # what is cached, the engine tells beside the rest
        answer = await ask(gateway, session, "/v1/messages", messages=user("one two " * 50))
    assert answer["usage"]["cache_read_input_tokens"] > answer["usage"]["input_tokens"] > 0
    assert await prompts(gateway, session) == {"tokenizer": 4, "render": 5}
    metrics = await page(gateway, session, "/metrics")
    assert "kvstrata_gateway_mistaken_tokens_total{" not in metrics


async def test_an_engine_with_other_tokens_is_noticed_before_and_after(start, session, tmp_path):
    folder = tokenizer_folder.bytes_only(tmp_path / "model")

    async def engine(got: Got, line: Line) -> None:
        if got.target != "/tokenize":
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            await line.answer({"choices": [], "usage": usage})
        elif "prompt" in got.document:
            await line.answer({"tokens": list(got.document["prompt"].encode())})
        else:
            await line.answer({"tokens": [1, 2, 3]})

    tokens = {"tokenizers": [{"model": "m", "path": str(folder)}], "deadline_ms": 10_000}
    gateway = await start(ScriptedEngine("m", behaviour=engine), policy="ttft", tokens=tokens)

    async def status() -> Any:
        return json.loads(await page(gateway, session, "/gateway/status"))["tokens"]["models"]["m"]

    async def verified() -> bool:
        return bool((await status())["features"])

    await eventually_async("the comparison with the engine", verified)
    assert (await status())["features"] == ["completion"]
    assert "tokens_differ" in gateway.log.read_text()
    await ask(gateway, session, messages=user("x"))
    assert await prompts(gateway, session) == {"unverified": 1}
    for _ in range(3):  # the engine counts otherwise than it told
        await ask(gateway, session, "/v1/completions", prompt="one two")

    async def degraded() -> bool:
        return bool((await status())["degraded"])

    await eventually_async("its lengths are believed no more", degraded)
    await ask(gateway, session, "/v1/completions", prompt="one two")
    assert await prompts(gateway, session) == {"unverified": 1, "tokenizer": 3, "degraded": 1}
    assert 'kvstrata_gateway_tokens_degraded{model="m"} 1' in await page(gateway, session, "/metrics")
    assert "tokens_degraded" in gateway.log.read_text()


async def test_an_engine_that_does_not_render_is_left_alone(start, session):
    async def engine(got: Got, line: Line) -> None:
        refuses = got.target.endswith("/render")
        await line.answer({"choices": []}, status=403 if refuses else 200)

    scripted = ScriptedEngine("m", behaviour=engine)
    gateway = await start(scripted, policy="ttft", tokens={"render": True, "deadline_ms": 10_000})
    for _ in range(3):
        await ask(gateway, session, messages=user("x"))
    asked = [got.target for got in scripted.got if got.target.startswith(CHAT)]
    assert asked == [f"{CHAT}/render", CHAT, CHAT, CHAT]
    assert await prompts(gateway, session) == {"unknown_model": 3}


async def test_engines_that_take_ids_get_them(sim, start, session, tmp_path):
    folder = tokenizer_folder.bytes_only(tmp_path / "model")
    tokens = {"tokenizers": [{"model": "m", "path": str(folder)}], "deadline_ms": 10_000, "pass_ids": True}

    async def ignores(got: Got, line: Line) -> None:  # an engine that does not know the field
        if got.method == "GET":
            await line.answer({})
            return
        async with session.post(sim + got.target, json=got.document | {"kv_transfer_params": None}) as answer:
            await line.answer(await answer.read(), answer.status)

    scripted = ScriptedEngine("m", behaviour=ignores)
    for takes, engine in ((f"{CHAT},/v1/completions", None), ("/v1/completions", scripted)):
        gateway = await start(
            *([engine] if engine else []), urls=[] if engine else [sim], policy="ttft", tokens=tokens
        )
        await eventually_async("the comparison", functools.partial(_logged, gateway, f"takes_ids={takes}"))
        if engine is not None:
            engine.got.clear()
        messages = user("Was kostet 5 € in ¥?")
        answer = await ask(gateway, session, messages=messages)
        async with session.post(
            sim + CHAT, json={"model": "m", "max_tokens": 3, "messages": messages}
        ) as straight:
            same = await straight.json()
        assert (
            answer["choices"] == same["choices"]
            and answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
        )
        assert await prompts(gateway, session) == {"tokenizer": 1}
        gateway.kill()
    assert [got.document.get("kv_transfer_params") for got in scripted.got if got.target == CHAT] == [None]


async def test_ids_that_an_engine_rendered_go_back_to_it(sim, start, session):
    async def passes(got: Got, line: Line) -> None:
        if got.method == "GET":
            await line.answer({})
            return
        async with session.post(sim + got.target, json=got.document) as answer:
            await line.answer(await answer.read(), answer.status)

    scripted = ScriptedEngine("m", behaviour=passes)
    tokens = {"render": True, "deadline_ms": 10_000, "pass_ids": True}
    gateway = await start(scripted, policy="ttft", tokens=tokens)
    await eventually_async(
        "the trial", functools.partial(_logged, gateway, f"takes_ids={CHAT},/v1/completions")
    )
    scripted.got.clear()
    answer = await ask(gateway, session, messages=user("Was kostet 5 € in ¥?"))
    assert await prompts(gateway, session) == {"render": 1}
    [got] = [got.document for got in scripted.got if got.target == CHAT]
    assert len(got["kv_transfer_params"]["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


async def _logged(gateway: GatewayProcess, words: str) -> bool:
    return words in gateway.log.read_text()
