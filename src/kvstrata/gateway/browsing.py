"""What browsers use the gateway by: the dashboard's files, and how an operator logs in (process/http_login.py).

GET  /gateway/                 the page, without a token; it asks the operators' pages for numbers
GET  /gateway/dashboard/NAME   its files
POST /gateway/login            {"code": "…"} becomes a session: a link's code, or the operators' token
POST /gateway/logout           ends the session
POST /gateway/dashboard-link   a link that logs a browser in, once; for the token only
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from kvstrata.gateway.door import Headers
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.forward import answer_failure
from kvstrata.process.http_files import Files
from kvstrata.process.http_gate import Access
from kvstrata.process.http_login import CODE_S, SESSION_S, Logins

if TYPE_CHECKING:
    from starlette.types import Receive, Send

BARE, INDEX, FILES = "/gateway", "/gateway/", "/gateway/dashboard/"
LOGIN, LOGOUT, LINK = "/gateway/login", "/gateway/logout", "/gateway/dashboard-link"
PAGES = frozenset((BARE, INDEX))
"""What links on other sites may lead to."""
METHODS = {BARE: "GET", INDEX: "GET", LOGIN: "POST", LOGOUT: "POST", LINK: "POST"}
MAX_BODY_BYTES = 8_192


class _Login(msgspec.Struct):
    code: Annotated[str, msgspec.Meta(max_length=4_096)]


class Browsing:
    """See the module. Belongs to the event loop."""

    def __init__(self, access: Access, logins: Logins, url: str) -> None:
        """`url`: that of the port; empty for a unix socket, which browsers cannot open."""
        self._access = access
        self._logins = logins
        self._url = url
        self._files = Files("kvstrata.gateway")

    @staticmethod
    def knows(path: str) -> bool:
        """Whether a path is one of these."""
        return path in METHODS or path.startswith(FILES)

    def link(self) -> str:
        """A link that opens the dashboard and logs in once, within CODE_S; empty for a unix socket.

        The code stands in the fragment, which browsers send to no server.
        """
        return f"{self._url}{INDEX}#/login/{self._logins.new_code()}" if self._url else ""

    async def answer(self, method: str, path: str, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer a request whose sender the door knows."""
        if method != METHODS.get(path, "GET"):
            says = f"method: {path} takes {METHODS.get(path, 'GET')} only"
            await answer_failure(send, Failure(405, "method_not_allowed", says), path, close=True)
        elif path == BARE:
            await _send(send, 308, {"Location": INDEX})
        elif path == LOGIN:
            await self._log_in(headers, receive, send)
        elif path == LOGOUT:
            await self._log_out(headers, send)
        elif path == LINK:
            await self._tell_link(headers, send)
        else:
            await self._file(path, headers, send)

    async def _file(self, path: str, headers: Headers, send: Send) -> None:
        name = "index.html" if path == INDEX else path.removeprefix(FILES)
        if name not in self._files:
            failure = Failure(404, "unknown_file", f"the dashboard has no file {name!a:.80}")
            await answer_failure(send, failure, path)
            return
        none_match = headers.get(b"if-none-match", b"").decode("latin-1")
        answered = self._files.answer(name, none_match)
        await _send(send, answered.status, answered.headers, answered.content)

    async def _log_in(self, headers: Headers, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        try:
            code = msgspec.json.decode(body, type=_Login).code
        except (msgspec.DecodeError, UnicodeDecodeError):
            says = 'body: must be {"code": "…"}, with a link\'s code or the operators\' token'
            await answer_failure(send, Failure(400, "invalid_body", says), LOGIN, close=True)
            return
        if not self._logins.take(code) and not self._access.is_token(code.encode("utf-8", "replace")):
            says = "code: unknown, used before or too old; ask for a new link, or give the operators' token"
            await answer_failure(send, Failure(403, "unknown_code", says, "code"), LOGIN)
            return
        session = self._logins.begin()
        secure = "; Secure" if headers.get(b"origin", b"").startswith(b"https:") else ""
        cookie = f"{self._logins.cookie_name}={session.cookie}; Max-Age={SESSION_S}"
        told = {"page_key": session.page_key, "session_s": SESSION_S}
        await _json(send, told, {"Set-Cookie": f"{cookie}; Path=/; HttpOnly; SameSite=Strict{secure}"})

    async def _log_out(self, headers: Headers, send: Send) -> None:
        if not self._access.proven(headers):
            says = "logout: no session, or not with its page key"
            await answer_failure(send, Failure(401, "operators_only", says), LOGOUT)
            return
        self._logins.end(headers)
        ended = f"{self._logins.cookie_name}=; Max-Age=0; Path=/; HttpOnly; SameSite=Strict"
        await _json(send, {}, {"Set-Cookie": ended})

    async def _tell_link(self, headers: Headers, send: Send) -> None:
        failure: Failure | None = None
        if not self._url:
            says = "http.host: a browser needs a tcp port, and this gateway has a unix socket"
            failure = Failure(400, "no_tcp_port", says, "http.host")
        elif not self._access.bears_token(headers):
            says = "Authorization: a link needs the operators' token, as `Bearer TOKEN`; no session is enough"
            failure = Failure(401, "operators_only", says)
        if failure is not None:
            await answer_failure(send, failure, LINK)
            return
        await _json(send, {"url": self.link(), "once_within_s": CODE_S}, {})


async def _body(receive: Receive) -> bytes:
    """The body; empty if it is too long, or if the client goes away."""
    body, more = b"", True
    while more and len(body) <= MAX_BODY_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body if len(body) <= MAX_BODY_BYTES else b""


async def _json(send: Send, value: object, headers: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store", **headers}
    await _send(send, 200, headers, msgspec.json.encode(value))


async def _send(send: Send, status: int, headers: dict[str, str], body: bytes = b"") -> None:
    told = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    length = [] if status == 304 else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*told, *length]})
    await send({"type": "http.response.body", "body": body})
