"""`kvstrata doctor` on machines with and without GPUs: each bad state has a line and a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli.doctor_gpu import Link, check_gpus, read_link
from tests.gpu.device_blocks import needs_kernels
from tests.harness.cuda_driver import environment, simulated

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


@pytest.mark.long
@needs_kernels
def test_a_healthy_gpu_has_a_line_for_driver_kernels_device_pinning_copies_and_link() -> None:
    found = {name: line for name, line in lines(devices=2).items() if name.startswith("GPU")}
    parts = ["", " pinned memory", " copies", " link"]
    assert list(found) == ["GPU driver", "GPU kernels", *(f"GPU {n}{part}" for n in (0, 1) for part in parts)]
    states = {name: line["state"] for name, line in found.items() if not name.endswith("link")}
    assert set(states.values()) == {"ok"}
    assert found["GPU driver"]["found"] == "CUDA 13.0, 2 devices, batched copies"
    assert "Simulated GPU 1" in found["GPU 1"]["found"]
    assert "64 MB in " in found["GPU 0 pinned memory"]["found"]
    for way in ("dma", "kernel", "staged"):
        assert f"{way} " in found["GPU 0 copies"]["found"]
    assert "measured: " in found["GPU 0 copies"]["found"]


def test_the_report_for_people_says_the_same() -> None:
    text = doctor(devices=0)
    [line] = [line for line in text.splitlines() if line.startswith(("ok", "warn", "fail")) and "GPU" in line]
    assert line.startswith("warn  GPU driver") and line.endswith("finds no GPU")
    to_do = text.partition("\nWhat to do:\n")[2]
    assert ". GPU driver: nvidia-smi" in to_do


@pytest.mark.parametrize(
    ("options", "check", "found", "advice"),
    [
        ({"version": 11080}, "GPU driver", "CUDA 11.8", "update it to CUDA 12.0"),
        ({"fail": "copy:1:719"}, "GPU 0 copies", "CUDA_ERROR_LAUNCH_FAILED", "restart"),
        *(
            pytest.param(*rare, marks=pytest.mark.long)
            for rare in (
                ({"devices": 0}, "GPU driver", "finds no GPU", "CUDA_VISIBLE_DEVICES"),
                ({"version": 12040}, "GPU driver", "no batched copies", "CUDA 12.8"),
                ({"fail": "cuInit:1:999"}, "GPU driver", "cuInit", "restart"),
                ({"fail": "cuDeviceGetName:1:719"}, "GPU 0", "cuDeviceGetName", "restart"),
                ({"register": 1 << 20}, "GPU 0 pinned memory", "cuMemHostRegister", "ulimit -l"),
                ({"fail": "cuMemHostRegister:1:800"}, "GPU 0 pinned memory", "NOT_PERMITTED", "unpinned"),
                ({"memory": 1 << 20}, "GPU 0 copies", "CUDA_ERROR_OUT_OF_MEMORY", "memory is used up"),
            )
        ),
    ],
)
def test_a_bad_state_has_a_line_that_says_what_to_do(
    options: dict[str, object], check: str, found: str, advice: str
) -> None:
    line = lines(**options)[check]
    assert line["state"] == "warn"
    assert found in line["found"] and advice in line["advice"], line


@pytest.mark.long
@needs_kernels
def test_kernels_that_the_driver_cannot_load_are_named_where_copies_are_chosen() -> None:
    line = lines(fail="cuModuleLoadData:1+:209")["GPU 0 copies"]
    assert line["state"] == "warn" and line["found"].startswith("dma, of dma ")
    assert "not kernel: cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU" in line["found"]
    assert "update the driver" in line["found"]


@simulated()
def test_kernels_that_were_not_built_are_told_with_what_builds_them() -> None:
    from kvstrata.native import cuda

    cuda.FATBIN = Path("nothing here")  # type: ignore[attr-defined]
    found = {line.check: line for line in check_gpus()}
    assert found["GPU kernels"].state == "warn" and "`make cuda`" in found["GPU kernels"].advice
    assert found["GPU 0 copies"].found.startswith("dma, of dma ")


def test_a_machine_without_a_driver_is_told_that_it_has_none(tmp_path: Path) -> None:
    # A library that is no library stands before a real driver, if this machine has one.
    (tmp_path / "libcuda.so.1").write_text("")
    paths = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([*DOCTOR, "--json"], env=paths, capture_output=True, text=True, timeout=300)
    [line] = [line for line in json.loads(done.stdout) if line["check"].startswith("GPU")]
    assert line["found"].startswith("no NVIDIA driver: ") and "install the driver" in line["advice"]


def link(folder: Path, **files: str) -> Link | None:
    device = folder / "0000:1b:00.0"
    device.mkdir(exist_ok=True)
    for name, text in files.items():
        (device / name).write_text(text + "\n")
    return read_link("0000:1B:00.0", folder)


def test_the_link_is_what_the_kernel_says_of_speed_and_width(tmp_path: Path) -> None:
    assert read_link("0000:1B:00.0", tmp_path) is None
    speeds = {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    whole = link(tmp_path, **speeds, current_link_width="16", max_link_width="16")
    assert whole == Link(32.0, 16, 32.0, 16) and not whole.reduced
    assert round(whole.gb_per_s) == 63
    half = link(tmp_path, current_link_width="8")
    assert half is not None and half.reduced and round(half.gb_per_s) == 32
    slow = link(tmp_path, current_link_width="16", current_link_speed="5.0 GT/s PCIe")
    assert slow is not None and slow.reduced and round(slow.gb_per_s) == 8
    assert link(tmp_path, current_link_speed="Unknown") is None
