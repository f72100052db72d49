"""Checks a gateway's settings against each other, and reads the files that they name; opens no port."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.config.gateway_model import EngineSettings, GatewaySettings, GatewayTenantSettings
from kvstrata.config.private_file import read_bearer_token
from kvstrata.errors import ConfigError, install
from kvstrata.gateway.fleet import DNS, endpoint_of, place_of
from kvstrata.gateway.kubernetes import Account
from kvstrata.gateway.probing import uid_of
from kvstrata.gateway.residency.sources import MAX_PORT
from kvstrata.gateway.tokens.tokenizer import OwnTokenizer
from kvstrata.process.http_gate import is_loopback
from kvstrata.process.http_local import TOKEN_FIELD, fresh_token
from kvstrata.process.ports import Listening, host_and_port, refuse_port_twice

if TYPE_CHECKING:
    from kvstrata.rpc.zmq_curve import ClusterKeys

PICKER_NEEDS = {"grpc": "grpcio", "xds": "xds-protos"}
"""Modules that the extra `picker` provides, and their packages."""
SHARE = frozenset(("auto", "ttft", "least_loaded"))
"""Policies that use the events from other gateways."""


class Plan(NamedTuple):
    """Checked settings, and the contents of the files that they name."""

    settings: GatewaySettings
    token: str
    """The operators' bearer token."""
    engines: list[tuple[EngineSettings, str]]
    """Each with its API key; empty: it has none."""
    tenants: list[tuple[GatewayTenantSettings, str]]
    tokenizers: dict[str, OwnTokenizer]
    """By model."""
    account: Account | None = None
    """The service account for Kubernetes; None: no engines come from Kubernetes."""
    found_key: str = ""
    """API key of the engines from Kubernetes; empty: they have none."""
    sharing_keys: ClusterKeys | None = None
    """Keys between gateways; None: no sharing, or the key that this user's processes share."""
    controller_keys: ClusterKeys | None = None
    """Keys towards the controllers; None: no controllers, no keys, or the key that this user's processes share."""


def tcp_ports(settings: GatewaySettings) -> list[Listening]:
    """The TCP ports that the settings name."""
    http = settings.http
    found = [Listening("http.port", http.host, http.port)]
    for name, place in (("picker", settings.picker.listen), ("sharing", settings.sharing.listen)):
        if place:
            found.append(Listening(f"{name}.listen", *host_and_port(place)))
    return found


def plan(settings: GatewaySettings, made: Mapping[str, OwnTokenizer] | None = None) -> Plan:
    """Check the settings, and read their files; `made`: loaded tokenizers to use again. Raises ConfigError."""
    refuse_port_twice(tcp_ports(settings))
    for wrong, field, says in _checks(settings):
        if wrong:
            raise _wrong(field, says)
    engines = [
        (one, _key(one.api_key_file, f"engines[{i}].api_key_file")) for i, one in enumerate(settings.engines)
    ]
    tenants = [(one, _key(one.key_file, f"tenants[{i}].key_file")) for i, one in enumerate(settings.tenants)]
    if len({key for _, key in tenants}) < len(tenants):
        raise _wrong("tenants", "two tenants have the same key; give each its own")
    http, service, controllers = settings.http, settings.engines_from.kubernetes, settings.controllers
    sharing_keys = controller_keys = None
    if settings.sharing.listen and settings.sharing.curve_file:
        from kvstrata.gateway.sharing.sockets import sharing_keys as read_keys

        sharing_keys = read_keys(settings.sharing.curve_file)
    if controllers.urls and controllers.curve_file:
        from kvstrata.rpc.zmq_curve import read_cluster_keys

        controller_keys = read_cluster_keys(controllers.curve_file, "controllers.curve_file")
    return Plan(
        settings,
        read_bearer_token(http.token_file, TOKEN_FIELD) if http.token_file else fresh_token(),
        engines,
        tenants,
        _tokenizers(settings, made or {}),
        Account(service) if service is not None else None,
        _key(service.api_key_file, "engines_from.kubernetes.api_key_file") if service is not None else "",
        sharing_keys,
        controller_keys,
    )


Check = tuple[bool, str, str]
"""Whether a setting is wrong, its field, and the message."""


def _checks(settings: GatewaySettings) -> Iterator[Check]:
    http, picker, queue = settings.http, settings.picker, settings.queue
    yield from _picker_checks(settings)
    yield from _cluster_checks(settings)
    closed = is_loopback(http.host) or bool(picker.listen and picker.only) or settings.insecure
    yield (
        not (closed or settings.tenants),
        "http.host",
        f"{http.host!r} is not loopback, and clients need no key: set tenants with keys, or use --insecure to serve "
        "anyone who can reach this port",
    )
    none = "no engine is named; give --engine URL, or `engines` or `engines_from` in the file"
    yield not (settings.engines or settings.engines_from.kubernetes), "engines", none
    yield from _engine_checks(settings)
    yield from _twice("tenants", "name", [one.name for one in settings.tenants])
    yield from _class_checks(settings)
    own = "cannot be used with picker.listen, since your own Envoy would not wait for the picker; leave one of them out"
    yield bool(queue.max_requests and picker.listen), "queue.max_requests", own
    measures = "needs `policy: auto` or `ttft`, which measure how long engines take"
    yield bool(queue.max_requests and not settings.predicts), "queue.max_requests", measures
    yield bool(settings.split and not settings.predicts), "split", measures
    yield from _twice("tokens.tokenizers", "model", [one.model for one in settings.tokens.tokenizers])


def _engine_checks(settings: GatewaySettings) -> Iterator[Check]:
    for i, one in enumerate(settings.engines):
        field, many = f"engines[{i}]", one.url.startswith(DNS)
        several = f"but {one.url!r:.200} stands for several engines; leave it empty"
        place = f"{one.kv_events!r} is one address, {several}, so that each engine is asked for its own"
        yield many and one.kv_events.startswith("tcp:"), f"{field}.kv_events", place
        instance = f"{one.instance!r} is one instance, {several}, and set `engine_url` of their connectors"
        yield bool(many and one.instance), f"{field}.instance", instance
        yield (
            bool(one.user) and uid_of(one.user) < 0,
            f"{field}.user",
            f"this host has no user {one.user!r}",
        )
        alone = bool(one.kv_events_replay) and not one.kv_events.startswith("tcp:")
        yield alone, f"{field}.kv_events_replay", "needs `kv_events` too, as tcp://HOST:PORT"
        ranks = max(1, one.data_parallel_size)
        for name, endpoint in (("kv_events", one.kv_events), ("kv_events_replay", one.kv_events_replay)):
            yield (
                endpoint.startswith("tcp:") and int(endpoint.rpartition(":")[2]) + ranks - 1 > MAX_PORT,
                f"{field}.{name}",
                f"{endpoint!r:.200}: with data_parallel_size {ranks}, the last rank's port would be above {MAX_PORT}; "
                "choose a lower port",
            )
    places = [place_of(one, "") for one in settings.engines]
    yield from _twice("engines", "name", [place.name for place in places])
    yield from _twice("engines", "url", [f"{one.address.host}:{one.address.port}" for one in places])


def _class_checks(settings: GatewaySettings) -> Iterator[Check]:
    yield from _twice("slo", "name", [one.name for one in settings.slo])
    for i, slo in enumerate(settings.slo):
        yield slo.shed and not settings.predicts, f"slo[{i}].shed", "needs `policy: auto` or `ttft` too"
        yield slo.shed and not slo.ttft_ms, f"slo[{i}].shed", f"needs `slo[{i}].ttft_ms` too"
    classes = {one.name for one in settings.slo}
    known = ", ".join(sorted(classes)) or "none"
    for i, tenant in enumerate(settings.tenants):
        says = f"unknown class of service {tenant.slo!r}; `slo` has {known}"
        yield bool(tenant.slo) and tenant.slo not in classes, f"tenants[{i}].slo", says


def _picker_checks(settings: GatewaySettings) -> Iterator[Check]:
    picker = settings.picker
    if not picker.listen:
        yield picker.only, "picker.only", "no port would accept requests; set picker.listen"
        return
    for module, package in PICKER_NEEDS.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"the picker needs {package}: {install('gateway,picker')}", field="picker.listen"
            )
    missing = "tls_key_file" if picker.tls_cert_file else "tls_cert_file"
    belong = "a certificate needs its key, and the other way round; name both"
    yield bool(picker.tls_cert_file) != bool(picker.tls_key_file), f"picker.{missing}", belong
    says = "needs TLS, since clients send certificates only over TLS; set tls_cert_file and tls_key_file"
    yield bool(picker.tls_ca_file) and not picker.tls_cert_file, "picker.tls_ca_file", says
    host, _ = host_and_port(picker.listen)
    yield (
        not (is_loopback(host) or picker.tls_ca_file or settings.insecure),
        "picker.listen",
        f"{host!r} is not loopback, and any Envoy could connect: name tls_ca_file, or use --insecure to answer "
        "anyone who can reach this port",
    )
    for i, engine in enumerate(settings.engines):
        yield (
            not engine.url.startswith(DNS) and not endpoint_of(place_of(engine, "").address),
            f"engines[{i}].url",
            f"{engine.url!r:.200} names a host, but Envoy needs an address: write the address, or dns+{engine.url} for "
            "all addresses of the name",
        )


def _cluster_checks(settings: GatewaySettings) -> Iterator[Check]:
    sharing, wanted = settings.sharing, settings.controllers
    says = "sharing.gateways needs a port for the other gateways' events too; give HOST:PORT"
    yield bool(sharing.gateways) and not sharing.listen, "sharing.listen", says
    if sharing.listen:
        yield (
            settings.policy not in SHARE,
            "sharing.listen",
            f"the policy {settings.policy!r} does not use other gateways' events; use one of "
            f"{', '.join(sorted(SHARE))}, or leave sharing.listen out",
        )
        host, _ = host_and_port(sharing.listen)
        says = f"{host!r} is not loopback: give sharing.curve_file, the same for all gateways"
        yield not (sharing.curve_file or is_loopback(host)), "sharing.listen", says
    yield from _twice("controllers", "urls", list(wanted.urls))
    says = "excludes controllers.curve_file; remove one of them"
    yield bool(wanted.curve_file) and wanted.insecure, "controllers.insecure", says
    for i, url in enumerate(wanted.urls):
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        says = f"{url!r}: {port} is not a port number; give a controller's reply port, such as 8400"
        yield not 0 < int(port) <= MAX_PORT, f"controllers.urls[{i}]", says
        yield (
            not (wanted.curve_file or wanted.insecure or is_loopback(host.strip("[]"))),
            f"controllers.urls[{i}]",
            f"{url!r} is not loopback: give controllers.curve_file, this gateway's keys, written by `kvstrata cluster "
            "add`",
        )


def _twice(field: str, what: str, words: list[str]) -> Iterator[Check]:
    for i, word in enumerate(words):
        yield word in words[:i], f"{field}[{i}].{what}", f"{word!r:.200} is named twice; leave one out"


def _tokenizers(settings: GatewaySettings, made: Mapping[str, OwnTokenizer]) -> dict[str, OwnTokenizer]:
    """The tokenizers by model; those in `made` with the same path are used again. Raises ConfigError."""
    found = {}
    for i, one in enumerate(settings.tokens.tokenizers):
        kept = made.get(one.model)
        if kept is None or kept.folder != one.path:
            kept = OwnTokenizer(one.model, one.path, f"tokens.tokenizers[{i}].path")
        found[one.model] = kept
    return found


def _wrong(field: str, says: str) -> ConfigError:
    return ConfigError(f"{field}: {says}", field=field)


def _key(path: str, field: str) -> str:
    return read_bearer_token(path, field) if path else ""
