"""The Envoy that a gateway starts: it lives and dies with the picker, and goes on while the picker does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvstrata.gateway.routes import ROUTES
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine, chat, delta
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import at_rest, folder_of, status_of
from tests.integration.gateway.test_door import bearer, tenants
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_the_gateway_and_its_envoy_end_together(start, session):
    gateway = await start(ScriptedEngine())
    pid = (await gateway.status(session))["envoy_pid"]
    assert runs(pid)
    folder = folder_of(pid)
    assert folder.stat().st_mode & 0o777 == 0o700
    gateway.kill()
    await eventually_async("Envoy is gone too", lambda: not runs(pid))
    await asyncio.to_thread(gateway.start)
    assert not folder.exists(), "what a gateway leaves that is killed, the next one removes"
    os.kill((await gateway.status(session))["envoy_pid"], signal.SIGKILL)
    assert await asyncio.to_thread(gateway.ends) == 70, "the keeper starts both again"
    assert "Envoy has ended with status -9" in gateway.log.read_text()
    await asyncio.to_thread(gateway.start)
    pid = (await gateway.status(session))["envoy_pid"]
    assert await asyncio.to_thread(gateway.stop) == 0 and not runs(pid)


async def endless(got: Got, line: Line) -> None:
    """Answer with one token, and then none."""
    await line.begin()
    await line.event(delta("a"))
    await line.gone()


async def only_one_is_under_way(gateway: GatewayProcess, session: aiohttp.ClientSession) -> None:
    def counted(page: dict[str, Any]) -> bool:
        counts = page["gateway"]["in_flight"], sum(one["in_flight"] for one in page["engines"])
        assert min(counts), "the one that is under way is not counted any more"
        return counts == (1, 1)

    await gateway.until(session, "the others are forgotten", counted)


@pytest.mark.usefixtures("patience_of_production")  # a busy machine changes which requests pass unasked only
async def test_requests_pass_a_picker_that_is_frozen_and_none_stays_counted(start, session):
    async def behaviour(got: Got, line: Line) -> None:
        await (endless if got.document.get("stream") else chat)(got, line)

    engines = [ScriptedEngine(behaviour=behaviour), ScriptedEngine(behaviour=behaviour)]
    gateway = await start(*engines)
    async with session.post(gateway.url + CHAT, json=ask(True)) as other:
        await other.content.readuntil(b"\n\n")
        with gateway.frozen():
            answers = [status_of(session.post(gateway.url + CHAT, json=ask())) for _ in range(20)]
            assert await asyncio.gather(*answers) == [200] * 20
        assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
        await only_one_is_under_way(gateway, session)
    await at_rest(gateway, session)
    assert sum(len(engine.got) for engine in engines) == 22


@pytest.mark.usefixtures("patience_of_production")
async def test_with_tenants_nobody_passes_a_picker_that_does_not_answer(start, session, tmp_path):
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path))
    with gateway.frozen():
        assert await status_of(session.post(gateway.url + CHAT, json=ask(), headers=bearer("red"))) == 503
    assert not engine.got


async def test_answers_go_on_while_envoy_cannot_be_told_of_engines(start, session):
    engines = [ScriptedEngine(behaviour=endless), ScriptedEngine()]
    gateway = await start(engines[0])
    async with session.post(gateway.url + CHAT, json=ask(True)) as other:
        await other.content.readuntil(b"\n\n")
        folder = folder_of((await gateway.status(session))["envoy_pid"])
        (folder / "engines.part").mkdir()  # as on a disk that is full
        async with engines[1]:
            gateway.reload(engines=[{"url": engine.url} for engine in engines])
            await gateway.until_engine(session, engines[1].name, "up")
            await eventually_async("it says so", lambda: "engines_not_written" in gateway.log.read_text())
            assert await status_of(session.get(f"{gateway.url}/readyz")) == 200
            (folder / "engines.part").rmdir()
            told = folder / "engines.json"
            await eventually_async("Envoy knows it", lambda: str(engines[1].port) in told.read_text())
            await engines[0].stop()
            assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body in a thousand pieces."""
    size = len(body) // 1_000
    for at in range(0, len(body), size):
        yield body[at : at + size]


async def test_a_tenants_kv_is_its_own(start, session, tmp_path):
    engine = ScriptedEngine()
    both: dict[str, Any] = {"red": {"kv_tenant": "red-kv"}, "blue": {}}
    gateway = await start(engine, tenants=tenants(tmp_path, **both))
    own = {"kv_transfer_params": {"kvstrata.tenant": "red-kv"}, "cache_salt": "red-kv"}
    for path, route in ROUTES.items():
        if route.computes and not route.multipart:
            expected = 200 if path not in ("/v2/embed", "/cohere/v2/chat") else 400
            engine.got.clear()
            status = await status_of(session.post(gateway.url + path, json=ask(), headers=bearer("red")))
            assert status == expected, path
            assert [got.document for got in engine.got] == [{**own, **ask()}] * (status == 200), path
            status = await status_of(session.post(gateway.url + path, json=ask(**own), headers=bearer("red")))
            assert status == 400, path
    for size in (1_000_000, 6_000_000):
        long = ask(user="x" * size)
        for body in (json.dumps(long).encode(), pieces(json.dumps(long).encode())):
            engine.got.clear()
            headers = {**bearer("red"), "Content-Type": "application/json"}
            assert await status_of(session.post(gateway.url + CHAT, data=body, headers=headers)) == 200
            assert [got.document for got in engine.got] == [{**own, **long}]
    engine.got.clear()
    assert await status_of(session.post(gateway.url + CHAT, json=ask(), headers=bearer("blue"))) == 200
    assert engine.got[-1].document == ask()
    for field in own:
        body = ask(
            user="x" * 2_000_000, **{field: own[field]}
        )  # behind what a picker without tenants would read
        async with session.post(gateway.url + CHAT, json=body, headers=bearer("red")) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == field
    assert len(engine.got) == 1


async def test_headers_of_envoy_and_of_the_picker_that_a_client_sends_change_nothing(start, session):
    engines = [ScriptedEngine(), ScriptedEngine()]
    gateway = await start(*engines, policy="round_robin")
    sent = {
        "x-gateway-destination-endpoint": engines[0].name,
        "x-kv-fragment": '"a":1,',
        "x-kv-number": "0",
        "x-data-parallel-rank": "1",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "x-envoy-retry-on": "5xx",
        "endpoint-load-metrics-format": "JSON",
    }
    for _ in range(4):
        assert await status_of(session.post(gateway.url + CHAT, json=ask(), headers=sent)) == 200
    assert [len(engine.got) for engine in engines] == [2, 2]
    for got in (one for engine in engines for one in engine.got):
        assert got.document == ask()
        assert not (sent.keys() - {"x-gateway-destination-endpoint", "x-kv-fragment", "x-kv-number"}) & set(
            got.headers
        )
    await at_rest(gateway, session)


async def test_a_client_that_leaves_while_its_engine_is_chosen_is_forgotten(start, session, tmp_path):
    gateway, same = await start(ScriptedEngine(behaviour=endless)), {"x-request-id": "same"}
    async with session.post(gateway.url + CHAT, json=ask(True), headers=same) as other:
        await other.content.readuntil(b"\n\n")
        for number in range(400):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(number % 40 / 10_000):
                    await status_of(session.post(gateway.url + CHAT, json=ask(True), headers=same))
        await only_one_is_under_way(gateway, session)
    await at_rest(gateway, session)


async def test_clients_of_http_2_and_of_websockets_are_answered(start, session):
    gateway = await start(ScriptedEngine())
    head = f"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1:{gateway.port}\r\nupgrade: websocket\r\n"
    head += "connection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head.encode())
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 426 ")
    writer.close()
    body = b'{"model":"m","messages":[]}'
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{gateway.port}\r\nconnection: Upgrade, HTTP2-Settings\r\n"
    )
    head += f"upgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head.encode() + body)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 "), "Java's client keeps its body"
    writer.close()
    await at_rest(gateway, session)
