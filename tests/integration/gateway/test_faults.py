"""Engines that fail in every way, hostile bytes from both sides, and all of it at once: what clients get then."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.harness import amount
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Behaviour, Got, Line, ScriptedEngine, chat, delta
from tests.harness.waiting import eventually_async, until
from tests.integration.gateway.conftest import Start, at_rest, envoy_mb, status_of
from tests.integration.gateway.test_door import HEAD, KEYS, bearer, tenants
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration


async def dies(got: Got, line: Line) -> None:
    line.cut()


def says(data: bytes) -> Behaviour:
    """Answer with these bytes, and wait until the other end goes."""

    async def answer(got: Got, line: Line) -> None:
        await line.raw(data)
        await line.gone()

    return answer


def busy(status: int) -> Behaviour:
    async def answer(got: Got, line: Line) -> None:
        await line.answer({"error": {"message": f"{status} from an engine"}}, status, "retry-after: 7\r\n")

    return answer


FAILURES: dict[str, Behaviour] = {
    "dies": dies,
    "garbage": says(b"\0\1\2 no HTTP\r\n\r\n"),
    "a header of 10 MB": says(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000_000 + b"\r\n\r\n"),
    "two lengths": says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef"),
    **{str(status): busy(status) for status in (429, 502, 503)},
}


def first_fails(behaviour: Behaviour, engines: list[ScriptedEngine]) -> None:
    """Let the engine that gets the first request fail so, and the others answer."""
    failed: list[ScriptedEngine] = []

    def of(engine: ScriptedEngine) -> Behaviour:
        async def answer(got: Got, line: Line) -> None:
            if not failed or failed[0] is engine:
                failed[:] = [engine]
                await behaviour(got, line)
            else:
                await chat(got, line)

        return answer

    for engine in engines:
        engine.behaviour = of(engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_another_engine_answers_for_one_that_fails_before_its_first_byte(start, session, stream):
    engines = [ScriptedEngine(), ScriptedEngine()]
    gateway = await start(*engines)
    for name, behaviour in FAILURES.items():
        first_fails(behaviour, engines)
        for engine in engines:
            engine.got.clear()
        async with session.post(gateway.url + CHAT, json=ask(stream)) as response:
            body = await response.read()
            assert response.status == 200, (name, body)
        assert body.endswith(b"[DONE]\n\n" if stream else b"}"), name
        bodies = [got.body for engine in engines for got in engine.got]
        assert len(bodies) == 2 and bodies[0] == bodies[1], name
    await at_rest(gateway, session)


async def test_a_failure_that_no_other_engine_mends_is_told(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine)
    for name, behaviour in FAILURES.items():
        engine.behaviour = behaviour
        async with session.post(gateway.url + CHAT, json=ask()) as response:
            document = await response.json()
            if name.isdigit():
                assert (response.status, document) == (
                    int(name),
                    {"error": {"message": f"{name} from an engine"}},
                )
                assert response.headers["retry-after"] == "7"
            else:
                assert response.status in (502, 503), name
                assert document["error"]["type"] == "server_error", name
                assert document["error"]["message"], name
    await at_rest(gateway, session)


async def test_a_request_that_may_have_been_begun_is_not_repeated_if_that_could_be_seen(start, session):
    engines = [ScriptedEngine(behaviour=dies), ScriptedEngine(behaviour=dies)]
    gateway = await start(*engines)
    for body, sent in (
        ({"store": True}, 1),
        ({}, 1),
        ({"store": False, "background": True}, 1),
        ({"store": False}, 2),
    ):
        for engine in engines:
            engine.got.clear()
        request = {"model": "m", "input": "x", **body}
        assert await status_of(session.post(f"{gateway.url}/v1/responses", json=request)) == 503
        assert min(2, sum(len(engine.got) for engine in engines)) == sent, body


async def test_an_answer_that_breaks_off_ends_with_a_cut_connection(start, session):
    async def breaks(got: Got, line: Line) -> None:
        stream = got.document.get("stream")
        await line.begin("text/event-stream" if stream else "application/json")
        await line.part(b"data: " + json.dumps(delta("a")).encode() + b"\n\ndata: {" if stream else b'{"id":')
        line.cut()

    engines = [ScriptedEngine(behaviour=breaks), ScriptedEngine(behaviour=breaks)]
    gateway = await start(*engines)
    for stream in (True, False):
        async with session.post(gateway.url + CHAT, json=ask(stream)) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    assert sum(len(engine.got) for engine in engines) == 2, "nothing was repeated"
    await at_rest(gateway, session)


async def test_an_error_inside_a_200_is_counted(start: Start, session: aiohttp.ClientSession) -> None:
    async def lies(got: Got, line: Line) -> None:
        await line.begin()
        await line.event({"error": {"message": "out of memory", "code": 500}})
        await line.end()

    engine = ScriptedEngine(behaviour=lies)
    gateway = await start(engine)
    async with session.post(gateway.url + CHAT, json=ask(True)) as response:
        assert b"out of memory" in await response.read()
    labels = f'engine="{engine.name}",model="m",outcome="engine_error",tenant=""'
    await gateway.until_sample(session, f"requests_total{{{labels}}}", 1)


async def test_a_silent_engine_is_given_up_before_and_after_its_first_byte(start, session):
    async def silent(got: Got, line: Line) -> None:
        if got.document.get("stream"):
            await line.begin()
            await line.event(delta("a"))
        await line.gone()

    engines = [ScriptedEngine(behaviour=silent), ScriptedEngine(behaviour=silent)]
    gateway = await start(*engines, timeouts={"silence_s": 2})
    async with session.post(gateway.url + CHAT, json=ask()) as response:
        assert response.status == 504
    async with session.post(gateway.url + CHAT, json=ask(True)) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert sum(len(engine.got) for engine in engines) == 2, "nothing is computed anew"
    await at_rest(gateway, session)


async def test_an_engine_that_dies_gets_no_requests_until_it_answers_again(start, session):
    one, two = ScriptedEngine(), ScriptedEngine()
    gateway = await start(one, two, policy="round_robin")
    await one.stop()
    for _ in range(4):
        assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
    assert (len(one.got), len(two.got)) == (0, 4)
    await gateway.until_engine(session, one.name, "down")
    two.healthy = False
    await gateway.until_engine(session, two.name, "down")
    async with session.post(gateway.url + CHAT, json=ask()) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (await response.json())["error"]["code"] == "no_engine"
    for path, expected in (("/readyz", 503), ("/health", 503), ("/healthz", 200)):
        assert await status_of(session.get(gateway.url + path)) == expected
    await one.start()
    await gateway.until_engine(session, one.name, "up")
    assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
    assert len(one.got) == 1
    await one.stop()


async def test_an_engine_whose_models_are_garbage_does_not_serve_and_harms_nobody(start, session):
    class Odd(ScriptedEngine):
        models_body = b""

        async def _answer(self, got: Got, line: Line) -> None:
            if got.target == "/v1/models":
                await line.answer(self.models_body)
            else:
                await super()._answer(got, line)

    odd, sound = Odd(), ScriptedEngine()
    await odd.start()
    try:
        gateway = await start(sound, urls=[odd.url, f"http://{'a' * 80}.b:80"])
        gateway.reload(engines=[*gateway.settings["engines"], {"url": sound.url}])
        await gateway.until_engine(session, sound.name, "up")
        for body in (
            b"",
            b"{",
            b"[1]",
            b'{"data": [{"id": "\xff"}]}',
            b"[" * 200_000,
            b'{"data": ' + b"[" * 200_000,
        ):
            odd.models_body, probes = body, odd.probes
            await eventually_async("it was probed", lambda probes=probes: odd.probes >= probes + 3)
            states = {row["name"]: row["state"] for row in (await gateway.status(session))["engines"]}
            assert states[odd.name] == "down", body[:40]
            assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
    finally:
        await odd.stop()


async def test_retries_are_bounded_when_all_engines_fail(start, session):
    count, ended = 100, 0
    all_came, go_on = asyncio.Event(), asyncio.Event()

    async def fails(got: Got, line: Line) -> None:
        """The first tries fail together, so that all requests are under way; their retries wait."""
        if tries() >= count:
            all_came.set()
        await (go_on if all_came.is_set() and tries() > count else all_came).wait()
        await busy(503)(got, line)

    def tries() -> int:
        return sum(len(engine.got) for engine in engines)

    async def one() -> int:
        nonlocal ended
        async with session.post(gateway.url + CHAT, json=ask()) as response:
            ended += 1
            return response.status

    engines = [ScriptedEngine(behaviour=fails) for _ in range(3)]
    gateway = await start(*engines)
    requests = [asyncio.create_task(one()) for _ in range(count)]
    await until(lambda: ended + tries() >= 2 * count)
    assert count < tries() <= 1.3 * count, "a fifth of those under way, retries included"
    go_on.set()
    assert await asyncio.gather(*requests) == [503] * count


def usages() -> Iterator[str]:
    """What an engine may tell of tokens."""
    for value in ("-5", "NaN", "1e308", "999999999999999", "9" * 400, '"7"', "null", "[]", "0", "0.5"):
        yield f'{{"prompt_tokens": {value}, "completion_tokens": 3}}'
        yield f'{{"prompt_tokens": 11, "completion_tokens": {value}}}'
        yield f'{{"prompt_tokens": 11, "prompt_tokens_details": {{"cached_tokens": {value}}}}}'
    yield "[" * 1_000


async def test_lies_about_tokens_change_nothing_but_their_engines_figures(start, session):
    liar, sound = ScriptedEngine(), ScriptedEngine()
    gateway = await start(liar, sound, policy="ttft")
    lies = itertools.cycle(usages())

    async def answers(got: Got, line: Line) -> None:
        usage = next(lies)
        if got.document.get("stream"):
            await line.begin()
            await line.event(delta("a"))
            await line.part(f'data: {{"choices": [], "usage": {usage}}}\n\ndata: [DONE]\n\n'.encode())
            await line.end()
        else:
            await line.answer(f'{{"choices": [], "usage": {usage}}}'.encode())

    liar.behaviour = answers
    for number in range(800):
        if number >= 80 and liar.got and sound.got:  # an engine that a busy machine stops is asked late
            break
        prompt = {"model": "m", "prompt": [number // 8] * 2_000, "stream": number % 2 == 0}
        async with session.post(f"{gateway.url}/v1/completions", json=prompt) as response:
            assert response.status == 200
            await response.read()
    await at_rest(gateway, session)
    assert liar.got and sound.got, "neither draws all requests nor loses them"
    status = await gateway.status(session)
    assert all(0 <= row["share"] <= 1 for row in status["engines"])
    await asyncio.sleep(0.3)  # a page of metrics is up to 0.25 s old
    for name, value in (await gateway.samples(session)).items():
        if "_tokens_total" in name and sound.name in name:
            assert value <= 11 * len(sound.got), name
        assert 0 <= value < 1e18, name
    log = gateway.log.read_text()
    assert "Traceback" not in log and "request_crashed" not in log


def bomb(gateway: GatewayProcess, head: bytes, part: bytes, total_bytes: int) -> bytes:
    """Send `head`, and `part` again and again until the gateway ends the connection; return what it answered."""
    block, sent, got = part * (1 + (1 << 16) // len(part)), 0, b""
    with socket.create_connection(("127.0.0.1", gateway.port), 30) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(head)
            while sent < total_bytes:
                connection.sendall(block)
                sent += len(block)
        assert sent < total_bytes, "the gateway has taken all of it"
        with contextlib.suppress(OSError):
            while more := connection.recv(65_536):
                got += more
    return got


BOMBS: dict[str, tuple[bytes, bytes]] = {
    "one header": (HEAD + b"x: ", b"y"),
    "many headers": (HEAD, b"x-a: " + b"y" * 500 + b"\r\n"),
    "a path": (b"POST /v1/", b"y"),
    "one trailer": (HEAD + b'transfer-encoding: chunked\r\n\r\ne\r\n{"model": "m"}\r\n0\r\nx: ', b"y"),
}


async def test_requests_that_break_the_rules_cost_their_sender_only(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine)
    for name, (head, part) in BOMBS.items():
        answer = await asyncio.to_thread(bomb, gateway, head, part, 256 << 20)
        assert b" 200 " not in answer, name
    assert not engine.got and await envoy_mb(gateway, session) < 400
    assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
    await at_rest(gateway, session)


REQUESTS = 400


async def breaks(got: Got, line: Line) -> None:
    """Break an answer off."""
    await line.begin()
    await line.event(delta("a"))
    line.cut()


async def waits(got: Got, line: Line) -> None:
    """Answer nothing, until the other end goes."""
    await line.gone()


async def much(got: Got, line: Line) -> None:
    """Answer with more than anybody reads."""
    await line.begin()
    for _ in range(200):
        await line.part(b"data: " + b"x" * 65_536 + b"\n\n")
    await line.end()


BEHAVIOURS: list[Behaviour] = [*FAILURES.values(), breaks, waits, much, *[chat] * 8]


async def reads(
    gateway: GatewayProcess, session: aiohttp.ClientSession, name: str, draw: random.Random
) -> None:
    """A client that reads its answer."""
    with contextlib.suppress(aiohttp.ClientError):
        body = ask(draw.random() < 0.5)
        async with session.post(gateway.url + CHAT, json=body, headers=bearer(name)) as response:
            await response.read()


async def leaves(
    gateway: GatewayProcess, session: aiohttp.ClientSession, name: str, draw: random.Random
) -> None:
    """A client that goes at any moment."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(draw.random() * 0.1):
            await reads(gateway, session, name, draw)


async def half(
    gateway: GatewayProcess, session: aiohttp.ClientSession, name: str, draw: random.Random
) -> None:
    """A client that sends a piece of a request."""
    text = (
        HEAD
        + b"authorization: Bearer "
        + KEYS[name].encode()
        + b'\r\ncontent-length: 14\r\n\r\n{"model": "m"}'
    )
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(text[: draw.randrange(len(text) + 1)])
        await writer.drain()
        if draw.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


CLIENTS: list[Callable[..., Awaitable[None]]] = [reads, reads, leaves, half]


async def test_counts_come_back_to_zero(start: Start, session: aiohttp.ClientSession, tmp_path: Path) -> None:
    seed = amount.seed()
    draw = random.Random(seed)

    async def anything(got: Got, line: Line) -> None:
        await draw.choice(BEHAVIOURS)(got, line)

    engines = [ScriptedEngine(behaviour=anything) for _ in range(3)]
    limits = {"max_in_flight": 40, "requests_per_s": 1_000}
    gateway = await start(
        *engines,
        tenants=tenants(tmp_path, red=limits, blue={}),
        timeouts={"silence_s": 1},
        max_in_flight=60,
    )
    tasks = []
    for number in range(REQUESTS):
        client = draw.choice(CLIENTS)
        tasks.append(asyncio.create_task(client(gateway, session, draw.choice(list(KEYS)), draw)))
        if number % 50 == 49:
            gateway.reload(engines=[{"url": engine.url} for engine in draw.sample(engines, 2)])
        await asyncio.sleep(draw.random() * 0.01)
    await asyncio.gather(*tasks)
    await at_rest(gateway, session)
    for engine in engines:
        engine.behaviour = chat

    async def served() -> (
        bool
    ):  # a busy machine may stop this process, the engine, for the second of `silence_s`
        return await status_of(session.post(gateway.url + CHAT, json=ask(), headers=bearer("blue"))) == 200

    await eventually_async(f"it serves {seed}", served)
    await asyncio.sleep(0.3)  # a page of metrics is up to 0.25 s old
    samples = await gateway.samples(session)
    counted = sum(
        value for name, value in samples.items() if name.startswith("kvstrata_gateway_requests_total")
    )
    received = sum(
        value for name, value in samples.items() if name.startswith("kvstrata_gateway_slo_requests_total")
    )
    assert counted == received > REQUESTS / 4, seed
    log = gateway.log.read_text()
    assert "Traceback" not in log and "request_crashed" not in log, seed
