"""The table of failpoints is complete and safe: each protocol step has its row, unarmed points do nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstrata import failpoints
from kvstrata.errors import ConfigError

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
