"""The tools that prepare environments and contain runs; contain.py is tested with real processes."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.harness import server_process, vllm_engine, vllm_env, vllm_model
from tests.tools import contain, fetch_debian, provision, setup_env

CONTAIN = Path(contain.__file__)


@pytest.fixture
def steps(tmp_path: Path) -> provision.Steps:
    return provision.Steps(tmp_path / "log" / "steps.log")


def test_targets_without_compiled_modules_need_no_compiler(monkeypatch):
    monkeypatch.setattr(setup_env, "compiler_works", lambda: False)
    asked = set(setup_env.missing_packages(True)) - set(setup_env.missing_packages(False))
    assert asked & {"g++", "gcc-c++"}


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


def test_a_download_that_succeeds_late_is_a_success(
    steps: provision.Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "pause", lambda _: None)
    flag = tmp_path / "flag"
    script = f"test -e '{flag}' && echo there || {{ touch '{flag}'; exit 1; }}"
    assert steps.run(["sh", "-c", script], attempts=2) == "there\n"


def test_a_missing_program_is_an_error_that_names_it(steps: provision.Steps) -> None:
    with pytest.raises(provision.StepFailed, match="no-such-program"):
        steps.run(["no-such-program"])


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_CACHE", "/somewhere/else")
    assert provision.cache_root() == Path("/somewhere/else")
    monkeypatch.delenv("KVSTRATA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert provision.cache_root() == Path("/xdg/kvstrata")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert provision.cache_root() == Path("/home/somebody/.cache/kvstrata")
    monkeypatch.delenv("HOME")
    assert provision.cache_root() == provision.ROOT / "build" / "cache"


def test_setup_depends_on_the_content_of_sources_not_on_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    source = tmp_path / "a.cpp"
    source.write_text("int a;")
    before = setup_env.digest_of([source])
    os.utime(source, (1, 1))
    assert setup_env.digest_of([source]) == before
    source.write_text("int b;")
    assert setup_env.digest_of([source]) != before


def test_all_that_a_machine_lacks_is_installed_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "missing_packages", lambda compiles: ["g++", "python3.11-dev"])
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(
        setup_env.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "apt-get" else None
    )
    assert setup_env.check_machine(True) == [
        "sudo apt-get update && sudo apt-get install -y g++ python3.11-dev",
    ]


def test_too_little_disk_or_memory_stops_the_setup_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "missing_packages", lambda compiles: [])
    monkeypatch.setattr(setup_env.provision, "free_disk_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(setup_env.provision, "available_memory_bytes", lambda: 1 << 29)
    disk, memory = setup_env.check_machine(True)
    assert "has 1.0 GiB" in disk
    assert "0.5 GiB are available" in memory


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


def test_vllm_can_be_forbidden_even_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    monkeypatch.setenv("KVSTRATA_VLLM", "0")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(vllm_env.Unavailable, match="KVSTRATA_VLLM=0"):
        vllm_env.ensure()


def test_an_unknown_model_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="19m, 160m"):
        vllm_model.ensure_model("7b")


@pytest.mark.parametrize("name", ["", "-oAPT::x", "redis server", "../x"])
def test_only_package_names_reach_apt(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a Debian package"):
        fetch_debian.ensure([name])


def test_a_system_without_apt_is_told_which_line_installs_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_debian.shutil, "which", lambda _: None)
    with pytest.raises(fetch_debian.Unavailable, match="apt-get install -y redis-server"):
        fetch_debian.ensure(["redis-server"])


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


def test_a_complete_folder_whose_program_does_not_start_is_fetched_anew(archive: list[str]) -> None:
    archive += ["", "exit 0"]
    root = fetch_debian.ensure(["served"])  # without a look at its program, as earlier versions
    fetch_debian.program("served", ["served"])
    assert not archive and (root / "usr/bin/served").exists()


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


def test_a_call_is_charged_for_waits_and_not_for_the_time_that_it_takes() -> None:
    calls = vllm_engine.Calls()
    asked, answered = threading.Event(), threading.Condition()

    def answer() -> None:
        asked.wait()
        with answered:
            answered.notify()

    server = threading.Thread(target=answer)
    server.start()

    class Connector:
        def get_num_new_matched_tokens(self) -> None:
            with answered:
                asked.set()
                assert answered.wait(60.0)
            asked.wait(60.0)  # has come: no wait

        def start_load_kv(self) -> None:
            sum(range(100_000))

        def wait_for_save(self) -> None:
            time.sleep(0.0)

        def get_finished(self) -> None:
            with pytest.raises(TimeoutError):
                concurrent.futures.Future[None]().result(0.001)

    for name in {*calls.SCHEDULER, *calls.WORKER} - vars(Connector).keys():
        setattr(Connector, name, lambda self: None)
    calls.wrap(Connector)
    with calls.watching():
        for name in ("get_num_new_matched_tokens", "start_load_kv", "wait_for_save", "get_finished"):
            getattr(Connector(), name)()
        threading.Event().wait(0.001)  # of nobody's call
    server.join()
    taken = calls.take()["methods"]
    assert {name: found["wait_s"] for name, found in taken.items()} == {
        "get_num_new_matched_tokens": pytest.approx(60.0),
        "start_load_kv": 0,
        "wait_for_save": 0.0,
        "get_finished": pytest.approx(0.001),
    }
    assert calls.take()["methods"] == {}


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
