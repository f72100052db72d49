"""Real gateways by the tokens of prompts: prefixes that they know, and tokenizers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.harness import amount, tokenizer_folder
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import at_rest, status_of
from tests.integration.gateway.test_proxy import CHAT

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def simulated(*flags: str) -> Iterator[str]:
    """The URL of a simulated engine with these flags."""
    port = free_port()
    command = ["-m", "kvstrata", "sim", "--port", str(port), "--model", "m", *flags]
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL, start_new_session=True)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def sim() -> Iterator[str]:
    """URL of a simulated engine that renders."""
    with simulated("--speed", "100", "--enable-scale-out") as url:
        yield url


async def ask(gateway: GatewayProcess, session: aiohttp.ClientSession, path: str = CHAT, **body: Any) -> Any:
    async with session.post(gateway.url + path, json={"model": "m", "max_tokens": 3, **body}) as response:
        document = await response.json()
        assert response.status == 200, document
        return document


async def page(gateway: GatewayProcess, session: aiohttp.ClientSession, path: str) -> str:
    async with session.get(
        gateway.url + path, headers={"Authorization": f"Bearer {gateway.token}"}
    ) as answer:
        return await answer.text()


async def prompts(gateway: GatewayProcess, session: aiohttp.ClientSession) -> dict[str, int]:
    """Prompts of text by how their ids are known."""
    found = (await gateway.status(session))["tokens"]["prompts"]
    return {name.split("/")[1]: count for name, count in found.items()}


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def test_a_verified_tokenizer_tells_what_the_engine_will_tokenise(sim, start, session, tmp_path):
    folder = tokenizer_folder.bytes_only(tmp_path / "model")
    tokens = {"tokenizers": [{"model": "m", "path": str(folder)}], "deadline_ms": 10_000, "render": True}
    gateway = await start(urls=[sim], policy="ttft", tokens=tokens)

    def verified(status: dict[str, Any]) -> bool:
        return {"plain", "system", "completion"} <= set(status["tokens"]["models"]["m"]["features"])

    await gateway.until(session, "the comparison with the engine", verified)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
    messages = user("Was kostet 5 € in ¥?")
    for _ in range(3):
        answer = await ask(gateway, session, messages=messages)
        messages += [answer["choices"][0]["message"], *user("And now?")]
    await ask(gateway, session, "/v1/completions", prompt="one two")
    assert await prompts(gateway, session) == {"tokenizer": 4}
    await ask(gateway, session, "/v1/completions", prompt=[1, 2, 3])
    await ask(gateway, session, messages=messages, tools=[tool])  # spelled otherwise than by vLLM
    assert await prompts(gateway, session) == {"tokenizer": 4, "render": 1}
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

    async def until(what: str) -> Any:
        await gateway.until(session, what, lambda status: status["tokens"]["models"]["m"][what])
        return (await gateway.status(session))["tokens"]["models"]["m"][what]

    assert await until("features") == ["completion"]
    assert "tokens_differ" in gateway.log.read_text()
    await ask(gateway, session, messages=user("x"))
    assert await prompts(gateway, session) == {"unverified": 1}
    for _ in range(3):  # the engine counts otherwise than it told
        await ask(gateway, session, "/v1/completions", prompt="one two")
    assert await until("degraded"), "its lengths are believed no more"
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
    for takes, engine in (("True", None), ("False", scripted)):
        gateway = await start(
            *([engine] if engine else []), urls=[] if engine else [sim], policy="ttft", tokens=tokens
        )
        await _until_logged(gateway, f"takes_ids={takes}")
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
    await _until_logged(gateway, "takes_ids=True")
    scripted.got.clear()
    answer = await ask(gateway, session, messages=user("Was kostet 5 € in ¥?"))
    assert await prompts(gateway, session) == {"render": 1}
    [got] = [got.document for got in scripted.got if got.target == CHAT]
    assert len(got["kv_transfer_params"]["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


async def _until_logged(gateway: GatewayProcess, words: str) -> None:
    await eventually_async(f"the log has {words}", lambda: words in gateway.log.read_text())


ENGINES, CONVERSATIONS, TURNS = 3, 8, 4


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    """URLs of simulated engines, ten times as fast as the engine that they simulate."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(simulated("--speed", "10")) for _ in range(ENGINES)]


async def talk(gateway: GatewayProcess, session: aiohttp.ClientSession, draw: random.Random) -> list[float]:
    """A conversation; returns the share of each turn's prompt that its engine had cached."""
    words = ["".join(draw.choices("abcdefgh", k=7)) for _ in range(400)]
    messages: list[dict[str, Any]] = []
    shares = []
    for _ in range(TURNS):
        text = " ".join(draw.choices(words, k=draw.randrange(300, 900)))
        messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": messages, "max_tokens": 20}
        async with session.post(gateway.url + CHAT, json=body) as response:
            document = await response.json()
            assert response.status == 200, document
        messages.append(document["choices"][0]["message"])
        usage = document["usage"]
        shares.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) / usage["prompt_tokens"])
    return shares


async def test_a_conversation_finds_its_prefix_and_conversations_spread(engines, session, start):
    seed = amount.seed()
    gateway = await start(urls=engines, policy="ttft")
    up = {"up"}
    await gateway.until(session, "all are up", lambda page: {row["state"] for row in page["engines"]} == up)
    # One at a time: beside others, a prompt may rightly go where it delays nobody.
    for number in range(CONVERSATIONS):
        first, *later = await talk(gateway, session, random.Random(seed + number))
        assert first == 0 and min(later) > 0.2, (seed, number, later)
    await asyncio.gather(*(talk(gateway, session, random.Random(seed - number)) for number in range(1, 13)))
    sent = [row["sent"] for row in (await gateway.status(session))["engines"]]
    assert min(sent) >= TURNS, (seed, sent)
    samples = await gateway.samples(session)
    assert not any("mistaken_prefixes" in name for name in samples), seed
    await at_rest(gateway, session)


async def test_a_prefix_that_an_engine_has_lost_is_noticed(engines, session, start):
    gateway = await start(urls=engines[:1], policy="ttft")
    name = engines[0].removeprefix("http://")
    await gateway.until_engine(session, name, "up")
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 9_000}], "max_tokens": 2}
    for _ in range(2):
        assert await status_of(session.post(gateway.url + CHAT, json=body)) == 200
        await at_rest(gateway, session)  # what was sent is taken for computed once that is told
        assert await status_of(session.post(engines[0] + "/reset_prefix_cache")) == 200
    await gateway.until_sample(session, f'mistaken_prefixes_total{{engine="{name}"}}', 1)
