"""The staging path (blocks of device memory): the same records as the direct path, and an end for every job."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.harness import vllm_env

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).resolve().parents[1] / "harness" / "staging_run.py"


@pytest.fixture
def staging_run(server, vllm_python, tmp_path):
    """Runs the script; the JSON lines that it printed."""

    def run(what):
        done = subprocess.run(
            [str(vllm_python), str(SCRIPT), str(server.socket_dir), what],
            env=vllm_env.environment(tmp_path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_both_paths_understand_each_other_in_every_layout(staging_run):
    results = staging_run("layouts")
    assert len(results) == 7
    for result in results:
        assert result == {
            "layout": result["layout"],
            "direct to staged": True,
            "staged to direct": True,
            "staged to staged": True,
        }


def test_jobs_that_fail_or_are_cancelled_end_and_the_next_ones_go_on(staging_run):
    [found] = staging_run("faults")
    assert found == {
        "store that the device fails": ["failed"],
        "store after it": ["stored"],
        "load that memory fails": [0, 1, 2, 3, 4],
        "load that the device fails": [0, 1, 2, 3, 4],
        "load after them": [[], True],
        "store that was cancelled while it was read": ["cancelled"],
        "chunks of it that can be hit": 0,
        "slots lost": 0,
        "leases kept": 0,
    }
