"""The engines behind a Kubernetes service, from its EndpointSlices.

    list ─▶ watch ─▶ watch ─▶ …          each watch goes on from the resource version of what was heard last
      ▲       │ 410 Gone, or an answer that makes no sense
      └───────┘ after a pause that grows

1. What was known last holds while the API server cannot be reached, refuses, or says something that makes no sense.
2. The service account's token is read again for each request, since Kubernetes replaces it, and goes nowhere but over
   HTTPS to the API server, whose certificate the account's own `ca.crt` must prove.
3. Answers are bounded: MAX_LIST_BYTES for a list, MAX_LINE_BYTES for an event, MAX_ENGINES for the engines.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from kvstrata.config.gateway_engines_model import KubernetesSettings
from kvstrata.errors import ConfigError
from kvstrata.gateway.engine_link import Address, Answer, LinkBroken, Links, Unreachable, request_bytes
from kvstrata.gateway.fleet import Place
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience

MAX_LIST_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20
MAX_ENGINES = 4_096
PAGE = 500
"""Slices in one answer to a list."""
WATCH_S = 240
"""After so long the API server ends a watch, and another one begins."""
SILENT_S = WATCH_S + 30.0
ANSWER_S = 10.0
FIRST_PAUSE_S, MOST_PAUSE_S = 0.2, 30.0


class Refused(Exception):
    """The API server does not answer as it should; the text says how."""


class Gone(Exception):
    """The resource version is too old for a watch: list again."""


class _Meta(msgspec.Struct, frozen=True):
    name: str = ""
    resourceVersion: str = ""
    cont: str = msgspec.field(name="continue", default="")


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    name: str = ""


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()
    target: _Target | None = msgspec.field(name="targetRef", default=None)


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct):
    """An EndpointSlice, as far as it is read."""

    metadata: _Meta
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[Slice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class Account:
    """The pod's service account: where the API server is, and what proves who asks."""

    def __init__(self, settings: KubernetesSettings) -> None:
        """Raises ConfigError if the process runs outside a pod."""
        self._folder = Path(settings.account_dir)
        url = settings.api_url
        if not url:
            host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
            if not host:
                raise ConfigError(
                    "engines_from.kubernetes.api_url: KUBERNETES_SERVICE_HOST is not set, so this is no pod; name the "
                    "API server",
                    field="engines_from.kubernetes.api_url",
                )
            host = f"[{host}]" if ":" in host else host
            url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        parts = urlsplit(url)
        self.address = Address(parts.hostname or "", parts.port or 443, True)
        self.namespace = settings.namespace or self._text("namespace")
        self._text("token")

    def tls(self) -> ssl.SSLContext:
        """Trusts the cluster's own authority only. Raises ConfigError."""
        path = self._folder / "ca.crt"
        try:
            return ssl.create_default_context(cafile=str(path))
        except OSError as error:  # ssl.SSLError too
            raise _unreadable(path, str(error.strerror or error)) from None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of a request. Raises ConfigError if the token cannot be read."""
        token = self._text("token")
        return [(b"authorization", b"Bearer " + token.encode()), (b"accept", b"application/json")]

    def _text(self, name: str) -> str:
        path = self._folder / name
        try:
            text = path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, str(getattr(error, "strerror", None) or error)) from None
        if not text or not text.isprintable():
            raise _unreadable(path, "empty, or not one line of text")
        return text


def _unreadable(path: Path, why: str) -> ConfigError:
    field = "engines_from.kubernetes.account_dir"
    return ConfigError(f"{field}: cannot read {path}: {why}", field=field)


class Endpoints:
    """Keeps the engines of a service known. Belongs to the event loop."""

    def __init__(
        self,
        settings: KubernetesSettings,
        account: Account,
        api_key: str,
        found: Callable[[list[Place]], None],
        connect_s: float,
    ) -> None:
        """`found` is called with all engines whenever they have changed. `api_key`: theirs; empty: none."""
        self.settings = settings
        self.known = asyncio.Event()
        """Set after the first list."""
        self._account = account
        self._api_key = api_key
        self._found = found
        self._links = Links(connect_s, account.tls())
        self._slices: dict[str, Slice] = {}
        self._places: list[Place] | None = None
        self._version = ""
        self._log = EventLog("kubernetes")

    async def close(self) -> None:
        """Close the connections."""
        await self._links.close()

    async def keep(self) -> None:
        """List and watch until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if not self._version:
                    await self._list()
                    self.known.set()
                if await self._watch():
                    pause_s = FIRST_PAUSE_S
                reason = ""
            except Gone:
                self._version = ""
                reason = "410 Gone"
            except (Refused, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._version = ""
                reason = str(error)
            except (Unreachable, LinkBroken, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            except ConfigError as error:  # the token
                reason = error.message
            if reason:
                self._log.repeated(
                    30, "endpoints", "endpoints_unknown", service=self.settings.service, reason=reason
                )
            await asyncio.sleep(pause_s)
            pause_s = min(MOST_PAUSE_S, pause_s * 2)

    async def _list(self) -> None:
        slices: dict[str, Slice] = {}
        more: dict[str, str] = {"limit": str(PAGE)}
        size = 0
        while True:
            async with asyncio.timeout(patience(ANSWER_S)):
                answer = await self._ask(more)
                try:
                    body = await answer.whole(MAX_LIST_BYTES + 1)
                finally:
                    answer.end()
            size += len(body)
            if size > MAX_LIST_BYTES:
                raise Refused(f"the list of slices is larger than {MAX_LIST_BYTES} bytes")
            page = msgspec.json.decode(body, type=_List)
            slices |= {one.metadata.name: one for one in page.items or []}
            if not page.metadata.cont:
                break
            more["continue"] = page.metadata.cont
        if not page.metadata.resourceVersion:
            raise Refused("the list has no resourceVersion")
        self._slices, self._version = slices, page.metadata.resourceVersion
        self._tell()

    async def _watch(self) -> bool:
        """Apply events until the watch ends; returns whether any came.

        Raises Gone, Refused, Unreachable, LinkBroken, ConfigError and msgspec.DecodeError.
        """
        wanted = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        async with asyncio.timeout(patience(ANSWER_S)):
            answer = await self._ask({**wanted, "resourceVersion": self._version})
        try:
            async with asyncio.timeout(SILENT_S) as limit:
                loop = asyncio.get_running_loop()
                rest, heard = b"", False
                while part := await answer.part():
                    limit.reschedule(loop.time() + SILENT_S)
                    *lines, rest = (rest + part).split(b"\n")
                    if len(rest) > MAX_LINE_BYTES:
                        raise Refused(f"an event is larger than {MAX_LINE_BYTES} bytes")
                    for line in lines:
                        if line.strip():
                            self._apply(msgspec.json.decode(line, type=_Event))
                            heard = True
                return heard
        finally:
            answer.end()

    def _apply(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == 410:
                raise Gone
            raise Refused(f"the watch fails: {status.code} {status.message[:200]!a}")
        one = msgspec.json.decode(event.object, type=Slice)
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[one.metadata.name] = one
        elif event.type == "DELETED":
            self._slices.pop(one.metadata.name, None)
        elif event.type != "BOOKMARK":
            raise Refused(f"an event of the unknown type {event.type[:40]!a}")
        self._version = one.metadata.resourceVersion or self._version
        if event.type != "BOOKMARK":
            self._tell()

    async def _ask(self, more: Mapping[str, str]) -> Answer:
        """The head of an answer with status 200. Raises Gone, Refused, Unreachable, LinkBroken, ConfigError."""
        query = {"labelSelector": f"kubernetes.io/service-name={self.settings.service}", **more}
        path = (
            f"/apis/discovery.k8s.io/v1/namespaces/{quote(self._account.namespace, safe='')}/endpointslices"
        )
        target, address = f"{path}?{urlencode(query)}", self._account.address
        answer = await self._links.send(
            address, request_bytes("GET", target, address, self._account.headers(), b"")
        )
        try:
            await answer.head()
            if answer.status == 410:
                raise Gone
            if answer.status != 200:
                said = (await answer.whole(1_000)).decode("utf-8", "replace")
                raise Refused(f"the API server answers {answer.status}: {said!a:.300}")
        except BaseException:
            answer.close()
            raise
        return answer

    def _tell(self) -> None:
        places = places_of(self._slices.values(), self.settings, self._api_key)
        if places != self._places:
            self._places = places
            self._log.info("endpoints", service=self.settings.service, engines=len(places))
            self._found(places)


def places_of(slices: Iterable[Slice], settings: KubernetesSettings, api_key: str) -> list[Place]:
    """The engines of these slices that are ready, by their addresses; named by their pods."""
    found: dict[Address, Place] = {}
    for one in slices:
        port = _port_of(one.ports or [], settings)
        if port is None:
            continue
        for endpoint in one.endpoints or []:
            # No word about it means ready, as the API says.
            if endpoint.conditions.ready is False or not endpoint.addresses:
                continue
            host = endpoint.addresses[0]
            if not _is_address(host):
                continue
            address = Address(host, port, settings.https)
            pod = endpoint.target.name if endpoint.target is not None and endpoint.target.name else host
            found[address] = Place(f"{settings.service}/{pod[:253]}", address, api_key)
    named: dict[str, Place] = {}
    for place in sorted(found.values()):
        name = (
            place.name
            if place.name not in named
            else f"{place.name}:{place.address.port}@{place.address.host}"
        )
        named[name] = place._replace(name=name)
    return list(named.values())[:MAX_ENGINES]


def _port_of(ports: list[_Port], settings: KubernetesSettings) -> int | None:
    """The port of the settings, by its number or name; else the first."""
    for one in ports:
        if one.port is None or not 0 < one.port < 65_536:
            continue
        if settings.port in (0, one.port) and settings.port_name in ("", one.name):
            return one.port
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
