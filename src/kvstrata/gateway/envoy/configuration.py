"""The configuration of the Envoy that carries a gateway's requests, as `kvstrata gateway --print-envoy` prints it.

gateway.yaml is the template; this module fills in the values of this gateway and writes the file of the engines.
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
"""The length of a body that is still to come."""
NUMBER, FRAGMENT = "x-kv-number", "x-kv-fragment"
"""Headers of the picker's answer that become metadata."""
AUTHZ = "envoy.filters.http.ext_authz"
UNAVAILABLE = 470
"""Stands for 503 in the picker's refusals."""
READ_BYTES = 1 << 20
"""Of a body, if the rest may pass the picker by."""
SHORT_BYTES = 64 << 10
"""Of a body that arrives before its sender's key is checked."""
UNSIZED_BYTES = 8 << 20
"""Of a body that is read whole, and whose head does not tell its length."""
MAX_CONNECTIONS = 16_384
SPARE_FILES = 256
MAX_HEAP_BYTES = 4 << 30
"""What Envoy may hold in its memory, if the host, or the container, has twice as much."""
MAX_PREFILLED = 1_024
"""Questions that wait until another engine has computed the prompt, with the contracts `nixl` and `mooncake`."""
MAX_ASKED = 256
"""Questions to the picker at a time, beside those of requests that wait in its queue: each takes a descriptor."""
STREAM, STREAM_ID = "x-kv-stream", "%CONNECTION_ID%.%START_TIME(%s%9f)%"
"""Names a request before the picker has numbered it; clients choose `x-request-id`, and may use one for many."""
LINE = (
    f"%DYNAMIC_METADATA({AUTHZ}:{NUMBER})% %ACCESS_LOG_TYPE% %RESPONSE_CODE% %UPSTREAM_HOST% %RESPONSE_FLAGS% "
    f"%UPSTREAM_REQUEST_ATTEMPT_COUNT% %DYNAMIC_METADATA(kv:marks)% {STREAM_ID}\n"
)
"""A request's line in the access log, which marks.py reads."""
_HTTP = "type.googleapis.com/envoy.extensions.filters.http"


class Place(NamedTuple):
    """Where the parts of one gateway meet: files and unix sockets in a folder that only its user may enter."""

    folder: Path
    host: str
    port: int

    @property
    def engines(self) -> Path:
        """The file of the engines."""
        return self.folder / "engines.json"

    @property
    def picker(self) -> Path:
        """The socket on which the picker answers."""
        return self.folder / "picker"

    @property
    def pages(self) -> Path:
        """The socket of the gateway's own pages."""
        return self.folder / "pages"

    @property
    def admin(self) -> Path:
        """The socket on which Envoy is told to drain."""
        return self.folder / "envoy"


def configuration(settings: GatewaySettings, place: Place, pipe: int) -> dict[str, Any]:
    """The whole configuration. `pipe`: descriptor for the module's first tokens; -1: Envoy takes no module, but Lua."""
    holds = bool(settings.queue.max_requests) or settings.split in ("nixl", "mooncake")
    asked = MAX_ASKED + (settings.queue.max_requests or MAX_PREFILLED if holds else 0)
    # Without these an answer takes a millisecond, beside what is asked for: then a picker that froze costs 1 s.
    waits_s = patience(1.0) + settings.tokens.deadline_ms / 1_000
    values: dict[str, Any] = {
        "admin": str(place.admin),
        "asked": asked,
        "authorities": authorities(),
        "buffer": READ_BYTES,
        "check": f"{patience(0.5):g}s",
        "connections": connections(settings),
        "engines": str(place.engines),
        "enters": 100 if settings.tenants else 0,
        "flush": {"access_log_flush_interval": "0.25s"} if pipe < 0 else {},
        "heap_bytes": heap_bytes(),
        "host": place.host,
        "line": LINE,
        "origins": _origins(settings),
        "pages": str(place.pages),
        "pages_asked": MAX_ASKED,
        "passes": not settings.tenants,
        "picker": str(place.picker),
        "port": place.port,
        # With tenants all of a body is read, since fields of theirs are added to it.
        "read_bytes": MAX_BODY_BYTES + 1 if settings.tenants else READ_BYTES,
        "short": SHORT_BYTES,
        "stream": {"key": STREAM, "value": STREAM_ID},
        "silence": f"{settings.timeouts.silence_s:g}s",
        "too_large": error_body(TOO_LARGE, "").decode(),
        "too_long": MAX_BODY_BYTES + 1,
        "unavailable": UNAVAILABLE,
        "unsized": UNSIZED_BYTES if settings.tenants else READ_BYTES,
        "waits": f"{settings.timeouts.silence_s if holds else waits_s:g}s",
        "watcher": _module(pipe) if pipe >= 0 else _lua(),
    }
    return dict(_filled(yaml.safe_load(TEXT.read_text()), values))


def heap_bytes() -> int:
    """What Envoy may hold in its memory."""
    return min(MAX_HEAP_BYTES, memory_limit().limit_bytes // 2)


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, dict):
        return {name: _filled(one, values) for name, one in part.items()}
    if isinstance(part, list):
        return [_filled(one, values) for one in part]
    return values[part[1:]] if isinstance(part, str) and part.startswith("$") else part


def _origins(settings: GatewaySettings) -> list[dict[str, Any]]:
    """Sites whose pages may ask: any where clients need a key, which pages do not have by themselves."""
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
    """Connections of clients at a time: each takes a descriptor, and one for its engine. Further ones are closed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = SPARE_FILES + MAX_ASKED + settings.queue.max_requests
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, (soft - spare) // 2))


def authorities() -> str:
    """The file of the authorities that this host trusts."""
    paths = ssl.get_default_verify_paths()
    return os.environ.get("SSL_CERT_FILE") or paths.cafile or "/etc/ssl/certs/ca-certificates.crt"


def engines_file(engines: Iterable[ServingEngine]) -> bytes:
    """What the file of the engines holds: those that are down too, for the case that all seem down."""
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
