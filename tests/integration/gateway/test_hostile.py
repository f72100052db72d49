"""Hostile bytes from both sides of a real gateway: each costs its own sender only, and counts come back to zero."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import socket
from collections.abc import Iterator

import aiohttp
import pytest

from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Behaviour, Got, Line, ScriptedEngine, delta
from tests.integration.gateway.test_door import HEAD, raw
from tests.integration.gateway.test_faults import at_rest, first_fails, resident_mb
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration

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


def says(data: bytes) -> Behaviour:
    """Answer with these bytes, and wait until the other end goes."""

    async def answer(got: Got, line: Line) -> None:
        await line.raw(data)
        await line.gone()

    return answer


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
    gateway = await start(*engines, retries={"budget_share": 1}, health={"failures": 100})
    behaviours = {name: says(data) for name, data in NO_ANSWER.items()} | FLOODS
    for name, behaviour in behaviours.items():
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
    gateway = await start(engine, health={"failures": 100})
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
    async with session.post(gateway.url + CHAT, json=ask()) as response:
        assert response.status == 200
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
