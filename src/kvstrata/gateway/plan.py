"""Checks a gateway's settings against each other, and reads the files that they name; nothing is opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvstrata.config.gateway_model import EngineSettings, GatewaySettings, GatewayTenantSettings
from kvstrata.config.private_file import read_bearer_token
from kvstrata.errors import ConfigError, install
from kvstrata.gateway.fleet import DNS, endpoint_of, place_of
from kvstrata.gateway.kubernetes import Account
from kvstrata.gateway.residency.sources import MAX_PORT
from kvstrata.gateway.tokens.tokenizer import OwnTokenizer
from kvstrata.process.http_gate import is_loopback
from kvstrata.process.http_local import TOKEN_FIELD, fresh_token
from kvstrata.process.ports import Listening, host_and_port, refuse_port_twice

if TYPE_CHECKING:
    from kvstrata.rpc.zmq_curve import ClusterKeys

PICKER_NEEDS = {"grpc": "grpcio", "xds": "xds-protos"}
"""Modules of the extra `picker`, and their packages."""
SHARE = frozenset(("auto", "ttft", "least_loaded"))
"""Policies that go by what other gateways have sent."""


class Plan(NamedTuple):
    """Checked settings with the keys in their files; nothing is opened yet."""

    settings: GatewaySettings
    token: str
    """Of operators."""
    engines: list[tuple[EngineSettings, str]]
    """With the key of each; empty: it has none."""
    tenants: list[tuple[GatewayTenantSettings, str]]
    tokenizers: dict[str, OwnTokenizer]
    """By model."""
    account: Account | None = None
    """Who asks Kubernetes for engines; None: nobody does."""
    found_key: str = ""
    """Of the engines that Kubernetes names."""
    sharing_keys: ClusterKeys | None = None
    """Of the gateways that share; None: they share nothing, or this user's key."""
    controller_keys: ClusterKeys | None = None
    """For the controllers; None: none is asked, or by this user's key."""


def tcp_ports(settings: GatewaySettings) -> list[Listening]:
    """The tcp ports that the settings ask for."""
    http = settings.http
    found = [Listening("http.port", http.host, http.port)]
    for name, place in (("picker", settings.picker.listen), ("sharing", settings.sharing.listen)):
        if place:
            found.append(Listening(f"{name}.listen", *host_and_port(place)))
    return found


def plan(settings: GatewaySettings, made: Mapping[str, OwnTokenizer] | None = None) -> Plan:
    """Check the settings, and read the files that they name, but for the tokenizers in `made`. Raises ConfigError."""
    http, picker = settings.http, settings.picker
    refuse_port_twice(tcp_ports(settings))
    _check_picker(settings)
    sharing_keys = _check_sharing(settings)
    controller_keys = _check_controllers(settings)
    closed = is_loopback(http.host) or bool(picker.listen and picker.only)
    if not (closed or settings.tenants or settings.insecure):
        raise _wrong(
            "http.host",
            f"{http.host!r} is not loopback, and clients need no key: name tenants with keys, or use --insecure to "
            "serve everybody who reaches this port",
        )
    service = settings.engines_from.kubernetes
    if not (settings.engines or service):
        raise _wrong(
            "engines", "none is named; give --engine URL, or `engines` or `engines_from` in the file"
        )
    engines = _checked_engines(settings)
    tenants = [(one, _key(one.key_file, f"tenants[{i}].key_file")) for i, one in enumerate(settings.tenants)]
    _refuse_twice("tenants", "name", [one.name for one, _ in tenants])
    if len({key for _, key in tenants}) < len(tenants):
        raise _wrong("tenants", "two have the same key; give each its own")
    _check_classes(settings)
    if settings.queue.max_requests and picker.listen:
        raise _wrong(
            "queue.max_requests",
            "an Envoy of one's own would not wait for the picker; leave the queue to a gateway without one",
        )
    if settings.queue.max_requests and not settings.predicts:
        raise _wrong(
            "queue.max_requests", "needs `policy: auto` or `ttft`, which measure how long engines take"
        )
    token = read_bearer_token(http.token_file, TOKEN_FIELD) if http.token_file else fresh_token()
    return Plan(
        settings,
        token,
        engines,
        tenants,
        _tokenizers(settings, made or {}),
        Account(service) if service is not None else None,
        _key(service.api_key_file, "engines_from.kubernetes.api_key_file") if service is not None else "",
        sharing_keys,
        controller_keys,
    )


def _wrong(field: str, says: str) -> ConfigError:
    return ConfigError(f"{field}: {says}", field=field)


def _checked_engines(settings: GatewaySettings) -> list[tuple[EngineSettings, str]]:
    """The engines of the settings with their keys. Raises ConfigError."""
    engines = []
    for i, one in enumerate(settings.engines):
        field, many = f"engines[{i}]", one.url.startswith(DNS)
        engines.append((one, _key(one.api_key_file, f"{field}.api_key_file")))
        several = f"but {one.url!r:.200} stands for several engines; leave it empty,"
        if many and one.kv_events.startswith("tcp:"):
            raise _wrong(
                f"{field}.kv_events", f"{one.kv_events!r} is one place, {several} so that each is asked"
            )
        if many and one.instance:
            says = f"{one.instance!r} is one instance, {several} and set `engine_url` of their connectors"
            raise _wrong(f"{field}.instance", says)
        if one.kv_events_replay and not one.kv_events.startswith("tcp:"):
            raise _wrong(f"{field}.kv_events_replay", "needs `kv_events` beside it, as tcp://HOST:PORT")
        ranks = max(1, one.data_parallel_size)
        for name, endpoint in (("kv_events", one.kv_events), ("kv_events_replay", one.kv_events_replay)):
            if endpoint.startswith("tcp:") and int(endpoint.rpartition(":")[2]) + ranks - 1 > MAX_PORT:
                raise _wrong(
                    f"{field}.{name}",
                    f"{endpoint!r:.200} is above the last port, or one of the ranks beside it is (data_parallel_size "
                    f"{ranks})",
                )
    places = [
        place_of(msgspec.structs.replace(one, url=one.url.removeprefix(DNS)), key) for one, key in engines
    ]
    _refuse_twice("engines", "name", [place.name for place in places])
    _refuse_twice("engines", "url", [f"{place.address.host}:{place.address.port}" for place in places])
    return engines


def _check_classes(settings: GatewaySettings) -> None:
    """Raise ConfigError for wrong classes of service."""
    _refuse_twice("slo", "name", [one.name for one in settings.slo])
    for i, slo in enumerate(settings.slo):
        if slo.shed and not settings.predicts:
            raise _wrong(f"slo[{i}].shed", "needs `policy: auto` or `ttft` too")
        if slo.shed and not slo.ttft_ms:
            raise _wrong(f"slo[{i}].shed", f"needs `slo[{i}].ttft_ms` too")
    classes = {one.name for one in settings.slo}
    for i, tenant in enumerate(settings.tenants):
        if tenant.slo and tenant.slo not in classes:
            known = ", ".join(sorted(classes)) or "none"
            says = f"no class of service is named {tenant.slo!r}; `slo` has {known}"
            raise _wrong(f"tenants[{i}].slo", says)


def _check_picker(settings: GatewaySettings) -> None:
    picker = settings.picker
    if not picker.listen:
        if picker.only:
            raise _wrong("picker.only", "nothing would take requests; set picker.listen")
        return
    for module, package in PICKER_NEEDS.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"the picker needs {package}: {install('gateway,picker')}", field="picker.listen"
            )
    if bool(picker.tls_cert_file) != bool(picker.tls_key_file):
        missing = "tls_key_file" if picker.tls_cert_file else "tls_cert_file"
        raise _wrong(f"picker.{missing}", "a certificate and its key belong together; name both")
    if picker.tls_ca_file and not picker.tls_cert_file:
        says = "clients show certificates only over TLS; name tls_cert_file and tls_key_file"
        raise _wrong("picker.tls_ca_file", says)
    host, _ = host_and_port(picker.listen)
    if not (is_loopback(host) or picker.tls_ca_file or settings.insecure):
        raise _wrong(
            "picker.listen",
            f"{host!r} is not loopback, and any Envoy may ask: name tls_ca_file, or use --insecure to answer "
            "everybody who reaches this port",
        )
    for i, engine in enumerate(settings.engines):
        if not engine.url.startswith(DNS) and not endpoint_of(place_of(engine, "").address):
            raise _wrong(
                f"engines[{i}].url",
                f"{engine.url!r:.200} names a host, but Envoy must be told an address: write the address, or "
                f"dns+{engine.url} for all addresses of the name",
            )


def _check_sharing(settings: GatewaySettings) -> ClusterKeys | None:
    """The keys in the file of the gateways that share. Raises ConfigError."""
    sharing = settings.sharing
    if sharing.gateways and not sharing.listen:
        raise _wrong("sharing.listen", "gateways that are told something must be heard too; give HOST:PORT")
    if not sharing.listen:
        return None
    if settings.policy not in SHARE:
        raise _wrong(
            "sharing.listen",
            f"the policy {settings.policy!r} does not go by what other gateways do; use one of "
            f"{', '.join(sorted(SHARE))}, or leave it out",
        )
    host, _ = host_and_port(sharing.listen)
    if not (sharing.curve_file or is_loopback(host)):
        says = f"{host!r} is not loopback: give sharing.curve_file, a secret that all gateways have"
        raise _wrong("sharing.listen", says)
    if not sharing.curve_file:
        return None
    from kvstrata.gateway.sharing.sockets import sharing_keys

    return sharing_keys(sharing.curve_file)


def _check_controllers(settings: GatewaySettings) -> ClusterKeys | None:
    """The keys in the file for the controllers. Raises ConfigError."""
    wanted = settings.controllers
    _refuse_twice("controllers", "urls", list(wanted.urls))
    if wanted.curve_file and wanted.insecure:
        says = "controllers without keys need no curve_file; leave one of them out"
        raise _wrong("controllers.insecure", says)
    for i, url in enumerate(wanted.urls):
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        if not 0 < int(port) <= MAX_PORT:
            says = f"{url!r}: {port} is no port; give a controller's reply port, as 8400"
            raise _wrong(f"controllers.urls[{i}]", says)
        if not (wanted.curve_file or wanted.insecure or is_loopback(host.strip("[]"))):
            raise _wrong(
                f"controllers.urls[{i}]",
                f"{url!r} is not loopback: give controllers.curve_file, this gateway's keys as `kvstrata cluster add` "
                "makes them",
            )
    if not (wanted.urls and wanted.curve_file):
        return None
    from kvstrata.rpc.zmq_curve import read_cluster_keys

    return read_cluster_keys(wanted.curve_file, "controllers.curve_file")


def _tokenizers(settings: GatewaySettings, made: Mapping[str, OwnTokenizer]) -> dict[str, OwnTokenizer]:
    """The tokenizers by model. Raises ConfigError."""
    wanted = settings.tokens.tokenizers
    _refuse_twice("tokens.tokenizers", "model", [one.model for one in wanted])
    found = {}
    for i, one in enumerate(wanted):
        kept = made.get(one.model)
        if kept is None or kept.folder != one.path:
            kept = OwnTokenizer(one.model, one.path, f"tokens.tokenizers[{i}].path")
        found[one.model] = kept
    return found


def _key(path: str, field: str) -> str:
    return read_bearer_token(path, field) if path else ""


def _refuse_twice(field: str, what: str, words: list[str]) -> None:
    for i, word in enumerate(words):
        if word in words[:i]:
            raise _wrong(f"{field}[{i}].{what}", f"{word!r:.200} is named twice; leave one out")
