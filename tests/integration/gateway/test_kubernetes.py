"""A real gateway whose engines a service of Kubernetes names, before an API server that the test plays."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest

from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import until
from tests.integration.gateway.test_proxy import certificate

pytestmark = pytest.mark.integration

PATH = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"


def slice_of(name: str, *engines: ScriptedEngine, ready: bool | None = True) -> dict[str, Any]:
    """An EndpointSlice whose port is that of the engines, which must be one each."""
    return {
        "metadata": {"name": name},
        "addressType": "IPv4",
        "ports": [{"name": "metrics", "port": 1}, *({"name": "http", "port": one.port} for one in engines)],
        "endpoints": [
            {
                "addresses": ["127.0.0.1"],
                "conditions": {} if ready is None else {"ready": ready},
                "targetRef": {"kind": "Pod", "name": f"pod-{name}"},
            }
            for _ in engines
        ],
    }


class ApiServer:
    """Answers lists with `items`, or with `body`."""

    def __init__(self, folder: Path) -> None:
        self.items: list[Any] = []
        self.body = b""
        self.lists = 0
        self.token = "first"
        self.refused = 0
        self.account = folder / "account"
        self.account.mkdir()
        pem = certificate(folder / "api.pem")
        for name, text in {"token": "first", "namespace": "models", "ca.crt": pem.read_text()}.items():
            (self.account / name).write_text(text)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pem)
        self._server = ScriptedEngine(behaviour=self._answer, tls=tls)

    @property
    def settings(self) -> dict[str, Any]:
        service = {"service": "vllm", "port_name": "http"}
        return {"kubernetes": {**service, "account_dir": str(self.account)}}

    @property
    def place(self) -> dict[str, str]:
        """Its host and port."""
        return {"HOST": "127.0.0.1", "PORT": str(self._server.port)}

    async def _answer(self, got: Got, line: Line) -> None:
        url = urlsplit(got.target)
        query = parse_qs(url.query)
        assert (url.path, query["labelSelector"]) == (PATH, ["kubernetes.io/service-name=vllm"])
        if got.headers["authorization"] != f"Bearer {self.token}":
            self.refused += 1
            await line.answer({"kind": "Status", "code": 401}, 401)
        else:
            self.lists += 1
            await line.answer(self.body or {"items": self.items})

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    """An API server, which the environment names as it does in a pod."""
    async with ApiServer(tmp_path) as server:
        for name, value in server.place.items():
            monkeypatch.setenv(f"KUBERNETES_SERVICE_{name}", value)
        yield server


async def until_engines(gateway: GatewayProcess, session: aiohttp.ClientSession, *pods: str) -> None:
    def serve(status: dict[str, Any]) -> bool:
        up = sorted(one["name"] for one in status["engines"] if one["state"] == "up")
        return up == [f"vllm/pod-{pod}" for pod in pods]

    await gateway.until(session, f"engines {pods}", serve)


async def test_engines_come_and_go_with_their_endpoints(api, start, session):
    async with ScriptedEngine() as a, ScriptedEngine() as b, ScriptedEngine() as c:
        api.items = [slice_of("a", a), slice_of("b", b, ready=None), slice_of("c", c, ready=False)]
        gateway = await start(urls=[], engines_from=api.settings)
        await until_engines(gateway, session, "a", "b")
        api.items[2] = slice_of("c", c)
        await until_engines(gateway, session, "a", "b", "c")
        del api.items[0]
        await until_engines(gateway, session, "b", "c")
        # The account's newer token.
        (api.account / "token").write_text("second\n")
        api.token = "second"
        api.items.append(slice_of("d", a))
        await until_engines(gateway, session, "b", "c", "d")


async def test_engines_stay_while_the_api_server_makes_no_sense_or_refuses(api, start, session):
    async with ScriptedEngine() as a:
        api.items = [slice_of("a", a)]
        gateway = await start(urls=[], engines_from=api.settings)
        await until_engines(gateway, session, "a")
        for garbage in (b"{no json", b"{}", b'{"items": [7]}', b'{"items": [{"ports": {}}]}'):
            for body in (garbage, b""):
                api.body, before = body, api.lists
                await until(lambda before=before: api.lists > before)  # type: ignore[misc]
                await until_engines(gateway, session, "a")
        assert "endpoints_unknown" in await asyncio.to_thread(gateway.log.read_text)
        api.token = "another"
        await until(lambda: api.refused >= 2)
        await until_engines(gateway, session, "a")
        api.items, api.token = [slice_of("b", a)], "first"
        await until_engines(gateway, session, "b")
