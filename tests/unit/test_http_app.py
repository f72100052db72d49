"""The admin API over an engine of plain values: routes, tokens, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from kvstrata.config.model import HttpSettings
from kvstrata.errors import ConfigError, StorageError, Unavailable
from kvstrata.process.listen import listen, read_token
from kvstrata.server.engine import Cleared
from kvstrata.server.http.app import make_app


class PlainAdapters:
    """One adapter, `fs-0`; answers with what it was asked."""

    async def rows(self) -> list[dict[str, Any]]:
        return [{"name": "fs-0"}]

    def missing(self) -> list[str]:
        return ["disk-0"]

    async def add(self, entry: dict[str, Any], **asked: Any) -> dict[str, Any]:
        if entry.get("type") == "wrong":
            raise ConfigError("adapter.type: unknown adapter 'wrong'", field="adapter.type")
        if entry.get("type") == "full":
            raise StorageError("fs-1: base_path: No space left on device", field="fs-1")
        return {"entry": entry, **asked}

    async def drain(self, name: str, **asked: Any) -> dict[str, Any] | None:
        return {"name": name, **asked} if name == "fs-0" else None

    async def resume(self, name: str, **asked: Any) -> dict[str, Any] | None:
        return {"name": name, **asked} if name == "fs-0" else None

    async def remove(self, name: str, **asked: Any) -> dict[str, Any] | None:
        return {"name": name, **asked} if name == "fs-0" else None

    def names(self) -> list[str]:
        return ["fs-0"]


class PlainEngine:
    """Answers with what it was asked."""

    def __init__(self) -> None:
        self.l2: PlainAdapters | None = PlainAdapters()
        self.registry = CollectorRegistry()
        Counter("things", "of a kind", registry=self.registry).inc()
        self.ready = (True, "")
        self.asked: list[Any] = []

    def readiness(self) -> tuple[bool, str]:
        return self.ready

    def status(self) -> dict[str, Any]:
        return {"epoch": 1}

    def explain(self, request_id: str) -> dict[str, Any] | None:
        return {"request_id": request_id} if request_id.startswith("known") else None

    async def prewarm(self, **asked: Any) -> int:
        self.asked.append(asked)
        if asked["model"] == "nobody":
            raise Unavailable("model: nobody attached with 'nobody'", field="model")
        return 7

    def job(self, number: int) -> dict[str, Any] | None:
        return {"job": 7} if number == 7 else None

    async def clear(self, tier: str, tenant: str | None, *, wait: bool = False) -> Cleared:
        return Cleared({tier: 3}, held=0 if wait else 2, leased=1, kept=4)

    def stranded(self) -> list[dict[str, Any]]:
        return [{"session": "ab"}]

    async def clear_stranded(self, session: str) -> list[dict[str, Any]]:
        return [{"session": session}]


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine()


def client(engine: PlainEngine, token: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(make_app(engine, token=token))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_every_route_answers(engine):
    async with client(engine) as http:
        assert (await http.get("/healthz")).json() == {"ok": True}
        assert (await http.get("/readyz")).status_code == 200
        assert "things_total 1.0" in (await http.get("/metrics")).text
        assert (await http.get("/v1/status")).json() == {"epoch": 1}
        assert (await http.get("/v1/explain/known/1")).json() == {"request_id": "known/1"}
        assert (await http.post("/v1/prefetch", json={"tokens": [1, 2]})).json() == {"job": 7}
        assert (await http.get("/v1/prefetch/7")).json() == {"job": 7}
        for wait, held in ((False, 2), (True, 0)):
            assert (await http.post("/v1/clear", json={"tier": "l1", "wait": wait})).json() == {
                "cleared": {"l1": 3}, "pending": {"held": held, "leased": 1}, "kept": {"pinned": 4},
            }  # fmt: skip
        assert (await http.get("/v1/stranded")).json() == {"stranded": [{"session": "ab"}]}
        cleared = await http.post("/v1/stranded/clear", json={"session": "ab"})
        assert cleared.json() == {"cleared": [{"session": "ab"}]}
        assert (await http.get("/openapi.json")).status_code == 200


@pytest.mark.parametrize("token", ["", "s" * 20])
async def test_adapters_are_listed_added_drained_and_removed(engine, token):
    path = "/v1/l2/adapters"
    async with client(engine, token) as http:
        http.headers["authorization"] = f"Bearer {token}"
        assert (await http.get(path)).json() == {"adapters": [{"name": "fs-0"}], "missing": ["disk-0"]}
        added = await http.post(path, json={"adapter": {"type": "fs"}, "position": 0, "backfill": True})
        assert added.status_code == 201
        assert added.json() == {
            "entry": {"type": "fs"}, "position": 0, "backfill": True, "may_name_code": bool(token),
        }  # fmt: skip
        drained = await http.post(f"{path}/fs-0/drain", json={"loads": False, "wait_s": 0.5})
        assert drained.json() == {"name": "fs-0", "loads": False, "wait_s": 0.5}
        resumed = await http.post(f"{path}/fs-0/resume", json={"backfill": True})
        assert resumed.json() == {"name": "fs-0", "backfill": True}
        assert (await http.post(f"{path}/fs-1/resume", json={})).status_code == 404
        removed = await http.delete(f"{path}/fs-0", params={"wait_s": 2})
        assert removed.json() == {"name": "fs-0", "wait_s": 2.0}
        for answer in (await http.delete(f"{path}/fs-1"), await http.post(f"{path}/fs-1/drain", json={})):
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
            assert "there are: fs-0" in answer.json()["message"]
        engine.l2 = None
        assert (await http.get(path)).status_code == 503


async def test_not_ready_is_503_and_says_why(engine):
    engine.ready = (False, "adopting the pool")
    async with client(engine) as http:
        answer = await http.get("/readyz")
    assert answer.status_code == 503 and answer.json() == {"ready": False, "why": "adopting the pool"}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/prefetch", {"tokens": [-1]}, 400, "tokens.0"),
        ("/v1/prefetch", {"tokens": "x"}, 400, "tokens"),
        ("/v1/prefetch", {}, 400, "tokens"),
        ("/v1/prefetch", {"tokens": [], "budget": 1}, 400, "budget"),
        ("/v1/prefetch", {"tokens": [1], "model": "nobody"}, 503, "model"),
        ("/v1/clear", {"tier": "l3"}, 400, "tier"),
        ("/v1/l2/adapters", {}, 400, "adapter"),
        ("/v1/l2/adapters", {"adapter": "fs"}, 400, "adapter"),
        ("/v1/l2/adapters", {"adapter": {}, "position": -1}, 400, "position"),
        ("/v1/l2/adapters", {"adapter": {"type": "wrong"}}, 400, "adapter.type"),
        ("/v1/l2/adapters", {"adapter": {"type": "full"}}, 422, "base_path"),
        ("/v1/l2/adapters/fs-0/drain", {"wait_s": 601}, 400, "wait_s"),
        ("/v1/l2/adapters/fs-0/resume", {"backfil": True}, 400, "backfil"),
    ],
)
async def test_a_wrong_body_names_the_field(engine, path, body, status, says):
    async with client(engine) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == status
    assert says in answer.json()["message"] and answer.json()["code"]


async def test_a_body_that_is_no_json_is_an_error(engine):
    async with client(engine) as http:
        answer = await http.post("/v1/clear", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["code"] == "bad_request"


async def test_unknown_things_are_404(engine):
    async with client(engine) as http:
        for path in ("/v1/explain/other", "/v1/prefetch/9", "/v2"):
            answer = await http.get(path)
            assert answer.status_code == 404 and answer.json()["code"] == "not_found", path


async def test_a_token_is_asked_of_everything_but_the_probes(engine):
    async with client(engine, token="s" * 20) as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.delete("/v1/l2/adapters/fs-0")).status_code == 401
        for path in ("/metrics", "/v1/status", "/v1/explain/known", "/v1/l2/adapters"):
            assert (await http.get(path)).status_code == 401, path
            right = {"authorization": f"Bearer {'s' * 20}"}
            assert (await http.get(path, headers=right)).status_code == 200, path


def test_off_loopback_needs_a_token(tmp_path):
    for host in ("127.0.0.1", "::1", "localhost"):
        assert read_token(HttpSettings(host=host), insecure=False) == ""
    with pytest.raises(ConfigError, match="token_file"):
        read_token(HttpSettings(host="0.0.0.0"), insecure=False)
    assert read_token(HttpSettings(host="0.0.0.0"), insecure=True) == ""
    short = tmp_path / "token"
    short.write_text("abc\n")
    with pytest.raises(ConfigError, match="at least 16"):
        read_token(HttpSettings(token_file=str(short)), insecure=False)
    short.write_text("t" * 32 + "\n")
    assert read_token(HttpSettings(token_file=str(short)), insecure=False) == "t" * 32


def test_a_taken_port_says_who_holds_it():
    with listen(HttpSettings(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"{port}.*held by pid \d+"):
            listen(HttpSettings(port=port))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/prefetch", {"tokens": [1], "tenant": "\ud800"}, "tenant"),
        ("/v1/l2/adapters", {"adapter": {"type": "x\udfff"}}, "adapter.type"),
        ("/v1/l2/adapters", {"adapter": {"hosts": [{"\ud800": 1}]}}, "adapter.hosts[0]"),
    ],
)
async def test_text_that_no_answer_could_contain_is_refused_by_name(engine, path, body, field):
    async with client(engine) as http:
        for content in (
            json.dumps(body).encode(),
            json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass"),
        ):
            answer = await http.post(path, content=content, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["field"]) == (400, field)
        pair = json.dumps({"tokens": [1], "tenant": "\U0001f600"}).encode()
        answer = await http.post("/v1/prefetch", content=pair, headers={"content-type": "application/json"})
        assert answer.status_code == 202
    assert engine.asked[-1]["request"].tenant == "\U0001f600"
