"""The tools that prepare environments and contain runs; contain.py is tested with real processes."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import server_process
from tests.tools import contain

CONTAIN = Path(contain.__file__)


def run_contained(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CONTAIN, *command], capture_output=True, text=True, timeout=120, check=False
    )


def test_containment_passes_the_exit_status_on() -> None:
    assert run_contained("sh", "-c", "exit 3").returncode == 3
    assert run_contained("true").returncode == 0
    assert run_contained("sh", "-c", "kill -9 $$").returncode == 128 + 9


def test_a_process_left_behind_in_a_session_of_its_own_is_killed_and_fails_the_run() -> None:
    done = run_contained("sh", "-c", "setsid sh -c 'echo $$; exec >&- 2>&-; exec sleep 1000' & sleep 0.2")
    assert done.returncode == 1
    left = int(done.stdout)
    assert f"left behind and killed: {left}: sleep 1000" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_a_process_that_lost_its_parent_and_ended_is_no_zombie_while_the_run_goes_on() -> None:
    orphan = "number=$(sh -c 'setsid sleep 0.2 >/dev/null & echo $!')"
    until_gone = "for _ in $(seq 600); do kill -0 $number || exit 0; sleep 0.1; done; exit 1"
    assert run_contained("sh", "-c", f"{orphan}; {until_gone}").returncode == 0


def test_simultaneous_sweeps_remove_files_of_dead_runs_and_none_of_a_living_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "ROOTS", (tmp_path,))
    no_process = 2**22 + 1  # above the highest number that Linux gives
    living = tmp_path / f"{server_process.NAME}{os.getpid()}-00"
    living.mkdir()
    for at in range(300):
        (tmp_path / f"{server_process.NAME}{no_process}-{at:x}").mkdir()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for sweep in [pool.submit(server_process.sweep) for _ in range(4)]:
            sweep.result()
    assert list(tmp_path.iterdir()) == [living]
