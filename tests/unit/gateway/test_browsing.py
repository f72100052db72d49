"""The dashboard's files and logins at the gateway's port, without a port."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvstrata.config.gateway_model import GatewayHttpSettings
from kvstrata.gateway.browsing import INDEX, LINK, LOGIN, LOGOUT, MAX_BODY_BYTES, PAGES, Browsing
from kvstrata.process.http_gate import Access
from kvstrata.process.http_login import MAX_CODES, Logins

TOKEN = "the-token-of-the-operators"
PROVEN = {b"authorization": b"Bearer " + TOKEN.encode()}
URL = "http://127.0.0.1:8090"

Ask = Callable[..., Any]


class Port:
    """Browsing with its door."""

    def __init__(self, url: str = URL) -> None:
        self.logins = Logins(8090)
        self.access = Access(GatewayHttpSettings(), TOKEN, pages=PAGES, logins=self.logins)
        self.browsing = Browsing(self.access, self.logins, url)

    async def ask(
        self, method: str, path: str, headers: dict[bytes, bytes] | None = None, body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; return status, headers and body of the answer."""
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        assert self.browsing.knows(path)
        await self.browsing.answer(method, path, headers or {}, receive, send)
        told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], told, b"".join(one.get("body", b"") for one in sent[1:])

    async def log_in(self, code: str) -> tuple[int, dict[str, str], Any]:
        """Give a code."""
        status, headers, body = await self.ask("POST", LOGIN, body=json.dumps({"code": code}).encode())
        return status, headers, json.loads(body)


def test_only_its_own_paths_are_known() -> None:
    known = Port().browsing.knows
    assert all(map(known, ("/gateway", "/gateway/", "/gateway/dashboard/main.js", LOGIN, LOGOUT, LINK)))
    assert not any(map(known, ("/", "/gateway/status", "/gateway/decisions/x", "/gatewayx", "/v1/models")))


async def test_files_need_no_token_and_come_with_a_policy_that_runs_nothing_else() -> None:
    port = Port()
    for path, media_type in (
        (INDEX, "text/html; charset=utf-8"),
        ("/gateway/dashboard/main.js", "text/javascript; charset=utf-8"),
        ("/gateway/dashboard/pages/routing.js", "text/javascript; charset=utf-8"),
        ("/gateway/dashboard/style.css", "text/css; charset=utf-8"),
    ):
        status, headers, body = await port.ask("GET", path)
        assert (status, headers["content-type"]) == (200, media_type) and body
        assert "script-src 'self'" in headers["content-security-policy"]
        again, _, nothing = await port.ask("GET", path, {b"if-none-match": headers["etag"].encode()})
        assert (again, nothing) == (304, b"")
    assert (await port.ask("GET", "/gateway"))[:2][1]["location"] == INDEX
    for name in ("none.js", "../browsing.py", "..%2fbrowsing.py", ""):
        assert (await port.ask("GET", f"/gateway/dashboard/{name}"))[0] == 404


async def test_a_link_logs_in_once_and_its_session_needs_both_secrets() -> None:
    port = Port()
    status, _, body = await port.ask("POST", LINK, PROVEN)
    assert status == 200
    address, _, code = json.loads(body)["url"].partition("#/login/")
    assert address == f"{URL}{INDEX}"
    status, headers, told = await port.log_in(code)
    assert status == 200 and headers["cache-control"] == "no-store"
    cookie = headers["set-cookie"].partition(";")[0].encode()
    assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]
    both = {b"cookie": cookie, b"kvstrata-page-key": told["page_key"].encode()}
    assert port.access.proven(both)
    assert not any(port.access.proven({name: value}) for name, value in both.items())
    assert (await port.log_in(code))[0] == 403, "a code works once"
    assert (await port.ask("POST", LINK, both))[0] == 401, "a session gets no links"
    assert (await port.ask("POST", LOGOUT, both))[0] == 200
    assert not port.access.proven(both)
    assert (await port.ask("POST", LOGOUT, both))[0] == 401


async def test_the_token_logs_in_too_and_nothing_else_does() -> None:
    port = Port()
    assert (await port.log_in(TOKEN))[0] == 200
    for code in ("", "x", TOKEN[:-1], TOKEN + "x", "\ud800"):
        assert (await port.log_in(code))[0] in (400, 403)
    for body in (
        b"",
        b"[]",
        b'{"code": 7}',
        b"{" + b" " * MAX_BODY_BYTES + b'"code": "x"}',
        b'{"code": "\xff"}',
    ):
        assert (await port.ask("POST", LOGIN, body=body))[0] == 400
    for _ in range(2 * MAX_CODES):
        assert (await port.ask("POST", LINK))[0] == 401
    assert port.logins._codes == [], "who is refused uses up no code of others"


async def test_other_methods_are_refused_and_end_the_connection() -> None:
    for method, path in (("POST", INDEX), ("GET", LOGIN), ("GET", LOGOUT), ("DELETE", LINK)):
        status, headers, _ = await Port().ask(method, path, PROVEN)
        assert (status, headers["connection"]) == (405, "close")


async def test_a_unix_socket_has_no_link() -> None:
    port = Port("")
    assert port.browsing.link() == ""
    status, _, body = await port.ask("POST", LINK, PROVEN)
    assert status == 400 and b"http.host" in body
