"""Engines that fail in every way, and what clients get then."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import aiohttp
import pytest

from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Behaviour, Got, Line, ScriptedEngine, chat, delta
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration


async def dies(got: Got, line: Line) -> None:
    """Cut the connection before a byte is answered."""
    line.cut()


async def dies_after_head(got: Got, line: Line) -> None:
    """Cut the connection after the head of the answer."""
    await line.begin()
    line.cut()


async def garbage(got: Got, line: Line) -> None:
    """Answer with something else than HTTP."""
    await line.raw(b"\0\1\2 no HTTP\r\n\r\n")


async def long_header(got: Got, line: Line) -> None:
    """Answer with a header of 10 MB."""
    await line.raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000_000 + b"\r\n\r\n")


async def bad_length(got: Got, line: Line) -> None:
    """Answer with two lengths."""
    await line.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef")


def busy(status: int) -> Behaviour:
    """Refuse the request."""

    async def answer(got: Got, line: Line) -> None:
        await line.answer({"error": {"message": f"{status} from an engine"}}, status, "retry-after: 7\r\n")

    return answer


async def switches(got: Got, line: Line) -> None:
    """Switch to another protocol, which nobody asked for."""
    await line.raw(b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")


FAILURES: dict[str, Behaviour] = {
    "dies": dies,
    "dies after the head": dies_after_head,
    "garbage": garbage,
    "another protocol": switches,
    "a header of 10 MB": long_header,
    "two lengths": bad_length,
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
    gateway = await start(*engines, retries={"budget_share": 1})
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


async def at_rest(gateway: GatewayProcess, session: aiohttp.ClientSession) -> None:
    """Wait until nothing is under way."""

    async def counts() -> bool:
        status = await gateway.status(session)
        of_engines = [engine["in_flight"] for engine in status["engines"]]
        return not any([*of_engines, status["gateway"]["in_flight"], *status["tenants"].values()])

    await eventually_async("nothing is under way", counts)


async def test_a_failure_that_no_other_engine_mends_is_told(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine, health={"failures": 100})
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
        async with session.post(f"{gateway.url}/v1/responses", json=request) as response:
            assert response.status == 502
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

    gateway = await start(ScriptedEngine(behaviour=much), timeouts={"silence_s": 0.3})
    async with session.post(gateway.url + CHAT, json=ask(True)) as response:
        await asyncio.sleep(1.5)
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


def resident_mb(pid: int) -> float:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


async def test_an_engine_that_dies_gets_no_requests_until_it_answers_again(start, session):
    one, two = ScriptedEngine(), ScriptedEngine()
    gateway = await start(one, two, policy="round_robin", health={"slow_start_s": 3600})
    await one.stop()
    for _ in range(4):
        async with session.post(gateway.url + CHAT, json=ask()) as response:
            assert response.status == 200
    assert (len(one.got), len(two.got)) == (0, 4)
    await eventually_async("it is down", lambda: _state(gateway, session, one, "down"))
    two.healthy = False
    await eventually_async("the other one is down as well", lambda: _state(gateway, session, two, "down"))
    async with session.post(gateway.url + CHAT, json=ask()) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (await response.json())["error"]["code"] == "no_engine"
    for path, expected in (("/readyz", 503), ("/health", 503), ("/healthz", 200)):
        async with session.get(gateway.url + path) as response:
            assert response.status == expected
    await one.start()
    await eventually_async("it is up again", lambda: _state(gateway, session, one, "up"))
    async with session.post(gateway.url + CHAT, json=ask()) as response:
        assert response.status == 200
    assert len(one.got) == 1
    [share] = [row["share"] for row in (await gateway.status(session))["engines"] if row["name"] == one.name]
    assert 0.25 <= share < 0.3, "it has just come back"
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
        gateway.settings["engines"].append({"url": sound.url})
        gateway.write()
        gateway.signal(1)
        await eventually_async("the sound one is up", lambda: _state(gateway, session, sound, "up"))
        for body in (
            b"",
            b"{",
            b"[1]",
            b'{"data": [{"id": "\xff"}]}',
            b"[" * 200_000,
            b'{"data": ' + b"[" * 200_000,
        ):
            odd.models_body, probes = body, odd.probes

            async def probed_again(probes: int = probes) -> bool:
                return odd.probes >= probes + 3

            await eventually_async("it was probed", probed_again)
            assert await _state(gateway, session, odd, "down"), body[:40]
            async with session.post(gateway.url + CHAT, json=ask()) as response:
                assert response.status == 200
    finally:
        await odd.stop()


async def _state(
    gateway: GatewayProcess, session: aiohttp.ClientSession, engine: ScriptedEngine, state: str
) -> bool:
    rows = (await gateway.status(session))["engines"]
    return [row["state"] for row in rows if row["name"] == engine.name] == [state]


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
    gateway = await start(*engines, health={"timeout_s": 0.2, "abandon_s": 1})
    other = ScriptedEngine()
    await other.start()
    try:
        request = asyncio.create_task(session.post(gateway.url + CHAT, json=ask()))
        await frozen.wait()
        gateway.settings["engines"].append({"url": other.url})
        gateway.write()
        gateway.signal(1)
        response = await request
        assert response.status == 200
        assert len(other.got) == 1
    finally:
        await other.stop()


async def test_retries_are_bounded_when_all_engines_fail(start, session):
    engines = [ScriptedEngine(behaviour=busy(503)) for _ in range(3)]
    gateway = await start(*engines, retries={"budget_share": 0.1})

    async def one() -> int:
        async with session.post(gateway.url + CHAT, json=ask()) as response:
            return response.status

    assert await asyncio.gather(*(one() for _ in range(100))) == [503] * 100
    assert 100 < sum(len(engine.got) for engine in engines) <= 100 + 10 + 10


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
