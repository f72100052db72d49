"""What only an environment for tests changes: each protocol step has its failpoint, one factor multiplies patience."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstrata import failpoints, patience
from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings
from kvstrata.connectors.settings import load_settings
from kvstrata.errors import ConfigError
from kvstrata.failpoints import TESTING_VARIABLE

SOURCE = Path(failpoints.__file__).parent


def test_every_point_in_the_table_is_reached_by_the_code():
    code = "\n".join(file.read_text() for file in SOURCE.rglob("*.py") if file.name != "failpoints.py")
    named = set(re.findall(r"failpoints\.hit\(\s*\"([a-z]+\.[a-z]+)\"", code))
    phases = set(re.findall(r"failpoints\.hit\(\s*[a-z_.]+,\s*\"([a-z]+)\"", code))
    assert named == {name for name in failpoints.POINTS if name.split(".")[0] not in failpoints.OPERATIONS}
    assert phases == {"received", "done", "replied"}


@pytest.mark.parametrize("text", ["nope.done=kill", "lookup.done=hang", "lookup.done", "lookup.done=kill@x"])
def test_a_wrong_variable_stops_the_start(text):
    with pytest.raises(ConfigError, match="KVSTRATA_FAILPOINTS"):
        failpoints.arm({failpoints.VARIABLE: text, failpoints.TESTING_VARIABLE: "1"})


@pytest.mark.parametrize("testing", [{}, {failpoints.TESTING_VARIABLE: "0"}])
def test_points_are_armed_only_in_an_environment_for_tests(testing: dict[str, str]):
    with pytest.raises(ConfigError, match="remove it, or set KVSTRATA_TESTING=1 too"):
        failpoints.arm({failpoints.VARIABLE: "lookup.done=kill", **testing})


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
