"""The admin API over parts of plain values: routes, tokens, and errors that name the field."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from kvstrata.config.model import HttpSettings
from kvstrata.errors import Unavailable
from kvstrata.process.http_gate import Access, guard, sized
from kvstrata.server.admin.clear import Cleared
from kvstrata.server.http.app import make_app


class Plain:
    """Parts of an instance that answer each request with its arguments."""

    def __init__(self) -> None:
        self.ready = (True, "")
        self.asked: list[Any] = []
        registry = CollectorRegistry()
        Counter("things", "of a kind", registry=registry).inc()
        self.collector = registry
        self.tiers = SimpleNamespace(rows=self._rows, pause=lambda name: {"name": name})
        self.explainer: Any = SimpleNamespace(explain=self._explained)
        self.prewarms = SimpleNamespace(prewarm=self._prewarm, job=self._job)
        self.clearing = SimpleNamespace(clear=self._clear)
        self.stranded = SimpleNamespace(rows=lambda: [{"session": "ab"}], clear=self._clear_stranded)
        self.board = SimpleNamespace(document=lambda: {"epoch": 1})

    async def _rows(self) -> list[dict[str, Any]]:
        return [{"name": "fs-0"}]

    def readiness(self) -> tuple[bool, str]:
        return self.ready

    def _explained(self, request_id: str) -> dict[str, Any]:
        return {"request_id": request_id, "known": request_id.startswith("known")}

    async def _prewarm(self, **asked: Any) -> int:
        self.asked.append(asked)
        if asked["model"] == "nobody":
            raise Unavailable("model: nobody attached with 'nobody'", field="model")
        return 7

    def _job(self, number: int) -> dict[str, Any] | None:
        return {"job": 7} if number == 7 else None

    async def _clear(self, tier: str, tenant: str | None, *, wait: bool = False) -> Cleared:
        return Cleared({tier: 3}, held=0 if wait else 2, leased=1, kept=4)

    def change_quota(self, tenant: str, quota_bytes: int) -> dict[str, Any]:
        return {"tenant": tenant, "quota_bytes": quota_bytes}

    async def _clear_stranded(self, session: str) -> list[dict[str, Any]]:
        return [{"session": session}]


@pytest.fixture
def admin() -> Plain:
    return Plain()


def client(admin: Plain, token: str = "") -> httpx.AsyncClient:
    app = make_app(cast(Any, admin))
    access = Access(HttpSettings(open_metrics=False), token)
    transport = httpx.ASGITransport(guard(sized(app, access), access))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_every_route_answers(admin):
    async with client(admin) as http:
        assert (await http.get("/healthz")).json() == {"ok": True}
        assert (await http.get("/readyz")).status_code == 200
        assert "things_total 1.0" in (await http.get("/metrics")).text
        assert (await http.get("/v1/status")).json() == {"epoch": 1}
        assert (await http.get("/v1/explain/known/1")).json()["request_id"] == "known/1"
        assert (await http.post("/v1/prefetch", json={"tokens": [1, 2]})).json() == {"job": 7}
        assert (await http.get("/v1/prefetch/7")).json() == {"job": 7}
        for wait, held in ((False, 2), (True, 0)):
            assert (await http.post("/v1/clear", json={"tier": "l1", "wait": wait})).json() == {
                "cleared": {"l1": 3}, "pending": {"held": held, "leased": 1}, "kept": {"pinned": 4},
            }  # fmt: skip
        quota = await http.put("/v1/tenants/blue/quota", json={"quota_gb": 0.5})
        assert quota.json() == {"tenant": "blue", "quota_bytes": 1 << 29}
        assert (await http.get("/v1/stranded")).json() == {"stranded": [{"session": "ab"}]}
        cleared = await http.post("/v1/stranded/clear", json={"session": "ab"})
        assert cleared.json() == {"cleared": [{"session": "ab"}]}
        assert (await http.get("/openapi.json")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/prefetch", {"tokens": [-1]}, 400, "tokens.0"),
        ("/v1/prefetch", {"tokens": "x"}, 400, "tokens"),
        ("/v1/prefetch", {}, 400, "tokens"),
        ("/v1/prefetch", {"tokens": [], "budget": 1}, 400, "budget"),
        ("/v1/prefetch", {"tokens": [1], "model": "nobody"}, 503, "model"),
        ("/v1/clear", {"tier": "l3"}, 400, "tier"),
    ],
)
async def test_a_wrong_body_names_the_field(admin, path, body, status, says):
    async with client(admin) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == status
    assert says in answer.json()["message"] and answer.json()["code"]


async def test_unknown_routes_jobs_and_adapters_are_404(admin):
    async with client(admin) as http:
        for path in ("/v1/explain/other", "/v1/prefetch/9", "/v2"):
            answer = await http.get(path)
            assert answer.status_code == 404 and answer.json()["code"] == "not_found", path


async def test_healthcheck_of_lmcache_answers_as_readyz_does(admin):
    async with client(admin, token="s" * 20) as http:
        answer = await http.get("/healthcheck", headers={"host": "a.pod.of.some.service"})
        assert (answer.status_code, answer.json()) == (200, {"status": "healthy"})
        admin.ready = (False, "adopting the pool")
        answer = await http.get("/readyz")
        assert answer.status_code == 503 and answer.json() == {"ready": False, "why": "adopting the pool"}
        answer = await http.get("/healthcheck")
        assert answer.status_code == 503
        assert answer.json() == {"status": "unhealthy", "reason": "adopting the pool"}


async def test_all_routes_but_the_probes_need_the_token(admin):
    async with client(admin, token="s" * 20) as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.post("/v1/l2/adapters/fs-0/pause")).status_code == 401
        for path in ("/metrics", "/v1/status", "/v1/explain/known", "/v1/l2/adapters"):
            assert (await http.get(path)).status_code == 401, path
            right = {"authorization": f"Bearer {'s' * 20}"}
            assert (await http.get(path, headers=right)).status_code == 200, path


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/prefetch", {"tokens": [1], "tenant": "\ud800"}, "tenant"),
        ("/v1/clear", {"tier": "l1", "tenant": "x\udfff"}, "tenant"),
    ],
)
async def test_text_that_no_answer_could_contain_is_refused_by_name(admin, path, body, field):
    async with client(admin) as http:
        for content in (
            json.dumps(body).encode(),
            json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass"),
        ):
            answer = await http.post(path, content=content, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["field"]) == (400, field)
        pair = json.dumps({"tokens": [1], "tenant": "\U0001f600"}).encode()
        answer = await http.post("/v1/prefetch", content=pair, headers={"content-type": "application/json"})
        assert answer.status_code == 202
    assert admin.asked[-1]["request"].tenant == "\U0001f600"
