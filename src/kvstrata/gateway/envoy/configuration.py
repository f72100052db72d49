"""The configuration of the Envoy that carries a gateway's requests, as `kvstrata gateway --print-envoy` prints it.

    client ─▶ ext_authz ──▶ watcher ─▶ router ─▶ engine          the picker answers ext_authz with an engine's place
                 │ unix socket  │ marks
                 ▼              ▼
              picker ◀── pipe of the access log

Only the file of the engines (EDS) changes while Envoy runs: a listener that changes would cut long answers.
"""

from __future__ import annotations

import os
import resource
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.errors import MAX_BODY_BYTES, TOO_LARGE, error_body
from kvstrata.gateway.fleet import EngineState, ServingEngine, endpoint_of
from kvstrata.patience import patience

ENDPOINT = "x-gateway-destination-endpoint"
NUMBER, FRAGMENT = "x-kv-number", "x-kv-fragment"
"""Headers of the picker's answer that become metadata, which no client can set; watch.c and watch.lua read them."""
AUTHZ = "envoy.filters.http.ext_authz"
RETRIED = (429, 502, 503)
"""Statuses of an engine that has not begun the request: another one may answer."""
RETRIES = 2
UNAVAILABLE = 470
"""Stands for 503 in the picker's refusals: Envoy takes a 5xx for a picker that failed, and lets the request pass."""
READ_BYTES = 1 << 20
"""Of a body, if the rest may pass the picker by."""
MAX_CONNECTIONS = 16_384
SPARE_FILES = 256
MAX_ASKED = 256
"""Questions to the picker at a time, beside those of requests that wait in its queue: each takes a descriptor."""
OWN_PAGES = ("/healthz", "/readyz", "/metrics")
LINE = (
    f"%DYNAMIC_METADATA({AUTHZ}:{NUMBER})% %ACCESS_LOG_TYPE% %RESPONSE_CODE% %UPSTREAM_HOST% %RESPONSE_FLAGS% "
    "%UPSTREAM_REQUEST_ATTEMPT_COUNT% %DYNAMIC_METADATA(kv:marks)% %REQ(X-REQUEST-ID)%\n"
)
"""A request's line in the access log, which marks.py reads."""
_HTTP = "type.googleapis.com/envoy.extensions.filters.http"
_MANAGER = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)
_BALANCING = "type.googleapis.com/envoy.extensions.load_balancing_policies"
_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_ALL = {
    "thresholds": [{"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}]
}
"""Envoy's own limit is 1,024 requests to a cluster."""
_LOCAL_FLAGS = ("UH", "UF", "UO", "NR", "URX", "UC", "UT", "LR", "UR", "SI", "DPE", "OM", "NC", "UPE")
"""Of Envoy's own answers; the picker's refusals (UAEX) have their body already."""


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


class Watcher(NamedTuple):
    """How Envoy runs the watcher."""

    pipe: int = -1
    """Descriptor for first tokens of the module; -1: Envoy takes no module, and Lua watches."""

    @property
    def filter(self) -> dict[str, Any]:
        """The watcher's place in the chain."""
        if self.pipe < 0:
            path = Path(__file__).with_name("watch.lua")
            config = {
                "@type": f"{_HTTP}.lua.v3.Lua",
                "default_source_code": {"inline_string": path.read_text()},
            }
            return {"name": "watch", "typed_config": config}
        config = {
            "@type": f"{_HTTP}.dynamic_modules.v3.DynamicModuleFilter",
            "dynamic_module_config": {"name": "kv_watch"},
            "filter_name": "watch",
            "filter_config": {
                "@type": "type.googleapis.com/google.protobuf.StringValue",
                "value": str(self.pipe),
            },
        }
        return {"name": "watch", "typed_config": config}


def configuration(settings: GatewaySettings, place: Place, watcher: Watcher) -> dict[str, Any]:
    """The whole configuration."""
    asked = MAX_ASKED + settings.queue.max_requests
    limit = {
        "@type": "type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3."
        "DownstreamConnectionsConfig",
        "max_active_downstream_connections": connections(settings),
    }
    monitor = {"name": "envoy.resource_monitors.global_downstream_max_connections", "typed_config": limit}
    return {
        "admin": {"address": {"pipe": {"path": str(place.admin), "mode": 0o600}}},
        "node": {"id": "gateway", "cluster": "kvstrata"},
        "overload_manager": {"resource_monitors": [monitor]},
        "static_resources": {
            "listeners": [_listener(settings, place, watcher)],
            "clusters": [
                _engines(place),
                _own("picker", place.picker, asked),
                _own("pages", place.pages, MAX_ASKED),
            ],
        },
    }


def connections(settings: GatewaySettings) -> int:
    """Connections of clients at a time: each takes a descriptor, and one for its engine. Further ones are closed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = SPARE_FILES + MAX_ASKED + settings.queue.max_requests
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, (soft - spare) // 2))


def _listener(settings: GatewaySettings, place: Place, watcher: Watcher) -> dict[str, Any]:
    return {
        "name": "clients",
        "address": {"socket_address": {"address": place.host, "port_value": place.port}},
        "per_connection_buffer_limit_bytes": READ_BYTES,
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": _manager(settings, watcher),
                    }
                ]
            }
        ],
    }


def _manager(settings: GatewaySettings, watcher: Watcher) -> dict[str, Any]:
    stdout = "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
    log = {
        "name": "envoy.access_loggers.stdout",
        "typed_config": {"@type": stdout, "log_format": {"text_format_source": {"inline_string": LINE}}},
    }
    return {
        "@type": _MANAGER,
        "stat_prefix": "clients",
        "server_name": "kvstrata",
        "request_headers_timeout": "10s",
        # The default of 300 s would cut a long prefill.
        "stream_idle_timeout": f"{settings.timeouts.silence_s:g}s",
        "common_http_protocol_options": {"idle_timeout": "75s"},
        "use_remote_address": True,
        "skip_xff_append": True,
        # Nobody is internal: headers of Envoy that a client sends are dropped.
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "255.255.255.255", "prefix_len": 32}]},
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "merge_slashes": True,
        "normalize_path": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "access_log": [log],
        # The module tells of first tokens by its pipe.
        "access_log_options": {"access_log_flush_interval": "0.25s"} if watcher.pipe < 0 else {},
        "local_reply_config": _local_replies(),
        "http_filters": [
            {"name": AUTHZ, "typed_config": _authz(settings)},
            watcher.filter,
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{_HTTP}.router.v3.Router"}},
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": _routes(settings),
                    "request_body_buffer_limit": read_bytes(settings),
                }
            ]
        },
    }


def _authz(settings: GatewaySettings) -> dict[str, Any]:
    """The question to the picker."""
    tenants = bool(settings.tenants)
    asks = (
        "x-request-id",
        "x-api-key",
        "content-type",
        "x-session-id",
        "session_id",
        "x-slo-class",
        "x-priority",
    )
    browser = ("origin", "sec-fetch-site", "sec-fetch-mode")
    given = ("authorization", "x-data-parallel-rank", "x-envoy-retry-on")
    # Without a queue an answer takes a millisecond, beside what is asked for: then a picker that froze costs 1 s.
    waits_s = patience(1.0) + settings.tokens.deadline_ms / 1_000
    waits_s = settings.timeouts.silence_s if settings.queue.max_requests else waits_s
    return {
        "@type": f"{_HTTP}.ext_authz.v3.ExtAuthz",
        # Without a picker requests go on, to an engine that Envoy chooses; but nobody would check a tenant's key.
        "failure_mode_allow": not tenants,
        "status_on_error": {"code": "ServiceUnavailable"},
        "with_request_body": {
            "max_request_bytes": read_bytes(settings),
            "allow_partial_message": True,
            "pack_as_bytes": True,
        },
        "allowed_headers": {"patterns": _exactly(*asks, *browser)},
        "http_service": {
            "server_uri": {"uri": "http://picker", "cluster": "picker", "timeout": f"{waits_s:g}s"},
            "path_prefix": "/choose",
            "authorization_response": {
                "allowed_upstream_headers": {"patterns": _exactly(*given)},
                "allowed_client_headers": {
                    "patterns": _exactly("retry-after", "content-type", "www-authenticate", "connection")
                },
                "dynamic_metadata_from_headers": {"patterns": _exactly(ENDPOINT, NUMBER, FRAGMENT)},
            },
        },
    }


def read_bytes(settings: GatewaySettings) -> int:
    """Bytes of a body that the picker reads: with tenants all, since fields of theirs are added to it."""
    return MAX_BODY_BYTES + 1 if settings.tenants else READ_BYTES


def _exactly(*names: str) -> list[dict[str, str]]:
    return [{"exact": name} for name in names]


def _local_replies() -> dict[str, Any]:
    """Envoy's own answers in the shape of the API."""
    error = {
        "message": "%LOCAL_REPLY_BODY%",
        "type": "server_error",
        "param": None,
        "code": "%RESPONSE_FLAGS%",
    }
    shape = {"json_format": {"error": error}}
    unavailable = {"default_value": UNAVAILABLE, "runtime_key": "kvstrata.unavailable"}
    own_503 = {
        "status_code_filter": {"comparison": {"op": "EQ", "value": {**unavailable, "default_value": 503}}}
    }
    websocket = {"header": {"name": "upgrade", "string_match": {"exact": "websocket", "ignore_case": True}}}
    return {
        "mappers": [
            {
                "filter": {"header_filter": websocket},
                "status_code": 426,
                "body": {"inline_string": "this gateway speaks no WebSocket; send requests by HTTP"},
                "body_format_override": shape,
            },
            {
                "filter": {"status_code_filter": {"comparison": {"op": "EQ", "value": unavailable}}},
                "status_code": 503,
            },
            {
                "filter": {
                    "and_filter": {"filters": [own_503, {"response_flag_filter": {"flags": ["UAEX"]}}]}
                },
                "body": {"inline_string": "the gateway's picker does not answer; come again in a second"},
                "body_format_override": shape,
            },
            {
                "filter": {"response_flag_filter": {"flags": list(_LOCAL_FLAGS)}},
                "body_format_override": shape,
            },
        ]
    }


def _routes(settings: GatewaySettings) -> list[dict[str, Any]]:
    skips = {AUTHZ: {"@type": f"{_HTTP}.ext_authz.v3.ExtAuthzPerRoute", "disabled": True}}
    too_long = {"start": MAX_BODY_BYTES + 1, "end": (1 << 63) - 1}
    get = [{"name": ":method", "string_match": {"exact": "GET"}}]

    def own(cluster: str, **match: Any) -> dict[str, Any]:
        route = {"cluster": cluster, "timeout": "30s"}
        return {"match": match, "route": route, "typed_per_filter_config": skips}

    served = [{"path": path} for path in ("/health", "/ping", "/version", "/v1/models")]
    retry = {
        "retry_on": "connect-failure,refused-stream,retriable-status-codes",
        "retriable_status_codes": list(RETRIED),
        "num_retries": RETRIES,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        "host_selection_retry_max_attempts": 3,
    }
    return [
        *(own("pages", path=path) for path in OWN_PAGES),
        own("pages", prefix="/gateway/"),
        *(own("picker", **match, headers=get) for match in (*served, {"prefix": "/v1/models/"})),
        {
            "match": {"prefix": "/", "headers": [{"name": "content-length", "range_match": too_long}]},
            "direct_response": {
                "status": TOO_LARGE.status,
                "body": {"inline_string": error_body(TOO_LARGE, "").decode()},
            },
            "response_headers_to_add": [{"header": {"key": "content-type", "value": "application/json"}}],
            "typed_per_filter_config": skips,
        },
        {
            "match": {"prefix": "/"},
            # An answer that is compressed could not be watched.
            "request_headers_to_remove": ["accept-encoding", "te"],
            "response_headers_to_remove": ["set-cookie", "x-envoy-upstream-service-time"],
            "route": {
                "cluster": "engines",
                "timeout": "0s",
                "retry_policy": retry,
                "auto_host_rewrite": True,
            },
        },
    ]


def _engines(place: Place) -> dict[str, Any]:
    chosen = {"metadata": {"key": AUTHZ, "path": [{"key": ENDPOINT}]}}
    least = {"@type": f"{_BALANCING}.least_request.v3.LeastRequest"}
    override = {
        "@type": f"{_BALANCING}.override_host.v3.OverrideHost",
        "override_host_sources": [chosen],
        "fallback_policy": {
            "policies": [{"typed_extension_config": {"name": "least", "typed_config": least}}]
        },
    }
    tls = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "auto_host_sni": True,
        "auto_sni_san_validation": True,
        "common_tls_context": {"validation_context": {"trusted_ca": {"filename": authorities()}}},
    }
    return {
        "name": "engines",
        "type": "EDS",
        "connect_timeout": "2s",
        "eds_cluster_config": {"eds_config": {"path_config_source": {"path": str(place.engines)}}},
        "circuit_breakers": {
            "thresholds": [
                {
                    **_ALL["thresholds"][0],
                    "retry_budget": {"budget_percent": {"value": 20.0}, "min_retry_concurrency": 10},
                }
            ]
        },
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": override}}]
        },
        # vLLM closes a connection after 5 s without a request.
        "typed_extension_protocol_options": {
            _OPTIONS: {
                "@type": f"type.googleapis.com/{_OPTIONS}",
                "common_http_protocol_options": {"idle_timeout": "4s"},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
        # A host that is gone without a word: power, network.
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 10, "keepalive_interval": 5}
        },
        "transport_socket_matches": [
            {
                "name": "tls",
                "match": {"tls": True},
                "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
            },
            {
                "name": "plain",
                "match": {},
                "transport_socket": {
                    "name": "envoy.transport_sockets.raw_buffer",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"
                    },
                },
            },
        ],
    }


def _own(name: str, path: Path, connections: int) -> dict[str, Any]:
    """A cluster of this gateway's process. One that does not answer is not asked any more within 1 s."""
    endpoint = {"endpoint": {"address": {"pipe": {"path": str(path)}}}}
    checks = {
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                **dict.fromkeys(
                    ("interval", "no_traffic_interval", "timeout", "unhealthy_interval"),
                    f"{patience(0.5):g}s",
                ),
                **dict.fromkeys(("unhealthy_threshold", "healthy_threshold"), 1),
                "http_health_check": {"path": "/healthz"},
            }
        ],
        "close_connections_on_host_health_failure": True,
    }
    return {
        "name": name,
        "connect_timeout": "0.5s",
        "circuit_breakers": {"thresholds": [{**_ALL["thresholds"][0], "max_connections": connections}]},
        **(checks if name == "picker" else {}),
        "typed_extension_protocol_options": {
            _OPTIONS: {
                "@type": f"type.googleapis.com/{_OPTIONS}",
                # A fragment with the ids of a long prompt is one header.
                "common_http_protocol_options": {"max_response_headers_kb": 4_096},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def authorities() -> str:
    """The file of the authorities that this host trusts."""
    paths = ssl.get_default_verify_paths()
    return os.environ.get("SSL_CERT_FILE") or paths.cafile or "/etc/ssl/certs/ca-certificates.crt"


def engines_file(engines: Iterable[ServingEngine]) -> bytes:
    """What the file of the engines holds: those that are down too, for the case that all seem down."""
    found = []
    for engine in engines:
        address, endpoint = engine.place.address, endpoint_of(engine.place.address)
        if not endpoint or engine.state is EngineState.LEAVING:
            continue
        host = endpoint.rpartition(":")[0].strip("[]")
        one: dict[str, Any] = {
            "endpoint": {
                "hostname": address.name or host,
                "address": {"socket_address": {"address": host, "port_value": address.port}},
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
