"""Every command, wherever its output goes and whatever its limits: a clear line, a documented status, no traceback."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstrata.cli.boundary import Exit
from tests.harness import own_commands
from tests.harness.daemon import free_port

pytestmark = pytest.mark.integration

FEW_FILES = 20
DOCUMENTED = {*(int(status) for status in Exit)}
UNANSWERED = ["--url", "http://127.0.0.1:9"]
SERVE = ["kvstrata", "bench", "serve", "long-doc-qa", "--url", "http://127.0.0.1:9"]
COMMANDS: dict[str, list[str]] = {
    "lmcache-server --check": ["kvstrata.cli.server", "--check"],
    "lmcache-server --help": ["kvstrata.cli.server", "--help"],
    "lmcache-server": ["kvstrata.cli.server", "--l1-size-gb", "nonsense"],
    "lmcache-controller --check": ["kvstrata.cli.controller", "--check"],
    "lmcache-controller": ["kvstrata.cli.controller", "--port", "nonsense"],
    "lmcache-gateway": ["kvstrata.cli.gateway", "--port", "nonsense"],
    "kvstrata": ["kvstrata"],
    "kvstrata --version": ["kvstrata", "--version"],
    "kvstrata nonsense": ["kvstrata", "nonsense"],
    "kvstrata server": ["kvstrata", "server", "--check"],
    "kvstrata controller": ["kvstrata", "controller", "--check"],
    "ctl --help": ["kvstrata", "ctl", "--help"],
    "ctl --url foo": ["kvstrata", "ctl", "--url", "foo", "status"],
    "ctl": ["kvstrata", "ctl", *UNANSWERED, "status"],
    "ctl cluster": ["kvstrata", "ctl", *UNANSWERED, "cluster", "status"],
    "ctl pool": ["kvstrata", "ctl", "pool", "free", "/nonexistent/pö→l"],
    "cluster": ["kvstrata", "cluster", "add", "/nonexistent/pö→l", "a"],
    "bench": ["kvstrata", "bench", "--socket-dir", "/nonexistent/sockets"],
    "bench l2": [
        "kvstrata",
        "bench",
        "l2",
        "--l2-adapter",
        "FOLDER",
        "--chunk-mb",
        "1",
        "--count",
        "1",
        "--rounds",
        "1",
    ],
    "bench serve": SERVE,
    "doctor": ["kvstrata", "doctor"],
    "doctor --json": ["kvstrata", "doctor", "--json"],
}
"""Module and arguments of `python -m`. FOLDER stands for an adapter in a folder of the test."""
PRINTS = (
    *("--check", "--help", "--version", "kvstrata server", "kvstrata controller"),
    *("doctor", "bench l2"),
)
"""Commands of these names print something in this test."""


STARTED = ("kvstrata --version", "lmcache-server --check")
"""Commands that a real interpreter runs too; all are run by forks of one that has imported them."""
GATE = ("lmcache-server", "lmcache-gateway", "ctl --help", "ctl", "bench", "bench l2", "doctor")
"""Commands whose forks run in the gate: each way in which a command prints, asks and fails."""
STRICT = {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONUNBUFFERED": "1"}


class Case(NamedTuple):
    """Where a command's output goes, and in what surroundings it runs."""

    output: str = os.devnull
    """A file, or "gone": a pipe that nobody reads, or "closed": none."""
    few_files: bool = False
    environment: Mapping[str, str] = {}


CASES = {
    "reader gone": Case("gone"),
    "reader gone, unbuffered": Case("gone", environment={"PYTHONUNBUFFERED": "1"}),
    "/dev/full": Case("/dev/full"),
    "/dev/full, unbuffered": Case("/dev/full", environment={"PYTHONUNBUFFERED": "1"}),
    "closed": Case("closed"),
    "few files": Case(few_files=True),
    "ascii": Case(environment=STRICT),
    "C": Case(environment=POSIX),
    "all at once": Case("/dev/full", few_files=True, environment=STRICT),
}


@contextlib.contextmanager
def output_of(case: Case) -> Iterator[int]:
    """A descriptor for its standard output."""
    if case.output == "gone":
        reader, output = os.pipe()
        os.close(reader)
    else:
        output = os.open(os.devnull if case.output == "closed" else case.output, os.O_WRONLY)
    try:
        yield output
    finally:
        os.close(output)


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))


def words_of(name: str, folder: Path) -> list[str]:
    """The arguments of a command, whose files lie in the folder."""
    entry = json.dumps({"type": "fs", "base_path": str(folder / "records"), "capacity_gb": 1})
    return [entry if word == "FOLDER" else word for word in COMMANDS[name]]


def started(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    # A shell without job control starts background processes with SIGINT ignored; children of the tests inherit that.
    command = [*("env", "--default-signal=INT"), sys.executable, "-m", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **more)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The exit status and standard error."""
    _, error = process.communicate(timeout=120)
    return process.returncode, error.decode()


def of_interpreter(name: str, case: Case, folder: Path) -> tuple[int, str]:
    """Exit status and standard error of a command that a new interpreter runs."""

    def prepare() -> None:
        if case.output == "closed":
            os.close(1)
        if case.few_files:
            limit_files()

    variables = {**os.environ, "XDG_CACHE_HOME": str(folder), **case.environment}
    with output_of(case) as output:
        return ended(started(words_of(name, folder), stdout=output, env=variables, preexec_fn=prepare))


def of_fork(name: str, case: Case, folder: Path) -> tuple[int, str]:
    """Exit status and standard error of a forked command."""
    assert own_commands.forks is not None
    module, *arguments = words_of(name, folder)
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder), **case.environment}
    with output_of(case) as output, tempfile.TemporaryFile("w+") as error:
        process = own_commands.forks.start(
            module,
            arguments,
            variables,
            (output, error.fileno()),
            open_files=FEW_FILES if case.few_files else 0,
            closed_output=case.output == "closed",
        )
        status = process.wait(120)
        error.seek(0)
        return status, error.read()


@pytest.mark.parametrize(
    ("run", "name"),
    [
        *((of_interpreter, name) for name in STARTED),
        *(pytest.param(of_fork, name, marks=() if name in GATE else pytest.mark.long) for name in COMMANDS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_no_command_ends_with_a_traceback(
    run: Callable[[str, Case, Path], tuple[int, str]], name: str, tmp_path: Path
) -> None:
    found = {title: run(name, case, tmp_path / title.replace("/", "")) for title, case in CASES.items()}
    for case, (status, error) in found.items():
        assert status in DOCUMENTED - {Exit.CRASHED}, (case, status, error)
        for word in ("Traceback", "Exception ignored", "Error:", "defect"):
            assert word not in error, (case, error)
        assert status in (Exit.DONE, Exit.READER_GONE) or error, (case, status)
    assert found["ascii"][1].isascii() and (run is of_fork or found["C"][1].isascii()), found
    if any(word in name for word in PRINTS):
        for case in ("reader gone", "reader gone, unbuffered"):
            assert found[case][0] == Exit.READER_GONE, found[case]
        for case in ("/dev/full", "/dev/full, unbuffered", "closed"):
            assert found[case][0] == Exit.OUTPUT, found[case]
            why = "Bad file descriptor" if case == "closed" else "No space left on device"
            assert f"standard output cannot be written: {why}" in found[case][1]


@pytest.mark.parametrize(
    ("module", "supervised"), [("kvstrata.cli.server", True), ("kvstrata.cli.controller", False)]
)
def test_a_server_that_may_open_too_few_files_does_not_start_and_says_so(
    module: str, supervised: bool
) -> None:
    words = [module, "--port", str(free_port()), *([] if supervised else ["--no-supervise"])]
    status, error = ended(started(words, stdout=subprocess.DEVNULL, preexec_fn=limit_files))
    assert status == Exit.CONFIG
    assert f"open files: this process may have {FEW_FILES} open at a time" in error and "ulimit -Hn" in error
    assert len(error.splitlines()) == 1


@contextlib.contextmanager
def silent_port() -> Iterator[socket.socket]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield listener


@pytest.mark.parametrize(
    "words",
    [
        ["kvstrata", "ctl", "--url", "http://PORT", "status"],
        ["kvstrata", "bench", "serve", "shared-prefix", "--url", "http://PORT", "--users", "1"],
        ["kvstrata", "bench", "cluster", "--controller", "tcp://PORT"],
    ],
    ids=" ".join,
)
def test_ctrl_c_while_a_command_waits_is_one_line_and_status_130(words: list[str]) -> None:
    with silent_port() as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        process = started([word.replace("PORT", address) for word in words], stdout=subprocess.DEVNULL)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            status, error = ended(process)
    assert (status, error.splitlines()[-1].rpartition(": ")[2]) == (Exit.INTERRUPTED, "interrupted"), error
    assert len(error.splitlines()) == 1
