"""`kvstrata bench l2` with real adapters: it verifies the bytes that it measures with, and leaves no record behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import own_commands
from tests.harness.cache_engine import eventually

pytestmark = pytest.mark.integration

SMALL = ("--chunk-mb", "0.25,1", "--count", "5", "--batch", "2", "--rounds", "2")


def entry(folder: Path, **more: Any) -> str:
    return json.dumps({"type": "fs", "base_path": str(folder), "min_free_gb": 0, **more})


def command(adapter: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstrata", "bench", "l2", "--l2-adapter", adapter, *arguments]


def bench(adapter: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return own_commands.run("kvstrata", "bench", "l2", "--l2-adapter", adapter, *arguments)


def measured(adapter: str, *arguments: str) -> dict[str, Any]:
    done = bench(adapter, *SMALL, "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def files(folder: Path) -> list[Path]:
    """Files of records below a folder."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".kvstrata.lock"]


def test_the_disk_adapter_is_measured_like_any_other(tmp_path):
    report = measured(entry(tmp_path, type="disk", capacity_gb=0.5))
    assert report["verified_bytes"] == 2 * 5 * sum(size["record_bytes"] for size in report["sizes"])
    again = measured(entry(tmp_path, type="disk", capacity_gb=0.5))
    assert again["notes"] == [], "all records of the first run were deleted, or the second were refused"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="here"),
        pytest.param({"isolation": "process"}, id="in a host"),
        pytest.param({"codec": ["zstd"]}, id="compressed"),
        pytest.param({"use_odirect": False, "num_workers": 1}, id="buffered", marks=pytest.mark.long),
    ],
)
def test_every_size_is_measured_verified_and_deleted(tmp_path, more):
    report = measured(entry(tmp_path, **more))
    assert [size["chunk_mb"] for size in report["sizes"]] == [0.25, 1]
    for size in report["sizes"]:
        assert size["verified_bytes"] == 2 * 5 * size["record_bytes"]
        for name in ("put", "load"):
            found = size[name]["gb_per_s"]
            assert 0 < found["least"] <= found["median"] <= found["greatest"]
            assert size[name]["ms"]["calls"] == 2 * 3
        ms = size["exists"]["ms"]
        assert 0 < ms["p50"] <= ms["p95"] <= ms["p99"] <= ms["greatest"]
    assert files(tmp_path) == []


def test_a_capacity_without_room_for_a_pass_is_refused(tmp_path):
    done = bench(entry(tmp_path, capacity_gb=0.003), *SMALL)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--count: 5 MiB do not fit in the 3 MiB" in done.stderr
    assert files(tmp_path) == []


def test_a_directory_of_a_running_server_is_refused(tmp_path):
    with subprocess.Popen(
        command(entry(tmp_path), "--rounds", "1000", "--chunk-mb", "1"), stderr=subprocess.DEVNULL
    ) as other:
        try:
            eventually("records are stored", lambda: files(tmp_path))
            done = bench(entry(tmp_path), *SMALL)
            assert (done.returncode, done.stdout) == (1, "")
            assert str(tmp_path) in done.stderr and "Traceback" not in done.stderr
        finally:
            other.terminate()
    assert files(tmp_path) == []


def group_is_gone(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("number", "isolation"),
    [
        (signal.SIGINT, "process"),
        pytest.param(signal.SIGINT, "in_process", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "process", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_leaves_nothing(tmp_path, number, isolation):
    # A shell without job control starts background processes with SIGINT ignored; children of the tests inherit that.
    running = subprocess.Popen(
        [
            *("env", "--default-signal=INT"),
            *command(entry(tmp_path, isolation=isolation), "--rounds", "1000", "--chunk-mb", "1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    eventually("records are stored", lambda: files(tmp_path))
    os.killpg(running.pid, number)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", "kvstrata bench l2: interrupted\n")
    assert files(tmp_path) == []
    eventually("every process of it has ended", lambda: group_is_gone(running.pid))
