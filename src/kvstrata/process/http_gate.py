"""The outermost layer of our HTTP ports (ASGI): decides by a request's head, before any byte of its body is read.

1. `Host` must be a name of this port (403).  Otherwise a web page whose own name is made to point at this machine (DNS
   rebinding) could use the port through a browser.
2. `Origin`, if a browser sends it, must be this port itself, and `Sec-Fetch-Site` neither `cross-site` nor `same-site`
   (403): another port of the same host is another user's page.  Following a link to a page is allowed.
3. Everything but the probes needs the bearer token of this port, unless the port is open (401).
4. A body has at most MAX_BODY_BYTES, or MAX_STRANGER_BYTES without the token (413), whatever its
   `Content-Length` says; a probe has none (400).  The application gets whole bodies only.
5. Incomplete bodies have at most MAX_ARRIVING_BYTES in all, beside the first MAX_STRANGER_BYTES of each (503).
6. At most MAX_REQUESTS complete requests are under way; further ones get 503 at once.  Probes, `/metrics` and
   incomplete requests do not count.

Probes may have any `Host`, since load balancers and Kubernetes use names of their own for a pod.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import platform
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvstrata.config.common_model import ListenSettings
from kvstrata.errors import BadRequest, NotPermitted, Unavailable
from kvstrata.observability.logging import EventLog

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from kvstrata.process.http_connections import Bounds

PROBES = frozenset({"/healthz", "/readyz", "/healthcheck"})
METRICS = "/metrics"
CLOSE = (b"connection", b"close")
OWN_SITE = ("", "none", "same-origin")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s/@]+)(?::\d{1,5})?")

MAX_BODY_BYTES = 32 << 20
MAX_STRANGER_BYTES = 64 << 10
MAX_ARRIVING_BYTES = 256 << 20
MAX_REQUESTS = 64

Headers = Mapping[bytes, bytes]


class Access:
    """The access rules of one port."""

    def __init__(
        self,
        settings: ListenSettings,
        token: str,
        *,
        public: Collection[str] = (),
        pages: Collection[str] = (),
        names: Collection[str] = (),
    ) -> None:
        """`token`: empty for an open port. `public`: paths that need no token, beside the probes; `x/`: all below `x`.

        `pages`: paths for people, which links on other sites may lead to. `names`: further names of the port.
        """
        self.set_token(token)
        self._loopback = is_loopback(settings.host)
        open_metrics = self._loopback if settings.open_metrics is None else settings.open_metrics
        self._public = {*PROBES, *public, *((METRICS,) if open_metrics else ())}
        self._public_below = tuple(one for one in public if len(one) > 1 and one.endswith("/"))
        self._pages = frozenset(pages)
        self._origins = {name.lower() for name in settings.allowed_hosts}
        own = [settings.host, "localhost", *names, *settings.allowed_hosts]
        if not self._loopback:
            own += [platform.node(), platform.node().partition(".")[0]]
        self._names = {bare_host(name) for name in own} - {""}
        self._any_host = not token and not self._loopback

    def set_token(self, token: str) -> None:
        """Require this token from now on; empty: the port is open."""
        self._token = token.encode()

    def knows_host(self, host: str) -> bool:
        """Whether a `Host` header names this port."""
        name = bare_host(host)
        # No other site's page can have an address as its name.
        is_address = _is_ip(name) and (not self._loopback or is_loopback(name))
        return self._any_host or name in self._names or is_address

    def knows_origin(self, headers: Headers, path: str) -> bool:
        """Whether the page that sent this request, if a page did, is this port's own."""
        site = headers.get(b"sec-fetch-site", b"").decode("latin-1")
        mode = headers.get(b"sec-fetch-mode", b"").decode("latin-1")
        if site not in OWN_SITE and not (mode == "navigate" and path in self._pages):
            return False
        origin = headers.get(b"origin")
        if origin is None:
            return True
        scheme, _, netloc = origin.decode("latin-1").lower().partition("://")
        own = headers.get(b"host", b"").decode("latin-1").lower()
        return scheme in ("http", "https") and bool(netloc) and (netloc == own or netloc in self._origins)

    def is_public(self, path: str) -> bool:
        """Whether a path needs no token."""
        return path in self._public or path.startswith(self._public_below)

    def proven(self, headers: Headers) -> bool:
        """Whether the request carries the token, compared in constant time, or the port needs none."""
        scheme, _, text = headers.get(b"authorization", b"").partition(b" ")
        return not self._token or (scheme == b"Bearer" and hmac.compare_digest(text, self._token))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names other than `localhost` count as reachable from elsewhere."""
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def bare_host(host: str) -> str:
    """The name or address of a `Host` header, without port and brackets, in lower case; empty if it is malformed."""
    if _is_ip(host):
        return host.lower()
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").lower().rstrip(".") if match else ""


class Denied(Exception):
    """A refused request: the status and the error of its answer, and further headers."""

    def __init__(
        self, status: int, code: str, message: str, field: str = "", *headers: tuple[bytes, bytes]
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = json.dumps({"code": code, "message": message, "field": field}).encode()
        self.headers = headers


def gate(app: ASGIApp, access: Access, bounds: Bounds) -> ASGIApp:
    """`app` behind all rules."""
    log = EventLog("http")

    async def gated(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this port serves HTTP only, not {scope['type']}")
        headers, path = dict(scope["headers"]), scope["path"]
        counts = path not in PROBES and path != METRICS
        try:
            _check_sender(access, headers, path)
            body: bytes | None = await _whole_body(receive, headers, bounds, proven=access.proven(headers))
            if counts and bounds.requests >= MAX_REQUESTS:
                bounds.refused += 1
                log.repeated(logging.WARNING, "refused", "request_refused", under_way=bounds.requests)
                says = f"{MAX_REQUESTS} requests are in flight; try again"
                raise Denied(503, Unavailable.code, says, "", (b"retry-after", b"1"), CLOSE)
        except Denied as denied:
            await _refuse(send, headers, denied)
            return
        except ConnectionError:
            return

        async def whole() -> Any:
            nonlocal body
            if body is None:
                return await receive()
            message, body = {"type": "http.request", "body": body, "more_body": False}, None
            return message

        bounds.requests += counts
        try:
            await app(scope, whole, send)
        finally:
            bounds.requests -= counts

    return gated


def _check_sender(access: Access, headers: Headers, path: str) -> None:
    """Rules 1 to 3. Raises Denied."""
    host = headers.get(b"host", b"").decode("latin-1")
    if path not in PROBES and not access.knows_host(host):
        says = f"Host: {host!a:.80} is not a name of this port; use its address, or add the name to http.allowed_hosts"
        raise Denied(403, NotPermitted.code, says)
    if not access.knows_origin(headers, path):
        shown = headers.get(b"origin", headers.get(b"sec-fetch-site", b"")).decode("latin-1")
        says = (
            f"Origin: a page of another site ({shown!a:.80}) may not use this port; if it is this port's name behind a "
            "proxy, add it to http.allowed_hosts"
        )
        raise Denied(403, NotPermitted.code, says)
    if not access.is_public(path) and not access.proven(headers):
        says = (
            "missing or wrong bearer token; run `kvstrata ctl` as the user of this port's process, or give it "
            "--token-file"
        )
        raise Denied(401, NotPermitted.code, says, "", (b"www-authenticate", b"Bearer"))
    if path in PROBES and (b"transfer-encoding" in headers or _length(headers)):
        raise Denied(400, BadRequest.code, "body: a probe must have none", "body")


async def _whole_body(receive: Receive, headers: Headers, bounds: Bounds, *, proven: bool) -> bytes:
    """Rules 4 and 5. Raises Denied, and ConnectionError if the client goes."""
    limit, without = (MAX_BODY_BYTES, "") if proven else (MAX_STRANGER_BYTES, " without a token")
    body, counted, more = bytearray(), 0, True
    try:
        while more:
            if max(len(body), _length(headers)) > limit:
                raise Denied(
                    413, BadRequest.code, f"body: more than {limit} bytes{without}; send less", "body"
                )
            if bounds.arriving_bytes > MAX_ARRIVING_BYTES:
                says = "body: too many large bodies are arriving at this port; try again"
                raise Denied(503, Unavailable.code, says, "body")
            message = await receive()
            if message["type"] != "http.request":
                raise ConnectionError
            body += message.get("body", b"")
            before, counted = counted, max(0, len(body) - MAX_STRANGER_BYTES)
            bounds.arriving_bytes += counted - before
            more = message.get("more_body", False)
        if len(body) > limit:
            raise Denied(413, BadRequest.code, f"body: more than {limit} bytes{without}; send less", "body")
        return bytes(body)
    finally:
        bounds.arriving_bytes -= counted


def _length(headers: Headers) -> int:
    """The length of a body, as far as the request states it."""
    text = headers.get(b"content-length", b"")
    return int(text) if text.isdigit() and len(text) < 16 else MAX_BODY_BYTES + 1 if text else 0


async def _refuse(send: Send, headers: Headers, denied: Denied) -> None:
    """Answer with an error as JSON. The connection is closed if much of the request may still arrive."""
    close = [CLOSE] if b"transfer-encoding" in headers or _length(headers) > MAX_STRANGER_BYTES else []
    answered = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(denied.body)).encode()),
        (b"cache-control", b"no-store"),
        *denied.headers,
        *close,
    ]
    await send({"type": "http.response.start", "status": denied.status, "headers": answered})
    await send({"type": "http.response.body", "body": denied.body})


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
