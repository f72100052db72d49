"""`make gpu` and `make gpu-pack`: tried on the simulated driver, up to the figures, which only a real GPU can give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness.cuda_driver import environment
from tests.tools import gpu_run
from tests.tools.gpu_pack import pieces

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_the_tests_of_stage_one_reach_the_driver_and_the_figures_of_stage_two_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", environment()["LD_LIBRARY_PATH"])
    # Nothing is compiled: other tests use the modules meanwhile.
    monkeypatch.setattr(gpu_run, "prepare", lambda end_s: "")
    failed = gpu_run.run_stage(1, tmp_path, more=["-k", "staging_buffer_is_too_small"])
    told = (tmp_path / "gpu-1.txt").read_text()
    assert not failed and "1 passed" in told, told
    assert gpu_run.run_stage(2, tmp_path)
    assert "whose speed says nothing" in (tmp_path / "gpu-2.txt").read_text()


def test_a_stage_that_runs_out_of_time_says_so_and_leaves_no_process() -> None:
    done = gpu_run.run(
        [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"], 0.0
    )
    assert "not ended when" in done.failure


def test_pieces_hold_every_wheel_once_and_none_is_too_large(tmp_path: Path) -> None:
    wheels = []
    for number, size in enumerate((30, 50, 20, 64, 1, 40)):
        wheels.append(tmp_path / f"{number}.whl")
        wheels[-1].write_bytes(bytes(size))
    made = pieces(wheels, 64)
    assert sorted(path for piece in made for path in piece) == sorted(wheels)
    assert all(sum(path.stat().st_size for path in piece) <= 64 for piece in made)
    with pytest.raises(ValueError, match=r"3\.whl"):
        pieces(wheels, 63)
