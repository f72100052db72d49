"""`make soak` and `make chaos` pass on a sound server, and fail with the reason on the faults that they look for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.ordeal import Journal
from tests.tools.provision import ROOT
from tests.tools.soak import ANONYMOUS_BYTES, SLACK, SLACK_BYTES, Sample, judge

MINUTES = 0.25


def ordeal(name: str, out: Path) -> tuple[int, dict[str, Any], str]:
    """(Exit status, verdict, output) of a short run."""
    command = [sys.executable, "-m", f"tests.tools.{name}", "--minutes", str(MINUTES), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (out / "verdict.json").exists(), done.stderr
    return done.returncode, json.loads((out / "verdict.json").read_text()), done.stdout + done.stderr


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize("name", ["soak", "chaos"])
def test_a_short_soak_or_chaos_run_passes_and_has_verified_bytes(name: str, tmp_path: Path) -> None:
    status, verdict, output = ordeal(name, tmp_path)
    assert status == 0 and verdict["passed"], output
    assert verdict["counts"]["chunks verified"] > 0
    assert f"{name}: passed (seed {verdict['seed']})" in output


def test_each_kind_of_growth_fails_a_soak_and_noise_does_not() -> None:
    begin = Sample(10.0, 100, 50 << 20, 40, 9, 10_000, 30, 1)
    sessions = begin.sessions + 1000
    calm = begin._replace(
        at_s=40.0,
        sessions=sessions,
        anonymous_bytes=begin.anonymous_bytes + SLACK_BYTES + 1000 * ANONYMOUS_BYTES,
        descriptors=begin.descriptors + SLACK,
    )
    warm_up = begin._replace(at_s=1.0, sessions=0, descriptors=3, anonymous_bytes=1)
    assert judge([warm_up, begin, calm]) == []
    for name, too_much in {
        "anonymous_bytes": calm.anonymous_bytes + 1,
        "descriptors": calm.descriptors + 1,
        "threads": begin.threads + SLACK + 1,
        "log_bytes": begin.log_bytes + 1_000_000,
        "own_descriptors": begin.own_descriptors + SLACK + 1,
        "own_threads": begin.own_threads + SLACK + 1,
    }.items():
        [failure] = judge([warm_up, begin, calm._replace(**{name: too_much})])
        assert failure.startswith(f"{name} grew by")


def test_a_failure_ends_the_run_and_is_in_the_verdict(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 7, 60.0)
    assert not journal.over
    journal.fail("chunk 3 is wrong")
    assert journal.over
    journal.close()
    verdict = journal.verdict()
    assert not verdict["passed"] and verdict["failures"] == ["chunk 3 is wrong"] and verdict["seed"] == 7
    assert json.loads((tmp_path / "journal.jsonl").read_text())["message"] == "chunk 3 is wrong"
