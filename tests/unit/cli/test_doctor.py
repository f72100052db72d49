"""`kvstrata doctor`: it looks at the server that its flags describe, and ends with what to do."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.cli import doctor
from kvstrata.cli.doctor import Finding
from kvstrata.memory.segment import Segment, SegmentSettings
from tests.harness.daemon import free_port

MIB = 1 << 20
SMALL = ("--l1-size-gb", "0.0625")


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    """A server that does not run, with ports and folders of its own."""
    disk = {"type": "disk", "base_path": str(tmp_path / "l2"), "capacity_gb": 1}
    return (
        *SMALL,
        *("--socket-dir", str(tmp_path / "sockets"), "--http-port", str(free_port())),
        *("--l2-adapter", json.dumps(disk)),
    )


def report(*flags: str) -> dict[str, Finding]:
    return {each.check: each for each in doctor.findings(flags)}


def test_a_server_that_could_start_has_nothing_to_do(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_file_system", lambda path: "ext4")
    found = report(*flags)
    for check in ("settings", "running server", "/dev/shm", "disk-0 folder"):
        assert found[check].state == "ok", found[check]
    assert found["running server"].found == f"none at {tmp_path / 'sockets'}"
    assert found["disk-0 folder"].found.startswith(f"{tmp_path / 'l2'} on ext4, ")


@pytest.mark.parametrize(
    ("more", "check", "state", "says"),
    [
        (("--l1-size-gb", "-1"), "settings", "fail", "--l1-size-gb"),
        (("--l1-size-gb", "500000"), "settings", "warn", "l1_size_gb"),
        (("--l1-use-hugepages", "--l1-size-gb", "4096"), "huge pages", "fail", "vm.nr_hugepages="),
        (("--no-such-flag",), "settings", "fail", "--no-such-flag"),
    ],
)
def test_a_bad_state_has_a_line_with_a_remedy(flags, more, check, state, says):
    [found] = [each for each in doctor.findings((*flags, *more)) if each.check == check]
    assert found.state == state, found
    assert says in f"{found.found} {found.advice}" and found.advice


def test_what_an_engine_would_read_is_looked_at(flags, tmp_path, monkeypatch):
    file = tmp_path / "lmcache.yaml"
    file.write_text("local_device: cpu\n")
    for environment, state, says in (
        ({}, "ok", "all take effect"),
        ({"LMCACHE_CONFIG_FILE": str(file)}, "warn", "lmcache.yaml: local_device has no effect"),
        ({"LMCACHE_CHUNK_SIZE": "many"}, "fail", "LMCACHE_CHUNK_SIZE: must be a whole number"),
    ):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            found = report(*flags)["engine settings"]
        assert found.state == state and says in found.found, found


def test_a_folder_in_memory_is_no_place_for_a_tier(flags: tuple[str, ...]) -> None:
    memory = {"type": "disk", "base_path": "/dev/shm/kv-doctor", "capacity_gb": 1}
    found = report(*flags, "--l2-adapter", json.dumps(memory))["disk-1 folder"]
    assert found.state == "warn" and found.advice.startswith("choose a base_path on a local disk")


@pytest.fixture
def left() -> Iterator[Path]:
    """A pool that nobody owns."""
    root = Path(tempfile.mkdtemp(prefix="kv-", dir="/dev/shm"))
    settings = SegmentSettings(socket_dir=root / "sockets", directory=root / "segment", extents_bytes=4 * MIB)
    Segment.open(settings).close()
    yield settings.directory
    shutil.rmtree(root)


def test_a_pool_that_nobody_owns_is_named_with_the_command_that_frees_it(flags, left):
    found = [each for each in doctor.findings(flags) if each.check == "left pool"]
    [ours] = [each for each in found if str(left) in each.found]
    assert ours.advice.endswith(f"kvstrata ctl pool free {left}")
