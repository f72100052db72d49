"""Runs one benchmark at its smallest size, as `python -m benchmarks.run NAME --small` does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.harness.forks import Forks
from tests.tools.provision import ROOT

PATIENCE_S = 600.0


def small(name: str, fork_server: Forks | None = None) -> list[str]:
    """Run a benchmark and return the names of its figures.

    The test is skipped if this machine lacks something that the benchmark needs, and fails if the run fails.
    `fork_server` forks the engines that the benchmark starts.
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
