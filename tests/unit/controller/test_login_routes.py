"""The routes that log browsers in: attributes of the cookie, who gets a link, and where it leads."""

from __future__ import annotations

from http.cookies import Morsel, SimpleCookie
from typing import TYPE_CHECKING, Any, cast

from kvstrata.config.controller_model import ControllerHttpSettings
from kvstrata.controller.admin import LOGIN, OPERATIONS, Admin
from kvstrata.observability.logging import EventLog
from kvstrata.process.http_gate import Access
from kvstrata.process.http_login import SESSION_S, Logins
from kvstrata.process.http_thread import make_port

if TYPE_CHECKING:
    import httpx

TOKEN = "t" * 32
BEARER = {"authorization": f"Bearer {TOKEN}"}
HTTPS = "https://cache.example.net"


async def client(url: str = "http://localhost:9000", token: str = TOKEN) -> httpx.AsyncClient:
    import httpx  # with FastAPI a second, which collection does not pay

    settings, missing = ControllerHttpSettings(allowed_hosts=["cache.example.net"]), cast(Any, None)
    logins = Logins(9000)
    access = Access(settings, token, public=[LOGIN], logins=logins)
    parts = Admin(missing, missing, missing, access, logins, url, bytes, missing, EventLog("controller"))
    port = await make_port("test", OPERATIONS, parts, access)
    return httpx.AsyncClient(transport=httpx.ASGITransport(port.app), base_url="http://localhost:9000")


async def logged_in(http: httpx.AsyncClient, **headers: str) -> tuple[httpx.Response, Morsel[str]]:
    """The answer to a login with the token, and its cookie."""
    answer = await http.post(LOGIN, json={"code": TOKEN}, headers=headers)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    return answer, cookie


async def test_the_cookie_is_shut_off_from_scripts_other_sites_and_plain_http() -> None:
    for url, headers, secure in (
        ("http://localhost:9000", {"origin": "http://localhost:9000"}, False),
        ("http://localhost:9000", {"origin": HTTPS, "host": "cache.example.net"}, True),
        (HTTPS, {}, True),
        (HTTPS, {"origin": "http://localhost:9000"}, False),
    ):
        async with await client(url) as http:
            answer, cookie = await logged_in(http, **headers)
        assert (cookie.key, cookie["path"], cookie["max-age"]) == ("kvstrata-9000", "/", str(SESSION_S))
        assert (cookie["httponly"], cookie["samesite"], bool(cookie["secure"])) == (True, "strict", secure)
        assert len({TOKEN, cookie.value, answer.json()["page_key"]}) == 3


async def test_a_link_needs_the_token_and_no_session_is_enough() -> None:
    async with await client() as http:
        assert (await http.post("/v1/dashboard-link")).status_code == 401
        answer, _ = await logged_in(http)  # the client keeps the cookie
        key = {"kvstrata-page-key": answer.json()["page_key"]}
        assert (await http.post("/v1/dashboard-link", headers=key)).status_code == 403
        told = (await http.post("/v1/dashboard-link", headers=BEARER)).json()
        assert told["url"].startswith("http://localhost:9000/#/login/") and told["once_within_s"] == 300
        code = told["url"].rpartition("/")[2]
        assert [(await http.post(LOGIN, json={"code": code})).status_code for _ in range(2)] == [200, 403]


async def test_a_logout_ends_the_session_and_takes_the_cookie_back() -> None:
    async with await client() as http:
        answer, _ = await logged_in(http)
        key = {"kvstrata-page-key": answer.json()["page_key"]}
        foreign = await http.post("/v1/logout", headers={**key, "origin": "http://evil.example"})
        assert foreign.status_code == 403
        ended = await http.post("/v1/logout", headers=key)
        assert ended.status_code == 204 and "Max-Age=0" in ended.headers["set-cookie"]
        assert (await http.post("/v1/logout", headers=key)).status_code == 401


async def test_an_open_port_gives_a_link_without_a_code() -> None:
    async with await client(token="") as http:
        assert (await http.post("/v1/dashboard-link")).json() == {
            "url": "http://localhost:9000/",
            "once_within_s": None,
        }
        assert (await http.post(LOGIN, json={"code": ""})).status_code == 403
