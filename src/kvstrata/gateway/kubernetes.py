"""The engines behind a Kubernetes service, from its EndpointSlices, which are listed periodically.

1. The last valid list stays in use while the API server is unreachable, refuses, or gives an invalid reply.
2. The service account's token is read again for each request, since Kubernetes rotates it.  It is sent only over HTTPS
   to the API server, whose certificate must verify against the account's `ca.crt`.
3. A list has at most MAX_LIST_BYTES, and at most MAX_ENGINES engines are used.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote, urlencode

import msgspec

from kvstrata.config.gateway_model import KubernetesSettings
from kvstrata.errors import ConfigError
from kvstrata.gateway.engine_http import Address, HttpClient, LinkBroken, Unreachable
from kvstrata.gateway.fleet import Place, endpoint_of
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience

MAX_LIST_BYTES = 64 << 20
MAX_ENGINES = 4_096
ANSWER_S = 10.0
LONGEST_PAUSE_S = 30.0


class Refused(Exception):
    """The API server refused the request, or its response is too large; the text says why."""


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
    """The fields of an EndpointSlice that are read."""

    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    items: list[Slice] | None


class Account:
    """The pod's service account: the API server's address, and the credentials for it."""

    def __init__(self, settings: KubernetesSettings) -> None:
        """Raises ConfigError if the process runs outside a pod."""
        self._folder = Path(settings.account_dir)
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host:
            raise ConfigError(
                "engines_from.kubernetes: KUBERNETES_SERVICE_HOST is not set, so this is not a pod; run the gateway in "
                "the cluster, or list the engines in `engines`",
                field="engines_from.kubernetes",
            )
        self.address = Address(host, int(port) if port.isdigit() else 443, True)
        self.namespace = self._text("namespace")
        self._text("token")

    def tls(self) -> ssl.SSLContext:
        """A TLS context that trusts only the cluster's own CA. Raises ConfigError."""
        path = self._folder / "ca.crt"
        try:
            return ssl.create_default_context(cafile=str(path))
        except OSError as error:  # ssl.SSLError too
            raise _unreadable(path, str(error.strerror or error)) from None

    def headers(self) -> dict[str, str]:
        """The headers of a request. Raises ConfigError if the token cannot be read."""
        token = self._text("token")
        return {"authorization": f"Bearer {token}", "accept": "application/json"}

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
    """Keeps the list of a service's engines up to date. Belongs to the event loop."""

    def __init__(
        self,
        settings: KubernetesSettings,
        account: Account,
        api_key: str,
        found: Callable[[list[Place]], None],
    ) -> None:
        """`found` is called with all engines when they have changed. `api_key`: the engines'; empty: none."""
        self.settings = settings
        self.known = asyncio.Event()
        """Set after the first list."""
        self._account = account
        self._api_key = api_key
        self._found = found
        self._asker = HttpClient(account.tls())
        self._places: list[Place] | None = None
        self._log = EventLog("kubernetes")

    async def keep(self, every_s: Callable[[], float]) -> None:
        """List the endpoints every `every_s`, after failures with growing pauses, until cancelled."""
        pause_s = 0.0
        while True:
            try:
                await self._list()
                self.known.set()
                pause_s, reason = every_s(), ""
            except (Refused, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                reason = str(error)
            except (Unreachable, LinkBroken, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            except ConfigError as error:  # the token
                reason = error.message
            if reason:
                pause_s = min(LONGEST_PAUSE_S, 2 * (pause_s or every_s()))
                self._log.repeated(
                    30, "endpoints", "endpoints_unknown", service=self.settings.service, reason=reason
                )
            await asyncio.sleep(pause_s)

    async def _list(self) -> None:
        """List once. Raises Refused, Unreachable, LinkBroken, TimeoutError, ConfigError, and msgspec's errors."""
        # Version 0 lets the API server answer from its cache.
        query = {
            "labelSelector": f"kubernetes.io/service-name={self.settings.service}",
            "resourceVersion": "0",
        }
        path = (
            f"/apis/discovery.k8s.io/v1/namespaces/{quote(self._account.namespace, safe='')}/endpointslices"
        )
        target, address = f"{path}?{urlencode(query)}", self._account.address
        async with asyncio.timeout(patience(ANSWER_S)):
            status, body = await self._asker.ask(
                address, "GET", target, self._account.headers(), most_bytes=MAX_LIST_BYTES + 1
            )
        if status != 200:
            said = body[:1_000].decode("utf-8", "replace")
            raise Refused(f"the API server answers {status}: {said!a:.300}")
        if len(body) > MAX_LIST_BYTES:
            raise Refused(f"the list of slices is larger than {MAX_LIST_BYTES} bytes")
        slices = msgspec.json.decode(body, type=_List).items or []
        places = places_of(slices, self.settings, self._api_key)
        if places != self._places:
            self._places = places
            self._log.info("endpoints", service=self.settings.service, engines=len(places))
            self._found(places)


def places_of(slices: Iterable[Slice], settings: KubernetesSettings, api_key: str) -> list[Place]:
    """The ready engines of these slices, one per address, named by their pods."""
    found: dict[Address, Place] = {}
    for one in slices:
        port = _port_of(one.ports or [], settings)
        if port is None:
            continue
        for endpoint in one.endpoints or []:
            # A missing `ready` means ready, by the API's definition.
            if endpoint.conditions.ready is False or not endpoint.addresses:
                continue
            host = endpoint.addresses[0]
            address = Address(host, port, False)
            if host.startswith("/") or not endpoint_of(address):
                continue
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
    """The first valid port that the settings' `port_name` allows; None: there is none."""
    named = (one.port for one in ports if settings.port_name in ("", one.name))
    return next((port for port in named if port is not None and 0 < port < 65_536), None)
