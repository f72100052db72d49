"""Engines that fail in every way, hostile bytes from both sides, and all of it at once: what clients get then."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
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
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start, at_rest, resident_mb, status_of
from tests.integration.gateway.test_door import HEAD, KEYS, bearer, raw, tenants
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration


async def dies(got: Got, line: Line) -> None:
    line.cut()


async def dies_after_head(got: Got, line: Line) -> None:
    await line.begin()
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
    "dies after the head": dies_after_head,
    "garbage": says(b"\0\1\2 no HTTP\r\n\r\n"),
    "another protocol": says(b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"),
    "a header of 10 MB": says(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000_000 + b"\r\n\r\n"),
    "two lengths": says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef"),
    **{str(status): busy(status) for status in (429, 502, 503, 504)},
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
                assert response.status == 502, name
                assert document["error"]["type"] == "server_error", name
                assert engine.name in document["error"]["message"], name
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
        assert await status_of(session.post(f"{gateway.url}/v1/responses", json=request)) == 502
        assert sum(len(engine.got) for engine in engines) == sent, body


async def test_an_answer_that_breaks_off_ends_with_an_error_and_a_cut_connection(start, session):
    async def breaks(got: Got, line: Line) -> None:
        stream = got.document.get("stream")
        await line.begin("text/event-stream" if stream else "application/json")
        await line.part(b"data: " + json.dumps(delta("a")).encode() + b"\n\ndata: {" if stream else b'{"id":')
        await asyncio.sleep(0.1)
        line.cut()

    engines = [ScriptedEngine(behaviour=breaks), ScriptedEngine(behaviour=breaks)]
    gateway = await start(*engines)
    for path, event in ((CHAT, b""), ("/v1/messages", b"event: error\n")):
        got = b""
        async with session.post(gateway.url + path, json=ask(True)) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                while True:
                    got += await response.content.readany()
        first, second, error, rest = got.split(b"\n\n")
        assert (first[6:], second, rest) == (json.dumps(delta("a")).encode(), b"data: {", b"")
        assert error.startswith(event + b"data: ")
        assert "broke its answer off" in json.loads(error[len(event) + 6 :])["error"]["message"]
        async with session.post(gateway.url + path, json=ask()) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    assert sum(len(engine.got) for engine in engines) == 4, "nothing was repeated"
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

    engine = ScriptedEngine(behaviour=silent)
    gateway = await start(engine, timeouts={"first_byte_s": 0.5, "silence_s": 0.5})
    async with session.post(gateway.url + CHAT, json=ask()) as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "first_byte"
    got = b""
    async with session.post(gateway.url + CHAT, json=ask(True)) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            while True:
                got += await response.content.readany()
    assert b"was silent for" in got
    await at_rest(gateway, session)


@pytest.mark.silence
async def test_a_client_that_takes_its_time_is_no_silence_of_the_engine(start, session):
    async def much(got: Got, line: Line) -> None:
        await line.begin()
        for _ in range(400):
            await line.part(b"data: " + b"x" * 65_536 + b"\n\n")
        await line.end()

    gateway = await start(ScriptedEngine(behaviour=much), timeouts={"silence_s": 1})
    async with session.post(gateway.url + CHAT, json=ask(True)) as response:
        await asyncio.sleep(2)
        assert len(await response.read()) == 400 * 65_544


async def test_the_engine_waits_for_a_client_that_does_not_read(start, session):
    written = 0

    async def much(got: Got, line: Line) -> None:
        nonlocal written
        written = 0
        if got.document["stream"]:
            await line.begin()
            await line.part(b"data: " + b"x" * (4 << 20) + b"\n\n")
        else:
            await line.raw(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % MUCH
            )
        while written < MUCH:
            data = bytes(1 << 20)
            await (line.part(data) if got.document["stream"] else line.raw(data))
            written += len(data)
        if got.document["stream"]:
            await line.end()

    gateway = await start(ScriptedEngine(behaviour=much))
    for stream in (True, False):
        body = json.dumps(ask(stream)).encode()
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        before_mb = resident_mb(gateway.pid)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", gateway.port))
            client.sendall(head % (CHAT.encode(), len(body)) + body)
            last = -1
            while last != written:  # until nothing moves any more
                last = written
                await asyncio.sleep(0.3)
            assert written < MUCH / 2
            assert resident_mb(gateway.pid) - before_mb < 48, stream
            assert await asyncio.to_thread(read_all, client) >= MUCH
    await at_rest(gateway, session)


def read_all(client: socket.socket) -> int:
    """Read until the other end closes; return the number of bytes."""
    size = 0
    while part := client.recv(1 << 20):
        size += len(part)
    return size


MUCH = 100 << 20


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
    [share] = [row["share"] for row in (await gateway.status(session))["engines"] if row["name"] == one.name]
    assert 0.25 <= share < 1, "it has just come back"
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


async def test_requests_that_wait_for_a_frozen_engine_go_to_another(start, session):
    frozen = asyncio.Event()

    async def freezes(got: Got, line: Line) -> None:
        frozen.set()
        await line.gone()

    class Freezing(ScriptedEngine):
        async def _answer(self, got: Got, line: Line) -> None:
            if frozen.is_set():  # its kernel takes connections, but nothing is answered
                await line.gone()
            await super()._answer(got, line)

    engines = [Freezing(behaviour=freezes)]
    gateway = await start(*engines, health={"abandon_s": 1})
    other = ScriptedEngine()
    await other.start()
    try:
        request = asyncio.create_task(session.post(gateway.url + CHAT, json=ask()))
        await frozen.wait()
        gateway.reload(engines=[*gateway.settings["engines"], {"url": other.url}])
        response = await request
        assert response.status == 200
        assert len(other.got) == 1
    finally:
        await other.stop()


async def test_retries_are_bounded_when_all_engines_fail(start, session):
    engines = [ScriptedEngine(behaviour=busy(503)) for _ in range(3)]
    gateway = await start(*engines)

    async def one() -> int:
        async with session.post(gateway.url + CHAT, json=ask()) as response:
            return response.status

    assert await asyncio.gather(*(one() for _ in range(100))) == [503] * 100
    assert 100 < sum(len(engine.got) for engine in engines) <= 100 + 20 + 10


async def test_connections_to_engines_are_kept_and_one_that_an_engine_closes_is_not_used(start, session):
    engine = ScriptedEngine()
    lines: set[Line] = set()

    async def counts(got: Got, line: Line) -> None:
        lines.add(line)
        await chat(got, line)
        if closes:
            line.writer.close()

    closes = False
    engine.behaviour = counts
    gateway = await start(engine, health={"probe_s": 3_600})
    for stream in (False, True) * 5:
        async with session.post(gateway.url + CHAT, json=ask(stream)) as response:
            assert response.status == 200 and await response.read()
    assert len(lines) == 1
    closes = True
    for stream in (False, True) * 5:
        async with session.post(gateway.url + CHAT, json=ask(stream)) as response:
            assert response.status == 200 and await response.read()
        await asyncio.sleep(0.02)  # so that the end of the connection has come
    assert len(lines) == 10
    await at_rest(gateway, session)


BODY = b"content-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
NO_ANSWER: dict[str, bytes] = {
    "a status above all": b"HTTP/1.1 999 OK\r\n" + BODY,
    "a status of six hundred": b"HTTP/1.1 600 OK\r\n" + BODY,
    "a status below all": b"HTTP/1.1 099 OK\r\n" + BODY,
    "a coding that nobody asked for": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nab",
    "two codings": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a length and a coding": CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n")
    + b"2\r\n{}\r\n0\r\n\r\n",
    "a folded header": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\n" + BODY,
    "bare line feeds": b"HTTP/1.1 200 OK\nx: a\n" + BODY,
    "a control character": b"HTTP/1.1 200 OK\r\nx: a\x01b\r\n" + BODY,
    "a length beyond all": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    "a chunk beyond all": CHUNKED + b"fffffffffffffffff\r\n",
    "a negative chunk": CHUNKED + b"-1\r\n",
}


def flood(head: bytes, part: bytes) -> Behaviour:
    """Answer with `head`, and with `part` again and again."""

    async def answer(got: Got, line: Line) -> None:
        await line.raw(head)
        with contextlib.suppress(OSError):
            while True:
                await line.raw(part * (1 + (1 << 16) // len(part)))

    return answer


FLOODS: dict[str, Behaviour] = {
    "notes before the answer": flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "early hints": flood(b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"),
    "extensions of a chunk": flood(CHUNKED + b"2", b";a=b"),
    "one extension of a chunk": flood(CHUNKED + b"2;a=", b"b"),
}


async def test_an_answer_that_is_not_http_never_reaches_a_client(start, session):
    engines = [ScriptedEngine(), ScriptedEngine()]
    gateway = await start(*engines)
    behaviours = {name: says(data) for name, data in NO_ANSWER.items()} | FLOODS
    for name, behaviour in behaviours.items():
        for engine in engines:
            engine.behaviour = chat
        for _ in range(4):  # with the next request they pay for one retry
            assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
        first_fails(behaviour, engines)
        async with session.post(gateway.url + CHAT, json=ask(stream=True)) as response:
            body = await response.read()
            assert response.status == 200, (name, body)
        assert body.endswith(b"[DONE]\n\n"), name
    assert resident_mb(gateway.pid) < 300
    assert "request_crashed" not in gateway.log.read_text()
    await at_rest(gateway, session)


ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "trailers": (b"0\r\n", b"x-t: " + b"y" * 1_000 + b"\r\n"),
    "one trailer": (b"0\r\nx-t: ", b"y"),
    "extensions": (b"2;a=", b"b"),
}


async def test_ends_of_answers_that_break_the_rules_harm_nobody(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine)
    # An end that does not end is cut.
    for name, (begin, more) in ENDLESS.items():
        head = CHUNKED.replace(b"application/json", b"text/event-stream") + b"a\r\ndata: {}\n\n\r\n"
        engine.behaviour = flood(head + begin, more)
        async with session.post(gateway.url + CHAT, json=ask(stream=True)) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                while await response.content.readany():
                    pass
        assert resident_mb(gateway.pid) < 300, name
    # What follows an answer belongs to nobody, though both arrive at once.
    second = b'HTTP/1.1 500 X\r\nx-second: 1\r\ncontent-length: 13\r\n\r\n{"of": "you"}'
    whole = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{"of":"me"}'[:-1]
    for after in (second, b"\0garbage", second[:30]):

        async def answers(got: Got, line: Line, after: bytes = after) -> None:
            if not got.document.get("stream"):
                await line.raw(whole + after)
                return
            await line.begin()
            await line.event(delta("a"))
            await asyncio.sleep(0.05)
            await line.raw(b"7\r\ndata: z\r\n0\r\n\r\n" + after)

        engine.behaviour = answers
        for _ in range(3):
            async with session.post(gateway.url + CHAT, json=ask()) as response:
                assert response.status == 200 and "x-second" not in response.headers
                assert await response.read() == b'{"of":"me"'
            async with session.post(gateway.url + CHAT, json=ask(stream=True)) as response:
                assert (await response.read()).endswith(b"\n\ndata: z")
    # An answer without a body may tell a length.
    for status in (204, 304):

        async def bare(got: Got, line: Line, status: int = status) -> None:
            await line.raw(b"HTTP/1.1 %d X\r\ncontent-length: 10\r\nx-a: b\r\n\r\n" % status)

        engine.behaviour = bare
        async with session.post(gateway.url + CHAT, json=ask()) as response:
            assert (response.status, response.headers["x-a"]) == (status, "b")
    assert "request_crashed" not in gateway.log.read_text()
    await at_rest(gateway, session)


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
    for number in range(80):
        prompt = {"model": "m", "prompt": [number // 8] * 2_000, "stream": number % 2 == 0}
        async with session.post(f"{gateway.url}/v1/completions", json=prompt) as response:
            assert response.status == 200
            await response.read()
    await at_rest(gateway, session)
    assert len(liar.got) > 4 and len(sound.got) > 4, "neither draws all requests nor loses them"
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


UPLOAD = HEAD + b"transfer-encoding: chunked\r\n\r\n"
PIECE = b'e\r\n{"model": "m"}\r\n'
BOMBS: dict[str, tuple[bytes, bytes]] = {
    "one header": (HEAD + b"x: ", b"y"),
    "many headers": (HEAD, b"x-a: " + b"y" * 500 + b"\r\n"),
    "many small headers": (HEAD, b"a:b\r\n"),
    "a path": (b"POST /v1/", b"y"),
    "trailers": (UPLOAD + PIECE + b"0\r\n", b"x-a: " + b"y" * 500 + b"\r\n"),
    "one trailer": (UPLOAD + PIECE + b"0\r\nx: ", b"y"),
    "extensions of a chunk": (UPLOAD + b"2;a=", b"b"),
    "empty lines": (b"", b"\r\n"),
}


async def test_requests_that_break_the_rules_cost_their_sender_only(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine)
    for name, (head, part) in BOMBS.items():
        answer = await asyncio.to_thread(bomb, gateway, head, part, 256 << 20)
        assert b" 200 " not in answer, name
        assert resident_mb(gateway.pid) < 300, name
    assert not engine.got
    assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
    engine.got.clear()
    # Trailers do not become headers.
    trailers = b"authorization: Bearer of-another\r\nx-data-parallel-rank: 1\r\nx-mine: 1\r\n\r\n"
    answer = await asyncio.to_thread(raw, gateway, UPLOAD + PIECE + b"0\r\n" + trailers)
    assert answer.startswith(b"HTTP/1.1 200 ")
    [got] = engine.got
    assert not {"authorization", "x-mine", "x-data-parallel-rank", "transfer-encoding"} & set(got.headers)
    assert got.body == b'{"model": "m"}'
    engine.got.clear()
    # A body is never decompressed.
    packed = gzip.compress(bytes(64 << 20), 1) + gzip.compress(json.dumps(ask()).encode())
    headers = {"Content-Encoding": "gzip"}
    async with session.post(gateway.url + CHAT, data=packed, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_json"
    assert not engine.got and resident_mb(gateway.pid) < 300
    # A client that closes one half gets its end.
    engine.behaviour = says(b"")
    body = json.dumps(ask(True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await at_rest(gateway, session)  # the engine never answers: the request has ended all the same


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
        timeouts={"first_byte_s": 1, "silence_s": 1},
        http={"stalled_s": 2},
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
    assert await status_of(session.post(gateway.url + CHAT, json=ask(), headers=bearer("blue"))) == 200, seed
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
