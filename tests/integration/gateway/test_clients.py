"""What clients that people use send beside plain requests, through a real Envoy."""

from __future__ import annotations

import asyncio
import gzip
import json
import os

import pytest

from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.integration.gateway.conftest import at_rest, status_of
from tests.integration.gateway.test_door import bearer, tenants
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration


async def test_a_browser_may_ask_first_without_a_key_and_reads_refusals(start, session, tmp_path):
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path))
    origin = {"Origin": "https://app.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with session.options(gateway.url + CHAT, headers={**origin, **asks}) as response:
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "authorization" in response.headers["access-control-allow-headers"]
    for headers, status in ((bearer("red"), 200), ({}, 401)):
        async with session.post(gateway.url + CHAT, json=ask(), headers={**origin, **headers}) as response:
            assert response.status == status
            assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert len(engine.got) == 1


async def test_a_compressed_body_reaches_the_engine_as_it_was(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine, policy="ttft")
    body = json.dumps(ask(user=os.urandom(1_500_000).hex())).encode()
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert await status_of(session.post(gateway.url + CHAT, data=gzip.compress(body), headers=headers)) == 200
    [got] = engine.got
    assert got.body == body and "content-encoding" not in got.headers
    bomb = gzip.compress(b"\0" * (64 << 20))
    assert await status_of(session.post(gateway.url + CHAT, data=bomb, headers=headers)) >= 400
    await at_rest(gateway, session)


async def test_no_model_is_refused_where_several_are_served_and_aliases_are_not_several(start, session):
    one, alias, other = ScriptedEngine("m"), ScriptedEngine("m"), ScriptedEngine("other")
    gateway = await start(one, alias)
    body = {name: value for name, value in ask().items() if name != "model"}
    assert await status_of(session.post(gateway.url + CHAT, json=body)) == 200
    async with other:
        gateway.reload(engines=[{"url": each.url} for each in (one, alias, other)])
        await gateway.until_engine(session, other.name, "up")
        async with session.post(gateway.url + CHAT, json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "model"


async def test_a_stored_response_is_its_tenants_alone(start, session, tmp_path):
    async def respond(got, line):
        """Give a response the id that is asked for, and call a tool with it on other paths."""
        call = {"type": "tool_use", "input": 1, "id": "resp_1"}
        is_chat = got.target == "/v1/messages"
        named = json.loads(got.body or b"{}").get("request_id", "resp_1")
        await line.answer({"content": [call]} if is_chat else {"id": named, "object": "response"})

    engine = ScriptedEngine(behaviour=respond)
    gateway = await start(engine, tenants=tenants(tmp_path))
    place, body = f"{gateway.url}/v1/responses", {"model": "m", "input": "x"}
    assert await status_of(session.post(place, json=body, headers=bearer("red"))) == 200
    assert (
        await status_of(session.post(f"{gateway.url}/v1/messages", json=body, headers=bearer("blue"))) == 200
    )
    for taken, status in (("resp_1", 400), ("resp_2", 200)):
        named = {**body, "request_id": taken}
        assert await status_of(session.post(place, json=named, headers=bearer("blue"))) == status
    await at_rest(gateway, session)
    engine.got.clear()
    for name, status in (("blue", 404), ("red", 200)):
        headers = bearer(name)
        assert await status_of(session.get(f"{place}/resp_1", headers=headers)) == status
        assert await status_of(session.post(f"{place}/resp_1/cancel", headers=headers)) == status
        further = {**body, "previous_response_id": "resp_1"}
        assert await status_of(session.post(place, json=further, headers=headers)) == status
    assert len(engine.got) == 3
    assert await status_of(session.get(f"{place}/resp_2", headers=bearer("blue"))) == 200


async def test_metrics_need_the_operators_token_where_there_are_tenants(start, session, tmp_path):
    gateway = await start(ScriptedEngine(), tenants=tenants(tmp_path))
    assert await status_of(session.get(gateway.url + "/metrics")) == 401
    assert await status_of(session.get(gateway.url + "/metrics", headers=bearer("red"))) == 401
    assert (await gateway.samples(session))["kvstrata_gateway_in_flight"] == 0


async def test_a_model_whose_only_engine_restarts_is_503_and_never_404(start, session):
    engine, other = ScriptedEngine("m"), ScriptedEngine("other")
    gateway = await start(engine, other)
    gateway.reload(engines=[{"url": other.url}])
    await gateway.until(session, "one is left", lambda page: len(page["engines"]) == 1)
    async with session.post(gateway.url + CHAT, json=ask()) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")
    assert await status_of(session.post(gateway.url + CHAT, json=ask(model="never"))) == 404


class Busy(ScriptedEngine):
    """An engine that answers requests, but no probe in time."""

    hangs = False

    async def _answer(self, got: Got, line: Line) -> None:
        if self.hangs and got.target in ("/health", "/v1/models"):
            await line.gone()
        else:
            await super()._answer(got, line)


async def test_requests_go_on_while_all_engines_are_too_busy_for_probes(start, session):
    engine = Busy()
    gateway = await start(engine, health={"timeout_s": 0.2})
    engine.hangs = True
    await gateway.until_engine(session, engine.name, "down")
    assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 200
    assert await status_of(session.get(gateway.url + "/readyz")) == 200
    await engine.stop()
    await gateway.until(
        session, "it is refused", lambda page: "cannot be reached" in page["engines"][0]["reason"]
    )
    assert await status_of(session.post(gateway.url + CHAT, json=ask())) == 503


class Sleeper(ScriptedEngine):
    """An engine that answers probes, and says that it sleeps."""

    sleeps = False

    async def _answer(self, got: Got, line: Line) -> None:
        if got.target == "/is_sleeping":
            await line.answer({"is_sleeping": self.sleeps})
        else:
            await super()._answer(got, line)


async def test_an_engine_that_sleeps_is_passed_over_until_it_wakes(start, session):
    sleeper, other = Sleeper(), ScriptedEngine()
    gateway = await start(sleeper, other, policy="round_robin")

    async def send(count: int) -> list[int]:
        return [await status_of(session.post(gateway.url + CHAT, json=ask())) for _ in range(count)]

    assert await send(4) == [200] * 4 and len(sleeper.got) == 2
    sleeper.sleeps = True
    await gateway.until_engine(session, sleeper.name, "down")
    assert await send(4) == [200] * 4 and len(sleeper.got) == 2
    sleeper.sleeps = False
    await gateway.until_engine(session, sleeper.name, "up")
    assert await send(20) == [200] * 20 and len(sleeper.got) > 2


async def test_another_engine_answers_for_one_that_has_just_lost_an_adapter(start, session):
    async def has_none(got: Got, line: Line) -> None:
        await line.answer({"error": {"message": "The model `sql` does not exist.", "code": 404}}, 404)

    loser, other = (ScriptedEngine("m", "sql") for _ in range(2))
    loser.behaviour = has_none
    gateway = await start(loser, other, policy="round_robin")
    for _ in range(4):
        assert await status_of(session.post(gateway.url + CHAT, json=ask(model="sql"))) == 200
    assert loser.got and len(other.got) == 4
    loser.models.remove("sql")
    await gateway.until(
        session, "the gateway knows it", lambda page: "sql" not in page["engines"][0]["models"]
    )
    other.behaviour = has_none
    async with session.post(gateway.url + CHAT, json=ask(model="sql")) as response:
        assert response.status == 404 and "does not exist" in await response.text(), "the engine's own"


async def test_clients_of_http_2_without_tls_send_and_read_streams(start, session):
    engine = ScriptedEngine()
    gateway = await start(engine)
    words = [
        "--http2-prior-knowledge",
        "--silent",
        "--show-error",
        "--write-out",
        "%{http_version} %{http_code}",
    ]
    for stream in (False, True):
        flags = ["--json", json.dumps(ask(stream)), gateway.url + CHAT]
        curl = await asyncio.create_subprocess_exec("curl", *words, *flags, stdout=asyncio.subprocess.PIPE)
        said = (await curl.communicate())[0].decode()
        assert said.endswith("2 200") and '"prompt_tokens": 11' in said
        assert ("data: [DONE]" in said) == stream
    assert len(engine.got) == 2
    await at_rest(gateway, session)


async def test_a_client_of_http_1_0_is_answered(start, session):
    """nginx asks so, unless its configuration says otherwise."""
    gateway = await start(ScriptedEngine())
    for stream in (False, True):
        body = json.dumps(ask(stream)).encode()
        head = (
            f"POST {CHAT} HTTP/1.0\r\nhost: localhost:{gateway.port}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode() + body)
        got = await reader.read()
        writer.close()
        assert got.split(b" ", 2)[1] == b"200", got
        assert got.endswith(b"data: [DONE]\n\n" if stream else b"}") and b"chunked" not in got
    await at_rest(gateway, session)
