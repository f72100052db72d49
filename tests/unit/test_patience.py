"""One factor multiplies the limits of patience, and only in an environment for tests."""

from __future__ import annotations

import msgspec
import pytest

from kvstrata import patience
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError
from kvstrata.failpoints import TESTING_VARIABLE

TWENTY = {patience.VARIABLE: "20", TESTING_VARIABLE: "1"}


@pytest.mark.parametrize("text", ["many", "0.5", "-1", "nan", "inf", "1e9"])
def test_a_wrong_factor_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"KVSTRATA_PATIENCE: must be a number from 1 to 1000, found"):
        load(ServerSettings, environment=TWENTY | {patience.VARIABLE: text})


@pytest.mark.parametrize("testing", [{}, {TESTING_VARIABLE: "0"}])
@pytest.mark.parametrize("struct", [ServerSettings, ControllerSettings, GatewaySettings, ClientSettings])
def test_a_factor_is_refused_outside_tests(struct: type[msgspec.Struct], testing: dict[str, str]) -> None:
    environment = {patience.VARIABLE: "20", **testing}
    with pytest.raises(ConfigError, match="remove it, or set KVSTRATA_TESTING=1 too"):
        load(struct, environment=environment)
    assert patience.factor(environment) == 1


def test_a_limit_is_what_it_says_unless_a_test_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patience.VARIABLE, "2.5")
    assert patience.patience(4) == 10
    monkeypatch.delenv(TESTING_VARIABLE)
    assert patience.patience(4) == 4


def test_the_factor_raises_limits_that_nobody_has_set_up_to_their_bound() -> None:
    settings = load(ServerSettings, environment=TWENTY, flags={"l2": {"drain_s": 1.0}})
    assert settings.p2p.lookup_timeout_ms == 5_000
    assert settings.l2.deadline_ms == 60_000, "its bound"
    assert settings.l2.drain_s == 1.0, "as it was set"
    assert load_settings({}, TWENTY)[0].lookup_timeout_ms == 60_000
    assert load_settings({"lookup_timeout_ms": 7}, TWENTY)[0].lookup_timeout_ms == 7
