"""Variables of pod links (config/load.py) against Kubernetes' rule (pkg/kubelet/envvars), and against our settings."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.load import is_pod_link, load, variables
from kvstrata.config.model import ServerSettings
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError

STRUCTS = (ServerSettings, ControllerSettings, ClientSettings)


class Port(NamedTuple):
    name: str
    number: int
    protocol: str


def links(service: str, address: str, ports: list[Port]) -> dict[str, str]:
    """The variables that Kubernetes sets for a service."""
    prefix = service.upper().replace("-", "_")
    found = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(ports[0].number)}
    for port in ports:
        if port.name:
            found[f"{prefix}_SERVICE_PORT_{port.name.upper().replace('-', '_')}"] = str(port.number)
    host = f"[{address}]" if ":" in address else address
    for index, port in enumerate(ports):
        url = f"{port.protocol.lower()}://{host}:{port.number}"
        if index == 0:
            found[f"{prefix}_PORT"] = url
        numbered = f"{prefix}_PORT_{port.number}_{port.protocol}"
        found[numbered] = url
        found[f"{numbered}_PROTO"] = port.protocol.lower()
        found[f"{numbered}_PORT"] = str(port.number)
        found[f"{numbered}_ADDR"] = address
    return found


labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
settings_as_labels = st.sampled_from(
    sorted(
        {
            name.removesuffix("_PORT").lower().replace("_", "-")
            for struct in STRUCTS
            for name in variables(struct)
        }
    )
)
services = st.one_of(
    st.sampled_from(["kvstrata", "lmcache", "kvstrata-server", "kvstrata-controller", "lmcache-server"]),
    st.builds("{}-{}".format, st.sampled_from(["kvstrata", "lmcache"]), labels),
    settings_as_labels,
)
ports = st.lists(
    st.builds(
        Port, st.one_of(st.just(""), labels), st.integers(1, 65_535), st.sampled_from(["TCP", "UDP", "SCTP"])
    ),
    min_size=1,
    max_size=4,
)
addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(services, addresses, ports)
@example("kvstrata", "10.0.0.1", [Port("http", 8080, "TCP")])
@example("kvstrata-http", "10.0.0.1", [Port("", 80, "TCP")])
@example("kvstrata-controller-http", "fd00::1", [Port("", 9000, "TCP")])
def test_no_service_changes_a_setting_or_stops_a_start(service: str, address: str, made: list[Port]) -> None:
    environment = links(service, address, made)
    assert all(is_pod_link(name, value) for name, value in environment.items())
    for struct in STRUCTS:
        assert load(struct, environment=environment) == struct()
    assert load_settings({}, environment) == (ClientSettings(), [])


PLAIN = st.one_of(
    st.integers(-10, 10**9).map(str),
    st.booleans().map(str),
    st.sampled_from(["localhost", "10.0.0.1", "/a/b", "tcp", "off", "LRU", "tcp://h:1,tcp://i:2", "[]", ""]),
    st.text(max_size=20),
)


@pytest.mark.parametrize("struct", STRUCTS)
@given(value=PLAIN)
def test_no_setting_is_taken_for_a_link_unless_its_value_is_an_address(struct: type, value: str) -> None:
    for name, (key, _) in variables(struct).items():
        taken = is_pod_link(name, value)
        assert not taken or (key.endswith("port") and "://" in value), (name, value)


def test_a_port_in_the_environment_stays_a_setting() -> None:
    environment = {**links("kvstrata", "10.0.0.1", [Port("", 80, "TCP")]), "KVSTRATA_PORT": "1234"}
    assert load(ServerSettings, environment=environment).port == 1234
    theirs = {**links("lmcache", "10.0.0.1", [Port("", 80, "TCP")]), "LMCACHE_PORT": "1234"}
    assert load_settings({}, theirs)[0].port == 1234
    url = {"KVSTRATA_CONTROLLER_URL": "tcp://10.0.0.1:8400"}
    assert load(ServerSettings, environment=url).controller.url == "tcp://10.0.0.1:8400"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVSTRATA_SERVICE_HOST", "not an address"),
        ("KVSTRATA_SERVICE_PRT", "80"),
        ("KVSTRATA_HTTP_PROT", "tcp://10.0.0.1:80"),
        ("KVSTRATA_PORT", "http://10.0.0.1:80"),
    ],
)
def test_a_misspelt_setting_is_still_an_error(name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        load(ServerSettings, environment={name: value})
