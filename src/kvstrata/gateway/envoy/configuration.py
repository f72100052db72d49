"""The configuration of the gateway's own Envoy, which `kvstrata gateway --print-envoy` prints.

gateway.yaml is the template; this module fills in the gateway's values and makes the endpoints file with the engines.
"""

from __future__ import annotations

import os
import resource
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.errors import MAX_BODY_BYTES, TOO_LARGE, error_body
from kvstrata.gateway.fleet import EngineState, ServingEngine, endpoint_of
from kvstrata.memory.segment_settings import memory_limit
from kvstrata.patience import patience
from kvstrata.process.http_gate import is_loopback

TEXT = Path(__file__).with_name("gateway.yaml")
ENDPOINT = "x-gateway-destination-endpoint"
LENGTH = "x-kv-length"
"""Header of an /enter check: the Content-Length of the request, whose body has not arrived yet."""
NUMBER, FRAGMENT = "x-kv-number", "x-kv-fragment"
"""Headers of the picker's response that Envoy turns into metadata: the request's number, and JSON for its body."""
AUTHZ = "envoy.filters.http.ext_authz"
UNAVAILABLE = 470
"""Status of the picker's refusals in place of 503; Envoy maps it back to 503 for the client (gateway.yaml)."""
READ_BYTES = 1 << 20
"""Maximum bytes of a body that the picker gets without tenants; Envoy forwards the rest to the engine only."""
SHORT_BYTES = 64 << 10
"""Maximum length of a body that Envoy accepts before the picker has checked its sender's key."""
UNSIZED_BYTES = 8 << 20
"""Maximum length of a body without Content-Length, if Envoy collects the whole body (with tenants)."""
MAX_CONNECTIONS = 16_384
SPARE_FILES = 256
MAX_HEAP_BYTES = 4 << 30
"""Maximum size of Envoy's heap; less if half of the memory of the host or container is less."""
MAX_PREFILL_CHECKS = 1_024
"""Maximum number of checks that wait for another engine's prefill, with the contracts `nixl` and `mooncake`."""
MAX_CHECKS = 256
"""Maximum number of other checks at the picker at a time; each takes a file descriptor."""
TRUSTS_NOBODY = {"verify_certificate_hash": ["00" * 32]}
"""Accepts no certificate, for hosts without CA certificates."""
STREAM, STREAM_ID = "x-kv-stream", "%CONNECTION_ID%.%START_TIME(%s%9f)%"
"""Header and format of Envoy's own id of a request, unique even if a client reuses an `x-request-id`."""
LINE = (
    f"%DYNAMIC_METADATA({AUTHZ}:{NUMBER})% %ACCESS_LOG_TYPE% %RESPONSE_CODE% %UPSTREAM_HOST% %RESPONSE_FLAGS% "
    f"%UPSTREAM_REQUEST_ATTEMPT_COUNT% %DYNAMIC_METADATA(kv:marks)% {STREAM_ID}\n"
)
"""Format of a request's line in the access log, which marks.py parses."""
_HTTP = "type.googleapis.com/envoy.extensions.filters.http"


class Place(NamedTuple):
    """The clients' port, and a folder, closed to other users, with the files and sockets between gateway and Envoy."""

    folder: Path
    host: str
    port: int

    @property
    def engines(self) -> Path:
        """The file with the engines' endpoints (EDS)."""
        return self.folder / "engines.json"

    @property
    def picker(self) -> Path:
        """The socket of the picker (picker/front.py)."""
        return self.folder / "picker"

    @property
    def pages(self) -> Path:
        """The socket of the gateway's own HTTP pages."""
        return self.folder / "pages"

    @property
    def admin(self) -> Path:
        """The socket of Envoy's admin interface."""
        return self.folder / "envoy"


def configuration(settings: GatewaySettings, place: Place, pipe: int) -> dict[str, Any]:
    """The whole configuration. `pipe`: descriptor to which the module reports first tokens; -1: use Lua, no module."""
    holds = bool(settings.queue.max_requests) or settings.split in ("nixl", "mooncake")
    asked = MAX_CHECKS + (settings.queue.max_requests or MAX_PREFILL_CHECKS if holds else 0)
    # Without such waits a check takes about a millisecond, so a picker that is frozen delays a request by 1 s only.
    waits_s = patience(1.0) + settings.tokens.deadline_ms / 1_000
    known = authorities()
    has_authorities = Path(known).is_file()
    values: dict[str, Any] = {
        "admin": str(place.admin),
        "asked": asked,
        "buffer": READ_BYTES,
        "check": f"{patience(0.5):g}s",
        "connections": connections(settings),
        "engines": str(place.engines),
        "enters": 100 if settings.tenants else 0,
        "flush": {"access_log_flush_interval": "0.25s"} if pipe < 0 else {},
        "has_authorities": has_authorities,
        "heap_bytes": heap_bytes(),
        "host": place.host,
        "line": LINE,
        "origins": _origins(settings),
        "pages": str(place.pages),
        "pages_asked": MAX_CHECKS,
        "passes": not settings.tenants,
        "picker": str(place.picker),
        "port": place.port,
        # With tenants the whole body is read, since the gateway adds the tenant's fields to it.
        "read_bytes": MAX_BODY_BYTES + 1 if settings.tenants else READ_BYTES,
        "short": SHORT_BYTES,
        "stream": {"key": STREAM, "value": STREAM_ID},
        "silence": f"{settings.timeouts.silence_s:g}s",
        "too_large": error_body(TOO_LARGE, "").decode(),
        "too_long": MAX_BODY_BYTES + 1,
        "trusts": {"trusted_ca": {"filename": known}} if has_authorities else TRUSTS_NOBODY,
        "unavailable": UNAVAILABLE,
        "unsized": UNSIZED_BYTES if settings.tenants else READ_BYTES,
        "waits": f"{settings.timeouts.silence_s if holds else waits_s:g}s",
        "watcher": _module(pipe) if pipe >= 0 else _lua(),
    }
    return dict(_filled(yaml.safe_load(TEXT.read_text()), values))


def heap_bytes() -> int:
    """Maximum size of Envoy's heap on this host or in this container."""
    return min(MAX_HEAP_BYTES, memory_limit().limit_bytes // 2)


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, dict):
        return {name: _filled(one, values) for name, one in part.items()}
    if isinstance(part, list):
        return [_filled(one, values) for one in part]
    return values[part[1:]] if isinstance(part, str) and part.startswith("$") else part


def _origins(settings: GatewaySettings) -> list[dict[str, Any]]:
    """Origins whose pages may send requests: any if clients need keys or the port is not loopback, else this port's."""
    if settings.tenants or not is_loopback(settings.http.host):
        return [{"safe_regex": {"regex": ".*"}}]
    hosts = [*settings.http.allowed_hosts, f"localhost:{settings.http.port}"]
    return [{"exact": f"{scheme}://{host}"} for host in hosts for scheme in ("http", "https")]


def _module(pipe: int) -> dict[str, Any]:
    text = {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": str(pipe)}
    return {
        "@type": f"{_HTTP}.dynamic_modules.v3.DynamicModuleFilter",
        "dynamic_module_config": {"name": "kv_watch"},
        "filter_name": "watch",
        "filter_config": text,
    }


def _lua() -> dict[str, Any]:
    text = TEXT.with_name("watch.lua").read_text()
    return {"@type": f"{_HTTP}.lua.v3.Lua", "default_source_code": {"inline_string": text}}


def connections(settings: GatewaySettings) -> int:
    """Maximum number of clients' connections; each takes two descriptors, one of them to its engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = SPARE_FILES + MAX_CHECKS + settings.queue.max_requests
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, (soft - spare) // 2))


def authorities() -> str:
    """The file of the CA certificates that this host trusts; small containers do not have it."""
    paths = ssl.get_default_verify_paths()
    return os.environ.get("SSL_CERT_FILE") or paths.cafile or "/etc/ssl/certs/ca-certificates.crt"


def engines_file(engines: Iterable[ServingEngine]) -> bytes:
    """The endpoints file for Envoy. Engines that are down are listed as unhealthy, since Envoy uses them if all are."""
    found = []
    for engine in engines:
        address, endpoint = engine.place.address, endpoint_of(engine.place.address)
        if not endpoint or engine.state is EngineState.LEAVING or engine.is_foreign:
            continue
        host = endpoint.rpartition(":")[0].strip("[]")
        place = {"socket_address": {"address": host, "port_value": address.port}}
        one: dict[str, Any] = {
            "endpoint": {
                "hostname": address.name or host,
                "address": {"pipe": {"path": endpoint}} if endpoint.startswith("/") else place,
            },
            "health_status": "UNHEALTHY" if engine.state is EngineState.DOWN else "HEALTHY",
        }
        if address.tls:
            one["metadata"] = {"filter_metadata": {"envoy.transport_socket_match": {"tls": True}}}
        found.append(one)
    load = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": "engines",
        "endpoints": [{"lb_endpoints": found}] if found else [],
    }
    return msgspec.json.encode({"resources": [load]})
