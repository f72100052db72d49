"""`kvstrata doctor` on machines with and without GPUs: each bad state has a line and a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device_blocks import needs_kernels
from tests.harness.cuda_driver import environment

pytestmark = pytest.mark.integration

DOCTOR = [sys.executable, "-c", "from kvstrata.cli import main; raise SystemExit(main())", "doctor"]


def doctor(*arguments: str, **options: object) -> str:
    """What it prints on a machine with the simulated driver."""
    done = subprocess.run(
        [*DOCTOR, *arguments], env=environment(**options), capture_output=True, text=True, timeout=300
    )
    assert not done.stderr, done.stderr
    return done.stdout


def lines(**options: object) -> dict[str, dict[str, Any]]:
    return {line["check"]: line for line in json.loads(doctor("--json", **options))}


@needs_kernels
def test_a_healthy_gpu_has_lines_for_driver_kernels_and_devices() -> None:
    found = {name: line for name, line in lines(devices=2).items() if name.startswith("GPU")}
    assert list(found) == ["GPU driver", "GPU kernels", "GPU 0", "GPU 1"]
    assert {line["state"] for line in found.values()} == {"ok"}
    assert found["GPU driver"]["found"] == "CUDA 13.0, 2 devices, batched copies"
    assert "Simulated GPU 1" in found["GPU 1"]["found"]


@pytest.mark.parametrize(
    ("options", "check", "found", "advice"),
    [
        ({"version": 11080}, "GPU driver", "CUDA 11.8", "update it to CUDA 12.0"),
        ({"version": 12040}, "GPU driver", "no batched copies", "CUDA 12.8"),
        ({"fail": "cuDeviceGetName:1:719"}, "GPU 0", "cuDeviceGetName", "restart"),
    ],
)
def test_a_bad_state_has_a_line_that_says_what_to_do(options, check, found, advice):
    line = lines(**options)[check]
    assert line["state"] == "warn"
    assert found in line["found"] and advice in line["advice"], line


def test_a_machine_without_a_driver_is_told_that_it_has_none(tmp_path: Path) -> None:
    # A library that is no library stands before a real driver, if this machine has one.
    (tmp_path / "libcuda.so.1").write_text("")
    paths = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([*DOCTOR, "--json"], env=paths, capture_output=True, text=True, timeout=300)
    [line] = [line for line in json.loads(done.stdout) if line["check"].startswith("GPU")]
    assert line["found"].startswith("no NVIDIA driver: ") and "install the driver" in line["advice"]
