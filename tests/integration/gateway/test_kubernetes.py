"""A real gateway whose engines a service of Kubernetes names, before an API server that the test plays."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest

from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async, until
from tests.integration.gateway.conftest import Start
from tests.integration.gateway.test_proxy import certificate

pytestmark = pytest.mark.integration

PATH = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"


def slice_of(name: str, version: int, *engines: ScriptedEngine, ready: bool | None = True) -> dict[str, Any]:
    """An EndpointSlice whose port is that of the engines, which must be one each."""
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
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
    """Answers lists with `items`, and each watch with what the test puts into `events`."""

    def __init__(self, folder: Path) -> None:
        self.items: list[Any] = []
        self.version = 1
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Lines of the watch under way; None breaks it."""
        self.lists: list[Got] = []
        self.watches: list[dict[str, list[str]]] = []
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
        """`engines_from` of a gateway."""
        service = {"service": "vllm", "port_name": "http"}
        return {
            "kubernetes": {**service, "api_url": self._server.url, "account_dir": str(self.account)},
        }

    def event(self, kind: str, document: Any) -> None:
        """Send an event to the watch."""
        self.events.put_nowait(json.dumps({"type": kind, "object": document}).encode() + b"\n")

    async def _answer(self, got: Got, line: Line) -> None:
        url = urlsplit(got.target)
        query = parse_qs(url.query)
        assert (url.path, query["labelSelector"]) == (PATH, ["kubernetes.io/service-name=vllm"])
        if got.headers["authorization"] != f"Bearer {self.token}":
            self.refused += 1
            await line.answer({"kind": "Status", "code": 401}, 401)
        elif "watch" in query:
            self.watches.append(query)
            await line.begin("application/json")
            await self._watched(line)
            line.cut()
        else:
            self.lists.append(got)
            # Two pages, as of a large service.
            if "continue" not in query and len(self.items) > 1:
                page = {"metadata": {"resourceVersion": str(self.version), "continue": "more"}}
                await line.answer({**page, "items": self.items[:1]})
            else:
                items = self.items[1:] if "continue" in query else self.items
                await line.answer({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watched(self, line: Line) -> None:
        """Send events until the test breaks the watch, or the gateway ends it."""
        gone = asyncio.ensure_future(line.gone())
        while True:
            event = asyncio.ensure_future(self.events.get())
            await asyncio.wait((gone, event), return_when=asyncio.FIRST_COMPLETED)
            if gone.done() or (data := event.result()) is None:
                event.cancel()
                gone.cancel()
                return
            await line.part(data)

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiServer]:
    """An API server."""
    async with ApiServer(tmp_path) as server:
        yield server


async def until_engines(gateway: GatewayProcess, session: aiohttp.ClientSession, *pods: str) -> None:
    """Wait until exactly these engines serve."""

    async def there() -> bool:
        engines = (await gateway.status(session))["engines"]
        return sorted(one["name"] for one in engines if one["state"] == "up") == [
            f"vllm/pod-{pod}" for pod in pods
        ]

    await eventually_async(f"engines {pods}", there)


async def test_engines_come_and_go_with_their_endpoints(
    api: ApiServer, start: Start, session: aiohttp.ClientSession
) -> None:
    async with ScriptedEngine() as a, ScriptedEngine() as b, ScriptedEngine() as c:
        api.items = [slice_of("a", 1, a), slice_of("b", 1, b, ready=None), slice_of("c", 1, c, ready=False)]
        gateway = await start(urls=[], engines_from=api.settings)
        await until_engines(gateway, session, "a", "b")
        api.event("MODIFIED", slice_of("c", 5, c))
        await until_engines(gateway, session, "a", "b", "c")
        api.event("DELETED", slice_of("a", 6, a))
        await until_engines(gateway, session, "b", "c")
        api.event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        # Broken: the watch goes on from what was heard last, without another list, with the account's newer token.
        (api.account / "token").write_text("second\n")
        api.token = "second"
        api.events.put_nowait(None)
        api.event("ADDED", slice_of("d", 10, a))
        await until_engines(gateway, session, "b", "c", "d")
        assert [one["resourceVersion"] for one in api.watches] == [["1"], ["9"]]
        assert len(api.lists) == 2
        # Too old: everything is listed again.
        api.items, api.version = [slice_of("b", 20, b)], 20
        api.event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
        await until_engines(gateway, session, "b")
        assert [len(api.lists), api.watches[-1]["resourceVersion"]] == [3, ["20"]]


async def test_engines_stay_while_the_api_server_makes_no_sense(
    api: ApiServer, start: Start, session: aiohttp.ClientSession
) -> None:
    async with ScriptedEngine() as a:
        api.items = [slice_of("a", 1, a)]
        gateway = await start(urls=[], engines_from=api.settings)
        await until_engines(gateway, session, "a")
        for number, garbage in enumerate(
            (
                b"{no json\n",
                b'{"type": "ODD", "object": {"metadata": {}}}\n',
                b'{"type": "ADDED", "object": 7}\n',
                b'{"type": "ERROR", "object": {"code": 500, "message": "x"}}\n',
            )
        ):
            api.events.put_nowait(garbage)
            await until(lambda number=number: len(api.lists) == number + 2)
            await until_engines(gateway, session, "a")
        assert await logged(gateway, "endpoints_unknown")


async def test_engines_stay_while_the_api_server_refuses(
    api: ApiServer, start: Start, session: aiohttp.ClientSession
) -> None:
    async with ScriptedEngine() as a, ScriptedEngine() as b:
        api.items = [slice_of("a", 1, a)]
        gateway = await start(urls=[], engines_from=api.settings)
        await until_engines(gateway, session, "a")
        api.token = "another"
        api.events.put_nowait(None)
        await until(lambda: api.refused >= 2)
        await until_engines(gateway, session, "a")
        api.items, api.token = [slice_of("b", 2, b)], "first"
        await until_engines(gateway, session, "b")


async def logged(gateway: GatewayProcess, text: str) -> bool:
    """Whether the log has a line with this text."""
    return text in await asyncio.to_thread(gateway.log.read_text)
