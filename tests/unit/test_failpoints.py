"""The table of failpoints is complete and safe: each protocol step has its row, unarmed points do nothing."""

from __future__ import annotations

import re
import subprocess
import sys
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


def test_an_armed_point_kills_at_the_named_time_and_others_do_nothing():
    script = (
        "from kvstrata import failpoints\n"
        "failpoints.arm({failpoints.VARIABLE: 'lookup.done=kill@2', failpoints.TESTING_VARIABLE: '1'})\n"
        "for word in ('received', 'done', 'replied', 'done', 'replied'):\n"
        "    failpoints.hit('lookup', word); print(word, flush=True)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == -9
    assert ran.stdout.split() == ["received", "done", "replied"]


def test_a_point_raises_once():
    failpoints.arm({failpoints.VARIABLE: "lookup.done=crash@2", failpoints.TESTING_VARIABLE: "1"})
    failpoints.hit("lookup", "done")
    with pytest.raises(RuntimeError, match=r"failpoint lookup\.done"):
        failpoints.hit("lookup", "done")
    failpoints.hit("lookup", "done")
    failpoints.arm({})


@pytest.mark.parametrize("testing", [{}, {failpoints.TESTING_VARIABLE: "0"}])
def test_points_are_armed_only_in_an_environment_for_tests(testing: dict[str, str]):
    with pytest.raises(ConfigError, match="remove it, or set KVSTRATA_TESTING=1 too"):
        failpoints.arm({failpoints.VARIABLE: "lookup.done=kill", **testing})
