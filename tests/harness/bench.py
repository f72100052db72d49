"""One benchmark at its smallest size, as `python -m benchmarks.run NAME --small` runs it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.harness.provision import ROOT

OF_GPUS = {"gpu_copies", "gpu_engine", "gpu_pool"}
"""They need a GPU; their parts are tested on a simulated driver (tests/gpu/test_benchmarks.py)."""
PATIENCE_S = 600.0


def small(name: str) -> list[str]:
    """Names of its figures. Skips the test where this machine lacks what it needs; fails it where the run fails."""
    command = [sys.executable, "-m", "benchmarks.run", name, "--small"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )
    missing = re.search(r"not run: (.*)", done.stdout)
    if missing:
        pytest.skip(missing[1])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return re.findall(r"^   (\w+): \S+ .*: small$", done.stdout, re.MULTILINE)
