"""The link that logs browsers in: who gets one, and where it leads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from kvstrata.config.controller_model import ControllerHttpSettings
from kvstrata.controller.admin import OPERATIONS, Admin
from kvstrata.observability.logging import EventLog
from kvstrata.process.http_gate import Access
from kvstrata.process.http_thread import make_port

if TYPE_CHECKING:
    import httpx

TOKEN = "a token/with + any = sign %"


async def client(token: str) -> httpx.AsyncClient:
    import httpx  # with FastAPI a second, which collection does not pay

    missing, url = cast(Any, None), "http://localhost:9000"
    parts = Admin(missing, missing, missing, url, bytes, missing, EventLog("controller"))
    port = await make_port("test", OPERATIONS, parts, Access(ControllerHttpSettings(), token))
    return httpx.AsyncClient(transport=httpx.ASGITransport(port.app), base_url=url)


async def test_a_link_needs_the_token_and_gives_it_to_the_page_alone() -> None:
    async with await client(TOKEN) as http:
        assert (await http.post("/v1/dashboard-link")).status_code == 401
        told = await http.post("/v1/dashboard-link", headers={"authorization": f"Bearer {TOKEN}"})
    assert told.json() == {"url": f"http://localhost:9000/#/login/{quote(TOKEN, safe='')}"}
    assert told.headers["cache-control"] == "no-store"


async def test_an_open_port_gives_a_link_without_a_token() -> None:
    async with await client("") as http:
        assert (await http.post("/v1/dashboard-link")).json() == {"url": "http://localhost:9000/"}
