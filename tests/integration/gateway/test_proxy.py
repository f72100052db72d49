"""What clients get through a real gateway from engines that answer."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import signal
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from yarl import URL

from tests.harness.scripted_engine import Got, Line, ScriptedEngine, chat, delta
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start, status_of

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"


def ask(stream: bool = False, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream, **more}


async def test_the_engine_gets_the_clients_bytes_and_the_client_the_engines(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine)
    body = json.dumps(ask(odd=[1, {"ü": "\U0001f600"}])).encode() + b"  "
    headers = {
        "Authorization": "Bearer of-the-engine",
        "X-Request-Id": "mine-1",
        "X-Custom": "kept",
        "Connection": "x-hop",
        "X-Hop": "dropped",
        "TE": "trailers",
    }
    target = URL(f"{gateway.url}{CHAT}?a=1%2F2&b", encoded=True)
    async with session.post(target, data=body, headers=headers) as response:
        assert response.status == 200
        assert response.headers["x-request-id"] == "mine-1"
        assert (await response.json())["id"] == "chatcmpl-1"
    [got] = engine.got
    assert (got.method, got.target, got.body) == ("POST", f"{CHAT}?a=1%2F2&b", body)
    assert got.headers["authorization"] == "Bearer of-the-engine"
    assert (got.headers["x-request-id"], got.headers["x-custom"]) == ("mine-1", "kept")
    assert not {"x-hop", "te", "transfer-encoding"} & set(got.headers)
    async with session.post(gateway.url + CHAT, json=ask(stream=True)) as response:
        assert response.content_type == "text/event-stream"
        events = (await response.read()).split(b"\n\n")
    assert [json.loads(one[6:])["choices"][0]["delta"]["content"] for one in events[:5]] == list("abcde")
    assert events[6:] == [b"data: [DONE]", b""]
    await gateway.until_sample(session, f"requests_total{{{engine_model_outcome(engine, 'ok')}}}", 2)
    for kind, count in {"prompt": 22, "cached": 14, "completion": 10}.items():
        of_kind = f'engine="{engine.name}",kind="{kind}",model="m",tenant=""'
        await gateway.until_sample(session, f"tokens_total{{{of_kind}}}", count)
    await gateway.until_sample(session, 'ttft_seconds_count{model="m"}', 2)


def engine_model_outcome(engine: ScriptedEngine, outcome: str) -> str:
    """Labels of a series of `kvstrata_gateway_requests_total`."""
    return f'engine="{engine.name}",model="m",outcome="{outcome}",tenant=""'


async def test_long_bodies_that_are_sent_at_once_reach_the_engine(start, session):
    """Envoy says of a tenth of them that the part which the picker reads is the whole."""
    engine = ScriptedEngine()
    gateway = await start(engine)
    body = json.dumps(ask(user="x" * 2_000_000)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )

    def sent() -> bytes:
        with socket.create_connection(("127.0.0.1", gateway.port)) as line:
            with contextlib.suppress(OSError):
                line.sendall(head.encode())
                line.sendall(body)
            return line.recv(12)

    assert {await asyncio.to_thread(sent) for _ in range(50)} == {b"HTTP/1.1 200"}
    assert len(engine.got) == 50 and all(got.body == body for got in engine.got)


async def test_parts_of_a_stream_come_as_they_are_made(start: Start, session: aiohttp.ClientSession) -> None:
    heard = asyncio.Event()

    async def stepwise(got: Got, line: Line) -> None:
        await line.begin()
        for text in "ab":
            await line.event(delta(text))
            await heard.wait()
            heard.clear()
        await line.end()

    gateway = await start(ScriptedEngine(behaviour=stepwise))
    async with session.post(gateway.url + CHAT, json=ask(stream=True)) as response:
        for text in "ab":
            part = await response.content.readuntil(b"\n\n")
            assert json.loads(part[6:]) == delta(text)
            heard.set()
        assert await response.content.read() == b""


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_hears_at_once_that_the_client_has_gone(start, session, stream):
    begun, gone = asyncio.Event(), asyncio.Event()

    async def endless(got: Got, line: Line) -> None:
        if stream:
            await line.begin()
            await line.event(delta("a"))
        begun.set()
        await line.gone()
        gone.set()

    engine = ScriptedEngine(behaviour=endless)
    gateway = await start(engine)
    request = asyncio.create_task(session.post(gateway.url + CHAT, json=ask(stream=stream)))
    await begun.wait()
    if stream:
        (await request).close()
    else:
        request.cancel()
    async with asyncio.timeout(30):
        await gone.wait()

    async def counted() -> bool:
        status = await gateway.status(session)
        samples = await gateway.samples(session)
        outcome = engine_model_outcome(engine, "cancelled")
        counts = [engine["in_flight"] for engine in status["engines"]] + [status["gateway"]["in_flight"]]
        return samples.get(f"kvstrata_gateway_requests_total{{{outcome}}}") == 1 and counts == [0, 0]

    await eventually_async("the request has ended", counted)


async def test_requests_behind_a_stream_on_one_connection_are_answered_after_it(start, session):
    go_on, gone = asyncio.Event(), asyncio.Event()

    async def slow(got: Got, line: Line) -> None:
        await line.begin()
        await line.event(delta(got.document["user"]))
        if got.document["user"] == "last":
            await line.gone()
            gone.set()
            return
        await go_on.wait()
        await line.end()

    gateway = await start(ScriptedEngine(behaviour=slow))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    for user in ("first", "second", "last"):
        body = json.dumps(ask(stream=True, user=user)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
    await reader.readuntil(b"first")
    go_on.set()
    rest = await reader.readuntil(b"last")
    assert rest.count(b"HTTP/1.1 200") == 2 and rest.index(b"0\r\n\r\n") < rest.index(b"second")
    writer.close()
    async with asyncio.timeout(30):
        await gone.wait()

    async def counted() -> bool:
        samples = await gateway.samples(session)
        totals = {
            name: n for name, n in samples.items() if name.startswith("kvstrata_gateway_requests_total")
        }
        return sum(n for name, n in totals.items() if 'outcome="cancelled"' in name) == 1

    await eventually_async("the last request counts as cancelled", counted)


async def test_models_are_merged_and_requests_go_where_their_model_is(start, session):
    one, two = ScriptedEngine("m", "m-lora"), ScriptedEngine("m", "other")
    gateway = await start(one, two)
    async with session.get(f"{gateway.url}/v1/models") as response:
        assert sorted(entry["id"] for entry in (await response.json())["data"]) == ["m", "m-lora", "other"]
    async with session.get(f"{gateway.url}/v1/models/other") as response:
        assert (await response.json())["id"] == "other"
    for _ in range(3):
        for model in ("m-lora", "other"):
            assert await status_of(session.post(gateway.url + CHAT, json=ask(model=model))) == 200
    assert [got.document["model"] for got in one.got] == ["m-lora"] * 3
    assert [got.document["model"] for got in two.got] == ["other"] * 3
    async with session.post(gateway.url + CHAT, json=ask(model="absent")) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"
    form = aiohttp.FormData()
    form.add_field("file", b"\0" * 100_000, filename="a.wav")
    form.add_field("model", "other")

    async def transcribe(got: Got, line: Line) -> None:
        await line.answer({"text": "hello"})

    one.behaviour = two.behaviour = transcribe
    async with session.post(f"{gateway.url}/v1/audio/transcriptions", data=form) as response:
        assert await response.json() == {"text": "hello"}
    assert two.got[-1].target == "/v1/audio/transcriptions"


async def test_a_dns_name_stands_for_an_engine_at_each_address(start, session):
    engine = ScriptedEngine()
    async with engine:
        urls = [f"dns+http://localhost:{engine.port}", "dns+http://absent.invalid:8000"]
        gateway = await start(engine, urls=urls)
        assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
        rows = {row["name"]: row["state"] for row in (await gateway.status(session))["engines"]}
        assert rows[f"localhost:{engine.port}/127.0.0.1"] == "up"
        assert not any(name.startswith("absent") for name in rows)
        assert "name_not_resolved" in await asyncio.to_thread(gateway.log.read_text)


async def test_an_engine_with_tls_is_checked_against_known_authorities(start, session, tmp_path, monkeypatch):
    authority = certificate(tmp_path / "engine.pem")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority)
    engine = ScriptedEngine(tls=tls)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    await engine.start()
    gateway = await start(engine, urls=[f"https://localhost:{engine.port}"])
    for stream in (False, True):
        async with session.post(gateway.url + CHAT, json=ask(stream)) as response:
            assert response.status == 200 and await response.read()
    for others in ("", str(tmp_path / "none")):  # those of this host; none, as in a small container
        gateway.kill()
        monkeypatch.setenv("SSL_CERT_FILE", others)
        await asyncio.to_thread(gateway.start)
        [row] = (await gateway.status(session))["engines"]
        assert row["state"] == "down" and "certificate verify failed" in row["reason"].lower()
        assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 503


def certificate(path: Path) -> Path:
    """Write a key and a certificate for localhost that it has signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + built.public_bytes(pem)
    )
    return path


async def test_policies_choose_as_they_say(start: Start, session: aiohttp.ClientSession) -> None:
    engines = [ScriptedEngine() for _ in range(3)]
    gateway = await start(*engines, policy="session")
    for session_id in ("s1", "s2", "s3", "s4"):
        for body in (ask(), ask(user="somebody else")):
            headers = {"x-session-id": session_id}
            assert await status_of(session.post(gateway.url + CHAT, json=body, headers=headers)) == 200
    by_session: dict[str, set[str]] = {}
    for engine in engines:
        for got in engine.got:
            by_session.setdefault(got.headers["x-session-id"], set()).add(engine.name)
    assert [len(names) for names in by_session.values()] == [1] * 4
    gateway.reload(policy="round_robin")
    await eventually_async("reloaded", lambda: "reloaded changed=policy" in gateway.log.read_text())
    before = [len(engine.got) for engine in engines]
    for _ in range(6):
        assert await status_of(session.post(gateway.url + CHAT, json=ask(user="one session"))) == 200
    assert [len(engine.got) - count for engine, count in zip(engines, before, strict=True)] == [2, 2, 2]


async def test_a_reload_brings_engines_and_lets_others_finish(start, session):
    finish = asyncio.Event()

    async def slow(got: Got, line: Line) -> None:
        await finish.wait()
        await chat(got, line)

    old, new = ScriptedEngine(behaviour=slow), ScriptedEngine()
    gateway = await start(old)
    await new.start()
    try:
        request = asyncio.create_task(session.post(gateway.url + CHAT, json=ask()))
        await eventually_async("the request is under way", lambda: len(old.got) == 1)
        gateway.reload(engines=[{"url": new.url}])
        await gateway.until_engine(session, new.name, "up")
        assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
        assert len(new.got) == 1
        finish.set()
        assert (await request).status == 200
        await gateway.until(
            session,
            "the old engine is gone",
            lambda page: [one["name"] for one in page["engines"]] == [new.name],
        )
        gateway.reload(engines=[])
        await eventually_async(
            "the fault is logged",
            lambda: 'reload_failed reason="engines: no engine is named' in gateway.log.read_text(),
        )
        assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
    finally:
        await new.stop()


async def test_a_stop_lets_requests_end_and_serves_those_that_still_come(start, session):
    finish = asyncio.Event()

    async def slow(got: Got, line: Line) -> None:
        await line.begin()
        await line.event(delta("a"))
        await finish.wait()
        await line.event(delta("b"))
        await line.end()

    engine = ScriptedEngine(behaviour=slow)
    gateway = await start(engine)
    async with session.post(gateway.url + CHAT, json=ask(stream=True)) as response:
        assert await response.content.readuntil(b"\n\n")
        gateway.signal(signal.SIGTERM)
        await eventually_async("the stop waits", lambda: "stop_waits requests=1" in gateway.log.read_text())
        assert await status_of(session.get(gateway.url + "/readyz")) == 503
        async with aiohttp.ClientSession() as other, other.get(gateway.url + "/v1/models") as models:
            assert (models.status, models.headers.get("connection")) == (200, "close")
        finish.set()
        assert (await response.read()).endswith(b'"b"}}]}\n\n')
    assert await asyncio.to_thread(gateway.ends) == 0
    assert "requests_cut=0" in gateway.log.read_text()


async def test_a_stopped_gateway_serves_on_for_those_that_have_not_heard_of_it(start, session):
    gateway = await start(ScriptedEngine())
    assert await status_of(session.get(gateway.url + "/readyz")) == 200
    gateway.signal(signal.SIGTERM)
    await eventually_async("it waits", lambda: "stop_waits requests=0" in gateway.log.read_text())
    async with aiohttp.ClientSession() as other:
        assert await status_of(other.post(gateway.url + CHAT, json=ask())) == 200
        assert await status_of(other.get(gateway.url + "/readyz")) == 503
    gateway.signal(signal.SIGTERM)
    assert await asyncio.to_thread(gateway.ends) == 128 + signal.SIGTERM


async def test_a_stored_response_is_asked_of_the_engine_that_made_it(start, session):
    def behaviour(number: int) -> Any:
        async def respond(got: Got, line: Line) -> None:
            await line.answer({"id": f"resp_{number}", "object": "response"})

        return respond

    engines = [ScriptedEngine(behaviour=behaviour(number)) for number in range(3)]
    gateway = await start(*engines, policy="round_robin")
    for _ in engines:
        assert (
            await status_of(session.post(f"{gateway.url}/v1/responses", json={"model": "m", "input": "x"}))
            == 200
        )
    for number, engine in enumerate(engines):
        name = f"resp_{number}"
        assert await status_of(session.get(f"{gateway.url}/v1/responses/{name}")) == 200
        assert await status_of(session.post(f"{gateway.url}/v1/responses/{name}/cancel")) == 200
        body = {"model": "m", "input": "y", "previous_response_id": name}
        assert await status_of(session.post(f"{gateway.url}/v1/responses", json=body)) == 200
        assert [got.target for got in engine.got[1:]] == [
            f"/v1/responses/{name}",
            f"/v1/responses/{name}/cancel",
            "/v1/responses",
        ]
