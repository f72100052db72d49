"""The tools that prepare environments and contain runs; contain.py is tested with real processes."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import server_process, vllm_env
from tests.tools import contain, fetch_debian, provision, setup_env

CONTAIN = Path(contain.__file__)


@pytest.fixture
def steps(tmp_path: Path) -> provision.Steps:
    return provision.Steps(tmp_path / "log" / "steps.log")


def test_only_steps_with_changed_inputs_are_due_and_all_steps_in_another_environment():
    wanted = {"environment": "python 3.11", "packages": "list 2", "native": "sources 1"}
    done = {"environment": "python 3.11", "packages": "list 1", "native": "sources 1", "install": "older"}
    assert setup_env.due(wanted, done) == ["packages"]
    assert setup_env.due(wanted, wanted) == []
    assert setup_env.due(wanted, {**done, "environment": "python 3.12"}) == list(wanted)


def test_a_failing_download_is_tried_again_and_then_reported_with_its_output(
    steps: provision.Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(provision, "pause", waits.append)
    counter = tmp_path / "attempts"
    fail = f"echo x >> '{counter}'; echo no route to host; exit 7"
    with pytest.raises(provision.StepFailed, match=r"no route to host\n.*exit status 7"):
        steps.run(["sh", "-c", fail], attempts=3)
    assert counter.read_text().count("x") == 3
    assert waits == [2, 4]


def test_an_unfinished_vllm_environment_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    python = vllm_env.root_folder() / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert vllm_env.find() is None
    (vllm_env.root_folder() / vllm_env.STAMP).write_text('{"complete": true}')
    assert vllm_env.find() == python
    python.unlink()
    assert vllm_env.find() is None


@pytest.mark.parametrize(("wish", "ci", "builds"), [("", "", False), ("1", "", True), ("", "true", True)])
def test_a_large_download_is_made_only_when_asked_for_or_in_ci(
    wish: str, ci: str, builds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    monkeypatch.setenv("KVSTRATA_VLLM", wish)
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(
        vllm_env, "download_size", lambda: vllm_env.DownloadSize(5_700_000_000, "a CUDA build")
    )
    monkeypatch.setattr(vllm_env, "_build", lambda _: Path("built"))
    if builds:
        assert vllm_env.ensure() == Path("built")
    else:
        with pytest.raises(vllm_env.Unavailable, match=r"5\.7 GB \(a CUDA build\).*make test-vllm-env"):
            vllm_env.ensure()


@pytest.mark.parametrize("name", ["", "-oAPT::x", "redis server", "../x"])
def test_only_package_names_reach_apt(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a Debian package"):
        fetch_debian.ensure([name])


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A Debian whose packages hold `usr/bin/served` of the first of these scripts; an empty text is a dangling link."""
    scripts: list[str] = []

    def fetch(steps: object, base: Path, folder: Path, root: Path, names: list[str]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        text = scripts.pop(0)
        if text:
            script(root / "usr/bin/served", text)
        else:
            (root / "usr/bin").mkdir(parents=True)
            (root / "usr/bin/served").symlink_to("not-fetched")

    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch_debian, "_fetch", fetch)
    return scripts


def test_a_program_on_path_that_starts_is_taken_before_one_is_fetched(
    archive: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = script(tmp_path / "bin/served", "exit 0")
    monkeypatch.setenv("PATH", f"{installed.parent}:{os.environ['PATH']}")
    assert fetch_debian.program("served", ["served"])[0] == str(installed)
    script(installed, "exit 1")
    archive.append("exit 0")
    fetch_debian._refusal.cache_clear()
    assert fetch_debian.program("served", ["served"])[0].startswith(str(tmp_path / "cache"))


def test_a_fetched_program_counts_only_once_it_has_started(archive: list[str]) -> None:
    archive += ["", "exit 0"]
    with pytest.raises(
        fetch_debian.Unavailable, match="fetched, but does not start; to install: sudo apt-get"
    ):
        fetch_debian.program("served", ["served"])
    program, _ = fetch_debian.program("served", ["served"])
    assert not archive, "it was fetched anew"
    assert fetch_debian.program("served", ["served"])[0] == program


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
