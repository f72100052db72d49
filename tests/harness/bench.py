"""One benchmark at its smallest size, as `python -m benchmarks.run NAME --small` runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.harness.provision import ROOT
from tests.harness.vllm_fork import ForkServer

OF_GPUS = {"gpu_copies", "gpu_engine", "gpu_pool"}
"""They need a GPU; their parts are tested on a simulated driver (tests/gpu/test_benchmarks.py)."""
PATIENCE_S = 600.0


def small(name: str, fork_server: ForkServer | None = None) -> list[str]:
    """Names of its figures. Skips the test where this machine lacks what it needs; fails it where the run fails.

    `fork_server` forks the engines that it starts.
    """
    command = [sys.executable, "-m", "benchmarks.run", name, "--small"]
    descriptor, lent = (None, {}) if fork_server is None else fork_server.lend()
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **lent},
        pass_fds=() if descriptor is None else (descriptor,),
    )
    missing = re.search(r"not run: (.*)", done.stdout)
    if missing:
        pytest.skip(missing[1])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return re.findall(r"^   (\w+): \S+ .*: small$", done.stdout, re.MULTILINE)
