"""Who may use a real gateway, how much, who waits in its queue, and what hostile clients reach."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvstrata.cli import gateway as command
from tests.harness.gateway_process import GatewayProcess
from tests.harness.other_user import as_nobody
from tests.harness.scripted_engine import Got, Line, ScriptedEngine, chat
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start, at_rest, envoy_mb, folder_of, status_of
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration

KEYS = {"red": "key-of-the-red-tenant", "blue": "key-of-the-blue-tenant"}


def tenants(folder: Path, **more: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of the tenants `red` and `blue`; `more` by name."""
    for name, key in KEYS.items():
        path = folder / f"{name}.key"
        path.touch(0o600)
        path.write_text(key)
    return [{"name": name, "key_file": str(folder / f"{name}.key"), **more.get(name, {})} for name in KEYS]


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def test_with_tenants_only_their_keys_open_the_door_and_no_engine_sees_them(start, session, tmp_path):
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path))
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer of-somebody"},
        {"Authorization": KEYS["red"]},
    ]
    for headers in wrong:
        for send in (
            session.post(gateway.url + CHAT, json=ask(), headers=headers),
            _models(gateway, session, headers),
        ):
            async with send as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] in ("missing_api_key", "invalid_api_key")
    for headers in (bearer("red"), {"x-api-key": KEYS["blue"]}):
        assert await status_of(session.post(gateway.url + CHAT, json=ask(), headers=headers)) == 200
    assert not any({"authorization", "x-api-key"} & set(got.headers) for got in engine.got)
    for name in KEYS:
        await gateway.until_sample(session, f'slo_requests_total{{slo="",tenant="{name}"}}', 1)
    log = gateway.log.read_text()
    assert not any(key in log for key in KEYS.values())
    assert "hello" not in log, "no prompt is logged"


def _models(gateway: GatewayProcess, session: aiohttp.ClientSession, headers: dict[str, str]) -> Any:
    return session.get(f"{gateway.url}/v1/models", headers=headers)


async def test_a_tenants_limits_hold_for_it_alone_and_refusals_count_as_missed(start, session, tmp_path):
    finish = asyncio.Event()

    async def slow(got: Got, line: Line) -> None:
        if b"slow" in got.body:
            await finish.wait()
        await chat(got, line)

    gateway = await start(
        ScriptedEngine(behaviour=slow),
        slo=[{"name": "chat", "ttft_ms": 60_000}, {"name": "never", "ttft_ms": 0.001}],
        tenants=tenants(
            tmp_path,
            red={"requests_per_s": 0.001, "burst": 3, "slo": "chat"},
            blue={"max_in_flight": 2, "slo": "chat"},
        ),
    )

    async def outcome_of(name: str, **more: Any) -> tuple[int, str]:
        async with session.post(gateway.url + CHAT, json=ask(**more), headers=bearer(name)) as response:
            document = await response.json()
            return response.status, document.get("error", {}).get("code", "")

    assert [await outcome_of("red") for _ in range(4)] == [(200, "")] * 3 + [(429, "tenant_rate")]
    waiting = [asyncio.create_task(outcome_of("blue", user="slow")) for _ in range(2)]
    await gateway.until(session, "two are under way", lambda status: status["tenants"]["blue"] == 2)
    assert await outcome_of("blue") == (429, "tenant_in_flight")
    finish.set()
    assert await asyncio.gather(*waiting) == [(200, "")] * 2
    headers = {**bearer("blue"), "x-slo-class": "never"}
    assert await status_of(session.post(gateway.url + CHAT, json=ask(), headers=headers)) == 200
    await at_rest(gateway, session)
    rows = {
        (row["tenant"], row["slo"]): (row["requests"], row["met"])
        for row in (await gateway.status(session))["slo"]
    }
    assert rows == {("red", "chat"): (4, 3), ("blue", "chat"): (3, 2), ("blue", "never"): (1, 0)}


async def test_a_web_page_of_another_site_cannot_use_a_port_without_keys(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine)
    for headers, code in (
        ({"Host": "evil.example"}, "unknown_host"),
        ({"Origin": "https://evil.example"}, "unknown_origin"),
        ({"Sec-Fetch-Site": "cross-site"}, "unknown_origin"),
    ):
        async with session.post(gateway.url + CHAT, json=ask(), headers=headers) as response:
            assert response.status == 403
            assert (await response.json())["error"]["code"] == code
    assert not engine.got


async def test_pages_of_operators_need_their_token(start, session, tmp_path):
    gateway = await start(ScriptedEngine(), tenants=tenants(tmp_path), http={"open_metrics": False})
    for path in ("/metrics", "/gateway/status"):
        for headers in ({}, bearer("red")):
            assert await status_of(session.get(gateway.url + path, headers=headers)) == 401
        async with session.get(
            gateway.url + path, headers={"Authorization": f"Bearer {gateway.token}"}
        ) as response:
            assert response.status == 200


BAD_BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "invalid_json"),
    "no JSON": (b"{", "invalid_json"),
    "a list": (b"[1]", "invalid_body"),
    "a number as model": (b'{"model": 7}', "invalid_model"),
    "a long model": (b'{"model": "' + b"m" * 2_000 + b'"}', "invalid_model"),
    "deep": (b'{"a":' + b"[" * 100_000, "invalid_json"),
    "no UTF-8": (b'{"model": "\xff"}', "invalid_json"),
}


async def test_a_bad_request_gets_an_error_that_says_what_is_wrong(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine)
    for name, (body, code) in BAD_BODIES.items():
        for path in (CHAT, "/v1/messages"):
            async with session.post(gateway.url + path, data=body) as response:
                assert response.status == 400, name
                error = (await response.json())["error"]
                assert error["type"] == "invalid_request_error", name
                assert error["message"], name
                if path == CHAT:
                    assert error["code"] == code, name
    for method, path, status in (
        ("POST", "/v1/nonsense", 404),
        ("POST", "/sleep", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("GET", CHAT, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/v1/responses/resp_1", 405),
        ("POST", "/v1/responses/a/../../sleep/cancel", 404),
        ("OPTIONS", CHAT, 405),
    ):
        async with session.request(method, gateway.url + path, data=b"{}") as response:
            assert response.status == status, (method, path)
            assert (await response.json())["error"]["message"], (method, path)
    assert await status_of(session.post(gateway.url + CHAT, data=b" " * (65 << 20))) == 413
    assert not engine.got
    await at_rest(gateway, session)


def raw(gateway: GatewayProcess, text: bytes) -> bytes:
    """Send bytes on a connection of their own; return everything that comes until the gateway closes it."""
    got = b""
    with socket.create_connection(("127.0.0.1", gateway.port), 30) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(text)
        with contextlib.suppress(OSError):
            while part := connection.recv(65_536):
                got += part
    return got


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
INNER = b"POST /sleep HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
SMUGGLED: dict[str, bytes] = {
    "both lengths": HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
    "two lengths": HEAD + b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(INNER) + INNER,
    "two codings": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + INNER,
}


async def test_no_request_is_smuggled_past_the_gateway(start: Start, session: aiohttp.ClientSession) -> None:
    engine = ScriptedEngine()
    gateway = await start(engine)
    for name, text in SMUGGLED.items():
        answer = await asyncio.to_thread(raw, gateway, text)
        assert not answer or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ")), (name, answer)
    assert not engine.got, [got.target for got in engine.got]
    await at_rest(gateway, session)


async def test_slow_clients_cost_only_themselves(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine, timeouts={"silence_s": 1})
    answer = await asyncio.to_thread(raw, gateway, HEAD + b"content-length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 "), "cut as late"
    half = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(100)]
    try:
        for number, connection in enumerate(half):
            with contextlib.suppress(OSError):  # cut already, since too many are open
                connection.sendall([b"POST ", HEAD, HEAD + b"content-length: 100\r\n\r\n{"][number % 3])

        async def answered() -> (
            bool
        ):  # the engine is this process, which a busy machine may stop for a second
            return await status_of(session.post(gateway.url + CHAT, json=ask())) == 200

        await eventually_async("others are answered", answered)
    finally:
        for connection in half:
            connection.close()

    async def much(got: Got, line: Line) -> None:
        await line.begin()
        while True:
            await line.part(b"data: " + b"x" * 65_536 + b"\n\n")

    engine.behaviour = much
    text = HEAD + b'content-length: 30\r\n\r\n{"model": "m", "stream": true}'
    with socket.create_connection(("127.0.0.1", gateway.port)) as deaf:
        deaf.sendall(text)
        labels = f'engine="{engine.name}",model="m",outcome="broke_off",tenant=""'
        await gateway.until_sample(session, f"requests_total{{{labels}}}", 1)
    assert await envoy_mb(gateway, session) < 400
    await at_rest(gateway, session)


async def test_a_strangers_long_body_is_refused_before_it_comes(start, session, tmp_path):
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path))
    packed = b"content-encoding: gzip\r\ncontent-length: 100"
    for length in (b"content-length: 50000000", b"transfer-encoding: chunked", packed):
        for key in (b"", b"authorization: Bearer x\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(HEAD + key + length + b"\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
            writer.close()
    body = json.dumps(ask(user="x" * 3_000_000)).encode()
    assert await status_of(session.post(gateway.url + CHAT, data=body, headers=bearer("red"))) == 200
    assert engine.got[0].body == body
    headers = {**bearer("red"), "Content-Encoding": "gzip", "Content-Type": "application/json"}
    for size, status in ((1_000_000, 200), (10_000_000, 413)):
        packed = gzip.compress(json.dumps(ask(user=random.Random(1).randbytes(size // 2).hex())).encode())
        assert await status_of(session.post(gateway.url + CHAT, data=packed, headers=headers)) == status
    await at_rest(gateway, session)


async def test_a_reload_cannot_open_a_port_that_others_reach(start, session, tmp_path):
    gateway = await start(ScriptedEngine(), tenants=tenants(tmp_path), http={"host": "0.0.0.0"})
    gateway.expect("port_without_tls", "host=0.0.0.0", f"port={gateway.port}")
    gateway.reload(tenants=[], http={"host": "127.0.0.1"})
    await eventually_async("the reload is refused", lambda: "reload_failed" in gateway.log.read_text())
    assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 401


async def test_a_reload_cannot_change_whether_clients_need_keys(start, session, tmp_path):
    """Envoy was told at the start what to do with requests whose keys nobody checks."""
    gateway = await start(ScriptedEngine())
    gateway.reload(tenants=tenants(tmp_path), policy="round_robin")
    await eventually_async("the reload is refused", lambda: "reload_failed" in gateway.log.read_text())
    assert "tenants: whether clients need keys is fixed at the start" in gateway.log.read_text()
    assert (await gateway.status(session))["gateway"]["policy"] == "auto"


def test_the_file_to_start_from_is_sound(capfd: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[3] / "configs" / "gateway.yaml"
    assert command.main(["--no-supervise", "--config", str(file), "--check"]) == 0
    assert '"url": "http://127.0.0.1:8002"' in capfd.readouterr().out


class Held:
    """An engine whose answers begin when the test says so."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.engine = ScriptedEngine(behaviour=self.behave)

    async def behave(self, got: Got, line: Line) -> None:
        """Answer a chat, once that may be."""
        await self.open.wait()
        await chat(got, line)


async def queued(gateway: GatewayProcess, session: aiohttp.ClientSession, count: int) -> None:
    await gateway.until(session, f"{count} wait", lambda status: status["queue"]["requests"] == count)


async def test_requests_wait_here_while_the_engine_has_enough_and_a_client_that_leaves_waits_no_longer(
    start: Start, session: aiohttp.ClientSession
) -> None:
    held = Held()
    gateway = await start(
        held.engine,
        policy="ttft",
        slo=[{"name": "quick", "ttft_ms": 300, "shed": True}],
        queue={"ahead_s": 0.0, "max_requests": 3},
    )

    async def sent(slo: str = "") -> tuple[int, str]:
        body = ask(stream=True)
        async with session.post(gateway.url + CHAT, json=body, headers={"X-SLO-Class": slo}) as response:
            text = await response.text()
            return response.status, text

    assert (await sent())[0] == 200, "this measures the engine's rate"
    await at_rest(gateway, session)
    held.open.clear()
    tasks = [asyncio.create_task(sent()) for _ in range(4)]
    await queued(gateway, session, 2)
    await eventually_async("the engine has as many as it may have", lambda: len(held.engine.got) == 3)
    status, text = await sent("quick")
    assert status == 429 and "slo_unreachable" in text, "its deadline has passed in the queue"
    leaver = asyncio.create_task(sent())
    await queued(gateway, session, 3)
    status, text = await sent()
    assert status == 429 and "queue_full" in text
    leaver.cancel()
    await queued(gateway, session, 2)
    held.open.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 4
    assert len(held.engine.got) == 5
    await at_rest(gateway, session)
    await queued(gateway, session, 0)
    await gateway.until_sample(session, 'queue_seconds_count{tenant=""}', 4)


async def test_a_tenants_tokens_are_limited_and_count_at_least_as_a_quarter_of_the_body(
    start, session, tmp_path
):
    engine = ScriptedEngine()
    limits = {"red": {"tokens_per_s": 0.001, "tokens_burst": 60}}
    gateway = await start(engine, tenants=tenants(tmp_path, **limits))

    async def outcome_of(name: str, **more: Any) -> tuple[int, str]:
        async with session.post(gateway.url + CHAT, json=ask(**more), headers=bearer(name)) as response:
            document = await response.json()
            return response.status, document.get("error", {}).get("code", "")

    assert await outcome_of("red") == (200, "")
    await at_rest(gateway, session)
    found = await gateway.samples(session)
    used = found['kvstrata_gateway_tenant_used_tokens{tenant="red"}']
    assert 0 <= len(json.dumps(ask())) // 4 - used < 0.1, "more than the 16 tokens that the engine tells"

    async def empty(got: Got, line: Line) -> None:
        await line.begin()
        await line.event({"choices": [], "usage": {"prompt_tokens": 29, "completion_tokens": 1}})
        await line.end()

    engine.behaviour, spent = empty, used
    short = {"model": "m", "prompt": "a", "stream": True}
    async with session.post(f"{gateway.url}/v1/completions", json=short, headers=bearer("red")) as response:
        assert response.status == 200, await response.text()
        await response.read()
    await at_rest(gateway, session)
    used = (await gateway.samples(session))['kvstrata_gateway_tenant_used_tokens{tenant="red"}']
    assert 0 <= spent + 30 - used < 0.1, "an answer without content has taken its prompt"
    engine.behaviour = chat
    long = {"messages": [{"role": "user", "content": "word " * 30}]}
    assert await outcome_of("red", **long) == (429, "tenant_tokens")
    assert await outcome_of("blue", **long) == (200, "")


async def test_engines_on_unix_sockets_are_chosen_and_replace_each_other(start, session, tmp_path):
    engines = [ScriptedEngine(path=str(tmp_path / name)) for name in "ab"]
    gateway = await start(*engines, policy="session")

    async def send() -> int:
        return await status_of(session.post(gateway.url + CHAT, json=ask(), headers={"x-session-id": "one"}))

    assert [await send() for _ in range(16)] == [200] * 16
    assert sorted(len(engine.got) for engine in engines) == [0, 16]
    engines.sort(key=lambda engine: len(engine.got))
    assert engines[1].got[0].headers["host"] == "localhost"
    await at_rest(gateway, session)
    rows = (await gateway.status(session))["engines"]
    assert {row["name"]: row["sent"] for row in rows} == {engines[0].name: 0, engines[1].name: 16}
    await engines[1].stop()
    assert [await send() for _ in range(4)] == [200] * 4
    assert len(engines[0].got) == 4


@pytest.fixture
def open_folder() -> Iterator[str]:
    """A folder that any user may write to."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield folder


@pytest.mark.parametrize("kind", ["port", "socket"])
async def test_a_process_of_another_user_in_an_engines_place_gets_no_request(
    start, session, open_folder, kind
):
    engine = ScriptedEngine(path=f"{open_folder}/engine" if kind == "socket" else "")
    gateway = await start(engine)
    await engine.stop()
    if engine.path:
        os.unlink(engine.path)
    await gateway.until_engine(session, engine.name, "down")
    with as_nobody() as uid:
        await engine.start()
    what = f"uid {uid} listens at its address"
    await gateway.until(session, what, lambda page: what in page["engines"][0]["reason"])
    probes = engine.probes  # one may have asked the kernel before somebody listened
    assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 503
    told = folder_of((await gateway.status(session))["envoy_pid"]) / "engines.json"
    assert json.loads(told.read_text())["resources"][0]["endpoints"] == [], (
        "Envoy does not choose it by itself"
    )
    assert (engine.got, engine.probes) == ([], probes)
    gateway.reload(engines=[{"url": engine.url, "user": str(uid)}])
    await gateway.until_engine(session, engine.name, "up")
    assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
