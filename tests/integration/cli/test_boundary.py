"""Commands whose output goes nowhere or that may open few files: a clear line, a documented status, no traceback."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.cli.boundary import Exit
from tests.harness.daemon import free_port

pytestmark = pytest.mark.integration

FEW_FILES = 20


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))


def started(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    # A shell without job control starts background processes with SIGINT ignored; children of the tests inherit that.
    command = [*("env", "--default-signal=INT"), sys.executable, "-m", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **more)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The exit status and standard error."""
    _, error = process.communicate(timeout=120)
    return process.returncode, error.decode()


@contextlib.contextmanager
def output(kind: str) -> Iterator[int]:
    """A descriptor for standard output that takes nothing."""
    if kind == "gone":
        reader, fd = os.pipe()
        os.close(reader)
    else:
        fd = os.open(kind, os.O_WRONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["", "unbuffered"])
@pytest.mark.parametrize(
    ("kind", "status", "says"),
    [
        ("gone", Exit.READER_GONE, ""),
        ("/dev/full", Exit.OUTPUT, "standard output cannot be written: No space left on device"),
    ],
)
def test_output_that_is_lost_has_a_status(kind: str, status: int, says: str, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with output(kind) as fd:
        found, error = ended(started(["kvstrata", "--help"], stdout=fd, env=environment))
    assert found == status and says in error and "Traceback" not in error, error
    assert len(error.splitlines()) == bool(says)


def test_a_closed_output_is_lost_output() -> None:
    found, error = ended(started(["kvstrata", "--help"], preexec_fn=lambda: os.close(1)))
    assert found == Exit.OUTPUT and "Traceback" not in error, error


def test_an_output_without_our_characters_gets_them_escaped() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = started(["kvstrata", "ctl", "pool", "free", "/nonexistent/pö→l"], env=environment)
    found, error = ended(process)
    assert found in (Exit.FAILED, Exit.CONFIG) and error.isascii() and "Traceback" not in error, error


@pytest.mark.parametrize(
    ("module", "supervised"), [("kvstrata.cli.server", True), ("kvstrata.cli.controller", False)]
)
def test_a_server_that_may_open_too_few_files_does_not_start_and_says_so(module, supervised):
    words = [module, "--port", str(free_port()), *([] if supervised else ["--no-supervise"])]
    status, error = ended(started(words, stdout=subprocess.DEVNULL, preexec_fn=limit_files))
    assert status == Exit.CONFIG
    assert f"open files: this process may have {FEW_FILES} open at a time" in error and "ulimit -Hn" in error
    assert len(error.splitlines()) == 1


def test_ctrl_c_while_a_command_waits_is_one_line_and_status_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = started(["kvstrata", "ctl", "--url", url, "status"], stdout=subprocess.DEVNULL)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            assert ended(process) == (Exit.INTERRUPTED, "kvstrata ctl: interrupted\n")
