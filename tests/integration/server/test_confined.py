"""A real server where docker/compose.yaml and configs/kubernetes put it: a read-only root and no capabilities."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import namespaces
from tests.harness.cache_engine import eventually
from tests.harness.child import Child
from tests.harness.server_process import ServerProcess

_READ_ONLY = (
    'mount --bind /tmp /tmp && mount --bind "$0" "$0" && mount --bind /dev/shm /dev/shm'
    ' && mount -o remount,bind,ro / && exec "$@"'
)


class Confined:
    """The host of a server that can write to /tmp, /dev/shm and `folder` only, and has no capability."""

    def __init__(self, folder: Path) -> None:
        self.under = (
            *("unshare", "-Urm", "sh", "-c", _READ_ONLY, str(folder)),
            *("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
        )


@pytest.fixture
def confined(tmp_path: Path) -> Any:
    if problem := namespaces.why_not():
        pytest.skip(problem)
    host = Confined(tmp_path)
    # What the test relies on: `~` is read-only, and no capability is left.
    seen = subprocess.run(
        [*host.under, "sh", "-c", "touch /not-here 2>&1; grep -E 'CapEff|NoNewPrivs' /proc/self/status"],
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    assert "Read-only file system" in seen, seen
    assert "CapEff:\t0000000000000000" in seen and "NoNewPrivs:\t1" in seen, seen
    return host


class Traced:
    """The host of a server whose system calls are written to `file`; those of `refused` fail with EPERM."""

    def __init__(self, file: Path, refused: str = "") -> None:
        self.file = file
        inject = ("-e", f"inject={refused}:error=EPERM") if refused else ()
        self.under = ("strace", "-f", "-qq", "-e", "signal=none", *inject, "-o", str(file))

    def calls(self) -> set[str]:
        return set(re.findall(r"^\d+ +(\w+)\(", self.file.read_text(), re.MULTILINE))


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A file for a trace. Tests that need it may skip in CI too: strace is a tool of the system, which may lack it."""
    try:
        done = subprocess.run(["strace", "-f", "true"], capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        pytest.skip("needs strace; to install: apt-get install strace")
    if done.returncode != 0:
        pytest.skip(f"strace is not permitted here: {done.stderr.strip()}")
    return tmp_path / "calls"


def serve_two_clients(host: Any, folder: Path) -> str:
    """Store with one client, load with another, stop; return the server's log."""
    with ServerProcess(folder / "server", l1_mb=256, l2="embedded", host=host, supervised=True) as server:
        server.start()
        with (
            Child("tests.harness.cache_engine", log=folder / "1.log") as one,
            Child("tests.harness.cache_engine", log=folder / "2.log") as two,
        ):
            for client, group in ((one, "1" * 16), (two, "2" * 16)):
                client.ask("start", socket_dir=str(server.socket_dir), group=group)
                client.ask("connect")
            assert one.ask("store", n_chunks=1) == ["stored"]
            assert two.ask("hit", n_chunks=1) == 1
        os.kill(server.ready["pid"], signal.SIGTERM)
        eventually("it ended", lambda: server.halted())
        return server.log.read_text()


@pytest.mark.integration
def test_a_server_works_on_a_read_only_root_without_capabilities(confined: Any, tmp_path: Path) -> None:
    log = serve_two_clients(confined, tmp_path)
    assert " ERROR " not in log and "Read-only" not in log, log
    assert "kvstrata.server stopped" in log


@pytest.mark.long
def test_the_docs_list_each_system_call_of_a_server(traced: Path, tmp_path: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the list is of x86_64")
    host = Traced(traced)
    serve_two_clients(host, tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text()
    section = page.partition("### seccomp")[2].partition("\n## ")[0]
    listed = " ".join(section.split("```")[1::2]).split()
    assert len(host.calls()) > 50
    assert host.calls() <= set(listed), sorted(host.calls() - set(listed))


@pytest.mark.long
def test_a_server_works_where_seccomp_refuses_io_uring_and_numa(traced: Path, tmp_path: Path) -> None:
    host = Traced(traced, refused="io_uring_setup,mbind,move_pages,get_mempolicy,set_mempolicy")
    log = serve_two_clients(host, tmp_path)
    assert " ERROR " not in log and "kvstrata.server stopped" in log, log
    assert "(INJECTED)" in traced.read_text()
