"""`make gpu` and `make gpu-pack`: tried on the simulated driver, up to the figures, which only a real GPU can give."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness.cuda_driver import environment
from tests.tools import gpu_run
from tests.tools.gpu_pack import pieces

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture
def on_simulated_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the results. Nothing is compiled: other tests use the modules meanwhile."""
    monkeypatch.setenv("LD_LIBRARY_PATH", environment()["LD_LIBRARY_PATH"])
    monkeypatch.setattr(gpu_run, "prepare", lambda end_s: [])
    monkeypatch.setattr(gpu_run, "PYTEST_ARGUMENTS", ["-k", "reported_to_every_server"])
    return tmp_path


def test_the_tests_of_stage_one_reach_the_driver_and_the_figures_of_stage_two_refuse_it(
    on_simulated_driver: Path,
) -> None:
    out = on_simulated_driver
    failed = gpu_run.run_stage(1, out)
    assert not failed, (out / "gpu.md").read_text()
    found = json.loads((out / "gpu-1.json").read_text())
    assert found["notes"] == ["1 tests marked `gpu` passed"]

    assert gpu_run.run_stage(2, out)
    found = json.loads((out / "gpu-2.json").read_text())
    [failure] = found["failures"]
    assert failure["what"] == "the benchmark gpu_pool" and "whose speed says nothing" in failure["message"]
    assert found["figures"] == {} and any("GPU driver" in note for note in found["notes"])
    # One page for both stages, failures before everything else.
    page = (out / "gpu.md").read_text()
    assert page.index("gpu_pool") < page.index("## Figures") and "Stage 1" in page and "Stage 2" in page


def test_a_stage_that_runs_out_of_time_says_so_and_leaves_no_process() -> None:
    done = gpu_run.run(
        [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"], 0.0
    )
    assert done.timed_out and "not ended when" in done.failure


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
