"""The staging path (blocks of device memory) writes and reads the same records as the direct path."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.harness import vllm_env

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).resolve().parents[1] / "harness" / "staging_run.py"


def test_both_paths_understand_each_other_in_every_layout(server, vllm_python, tmp_path):
    done = subprocess.run(
        [str(vllm_python), str(SCRIPT), str(server.socket_dir)],
        env=vllm_env.environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 7
    for result in results:
        assert result == {
            "layout": result["layout"],
            "direct to staged": True,
            "staged to direct": True,
            "staged to staged": True,
        }
