"""One factor multiplies the limits of patience, and only in an environment for tests."""

from __future__ import annotations

import pytest

from kvstrata import patience
from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings
from kvstrata.connectors.settings import load_settings
from kvstrata.failpoints import TESTING_VARIABLE

TWENTY = {patience.VARIABLE: "20", TESTING_VARIABLE: "1"}


@pytest.mark.parametrize("testing", [{}, {TESTING_VARIABLE: "0"}])
def test_a_factor_has_no_effect_outside_tests(testing: dict[str, str]) -> None:
    assert patience.factor({patience.VARIABLE: "20", **testing}) == 1


def test_a_limit_is_what_it_says_unless_a_test_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patience.VARIABLE, "2.5")
    assert patience.patience(4) == 10
    monkeypatch.delenv(TESTING_VARIABLE)
    assert patience.patience(4) == 4


def test_the_factor_raises_limits_that_nobody_has_set_up_to_their_bound() -> None:
    settings = load(ServerSettings, environment=TWENTY, flags={"l2": {"drain_s": 1.0}})
    assert settings.p2p.lookup_timeout_ms == 5_000
    assert settings.l2.drain_s == 1.0, "as it was set"
    assert load_settings({}, TWENTY)[0].lookup_timeout_ms == 60_000
    assert load_settings({"lookup_timeout_ms": 7}, TWENTY)[0].lookup_timeout_ms == 7
