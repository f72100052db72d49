"""`kvstrata bench l2` with real adapters: it verifies the bytes that it measures with, and leaves no record behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios
import xml.etree.ElementTree as ElementTree
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
    """Files of records and of raw I/O below a folder."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".kvstrata.lock"]


def test_the_disk_adapter_is_measured_like_any_other(tmp_path):
    report = measured(entry(tmp_path, type="disk", capacity_gb=0.5))
    assert report["verified_bytes"] == 2 * 5 * sum(size["record_bytes"] for size in report["sizes"])
    assert all(size[name]["ratio"] for size in report["sizes"] for name in ("put", "load"))
    again = measured(entry(tmp_path, type="disk", capacity_gb=0.5))
    assert again["notes"] == [], "all records of the first run were deleted, or the second were refused"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="here"),
        pytest.param({"isolation": "process", "codec": ["zstd"]}, id="in a host"),
        pytest.param({"use_odirect": False, "num_workers": 1}, id="buffered", marks=pytest.mark.long),
    ],
)
def test_every_size_is_measured_verified_and_deleted(tmp_path, more):
    report = measured(entry(tmp_path, **more))
    assert [size["chunk_mb"] for size in report["sizes"]] == [0.25, 1]
    for size in report["sizes"]:
        assert size["verified_bytes"] == 2 * 5 * size["record_bytes"]
        for name in ("put", "load"):
            for word in ("gb_per_s", "raw_gb_per_s", "ratio"):
                found = size[name][word]
                assert 0 < found["least"] <= found["median"] <= found["greatest"]
            assert size[name]["ms"]["calls"] == 2 * 3
        ms = size["exists"]["ms"]
        assert 0 < ms["p50"] <= ms["p95"] <= ms["p99"] <= ms["greatest"]
    assert files(tmp_path) == []
    assert list(tmp_path.glob("kvstrata-bench-*")) == []


@pytest.mark.parametrize(
    "more",
    [{"type": "disk", "capacity_gb": 0.5}, pytest.param({"isolation": "process"}, marks=pytest.mark.long)],
    ids=["disk", "fs in a host"],
)
def test_a_burst_is_measured_beside_lookups_and_nothing_stays(tmp_path, more):
    report = measured_burst(entry(tmp_path, **more))
    assert report["notes"] == [] and "32 keys" in report["lookups"]
    (size,) = report["sizes"]
    for name in ("idle", "burst"):
        ms = size[name]["ms"]
        assert ms["calls"] and 0 < ms["p50"] <= ms["p95"] <= ms["p99"] <= ms["greatest"]
    assert size["burst"]["gb_per_s"]["median"] > 0
    assert not list(tmp_path.rglob("*.kvc"))
    again = measured_burst(entry(tmp_path, **more))
    assert again["notes"] == [], "all records of the first run were deleted, or the second were refused"


def measured_burst(adapter: str) -> dict[str, Any]:
    done = bench(adapter, "--burst", "3", "--count", "16", "--batch", "4", "--rounds", "1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_records_of_others_stay_and_with_keep_its_own_stay_too(tmp_path):
    report = measured(entry(tmp_path), "--keep")
    kept = set(files(tmp_path))
    assert len(kept) == 2 * 3 * 5
    assert report["notes"] == ["--keep: 30 records under random keys stay in fs-0"]
    contents = {path: path.read_bytes() for path in kept}
    measured(entry(tmp_path))
    assert {path: path.read_bytes() for path in files(tmp_path)} == contents


@pytest.mark.parametrize("kind", ["fs", pytest.param("disk", marks=pytest.mark.long)])
def test_a_capacity_that_may_evict_records_of_others_is_refused(tmp_path, kind):
    capped = entry(tmp_path, type=kind, capacity_gb=0.5)
    measured(capped, "--keep")
    for _ in range(2):
        done = bench(capped, *SMALL)
        assert (done.returncode, done.stdout) == (1, "")
        assert "--l2-adapter:" in done.stderr and "30 other records" in done.stderr


def test_a_capacity_without_room_for_a_pass_is_refused(tmp_path):
    done = bench(entry(tmp_path, capacity_gb=0.003), *SMALL)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--count: 5 MiB do not fit in the 3 MiB" in done.stderr
    assert files(tmp_path) == []


def test_the_table_and_both_files_show_the_same_figures(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    svg, out = tmp_path / "figures.svg", tmp_path / "figures.json"
    done = bench(entry(tmp_path / "kv"), *SMALL, "--svg", str(svg), "--json-file", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(out.read_text())
    for size in report["sizes"]:
        assert f"{size['put']['gb_per_s']['median']:.3f}" in done.stdout
    texts = [text.text for text in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    for word in ("put", "raw write + fdatasync", "load", "raw read", "exists", "0.25 MiB", "1 MiB"):
        assert word in texts
    for size in report["sizes"]:
        assert f"{size['load']['ratio']['median']:.2f}×" in texts


def test_a_raw_dir_that_cannot_be_used_is_named(tmp_path):
    done = bench(entry(tmp_path), *SMALL, "--raw-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "--raw-dir: " in done.stderr and "raw I/O with O_DIRECT is not possible" in done.stderr
    assert files(tmp_path) == []


def test_an_adapter_without_a_directory_is_measured_without_a_ratio(tmp_path):
    settings = {"base_path": str(tmp_path), "min_free_bytes": 0}
    (tmp_path / "far_medium.py").write_text(
        "from kvstrata.storage.media.fs.adapter import FsAdapter\n"
        "def make(**settings): return FsAdapter(**settings)\n"
    )
    far = {"type": "plugin", "module_path": "far_medium", "class_name": "make", "adapter_params": settings}
    done = subprocess.run(
        command(json.dumps(far), *SMALL),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no raw I/O beside it: the adapter has no base_path; give --raw-dir" in done.stdout
    assert not list(tmp_path.rglob("*.kvc"))


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
    assert list(tmp_path.glob("kvstrata-bench-*")) == []
    eventually("every process of it has ended", lambda: group_is_gone(running.pid))


def test_progress_is_shown_on_a_terminal_only(tmp_path):
    pytest.importorskip("tqdm", reason="the extra `bench` is not installed")
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    try:
        with subprocess.Popen(
            command(entry(tmp_path), *SMALL), stdout=subprocess.DEVNULL, stderr=theirs
        ) as running:
            os.close(theirs)
            seen = b""
            try:
                while more := os.read(ours, 4096):
                    seen += more
            except OSError:  # the terminal's other end is closed
                pass
        assert running.returncode == 0
        assert b"%" in seen and b"B/s" in seen
    finally:
        os.close(ours)
