"""A process that has imported kvstrata's commands and forks them: most of what a start costs is importing.

`Forks` is the tests' side.  Run as a script, this file is the process: it imports, then answers requests on the socket
that is its standard input, one at a time.  A forked command has a session, standard streams, environment and folder of
its own, as one that was started; but /proc shows the command line and the environment of the process that forked it.
So a test of these starts its command, as does one with variables that only the loader or the interpreter reads.

Forking is safe because the process has one thread and no ZMQ context.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

if __package__ in (None, ""):
    # This file runs as a script: modules of its folder must not hide others.
    sys.path = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

MESSAGE_BYTES = 1 << 18
READ_AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "ASAN_", "KVSTRATA_SIMD")
"""Beginnings of variables that a forked command would read too late."""
PRELOADED = (
    "kvstrata.cli.bench.engine",
    "kvstrata.cli.check",
    "kvstrata.cli.ctl",
    "kvstrata.cli.starting",
    "kvstrata.config.flags",
    "kvstrata.config.lmcache.keys",
    "kvstrata.controller.process",
    "kvstrata.gateway.process",
    "kvstrata.process.http",
    "kvstrata.process.http_connections",
    "kvstrata.server.process",
    "kvstrata.storage.media.disk.adapter",
    "kvstrata.storage.media.fs.adapter",
    "prometheus_client",
    "pydantic.v1",
    "uvicorn",
)


class Command:
    """A forked command, as far as tests use what `subprocess.Popen` has."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forks = forks
        self._ended = os.pidfd_open(pid)  # its number stays its own until `Forks` is asked for its status

    def poll(self) -> int | None:
        """The exit status, negative after a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status. Raises TimeoutExpired."""
        with self._forks.lock:
            if self.returncode is not None:
                return self.returncode
        if not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._forks.lock:
            if self.returncode is None:
                self.returncode = int(self._forks.ask({"status": self.pid}))
                os.close(self._ended)
            return self.returncode

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class Forks:
    """Forks commands from its first `start` to `close`. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = dict(os.environ)
        self._variables = _read_at_start(self._environment)

    def can(self, environment: Mapping[str, str]) -> bool:
        """Whether a forked command would be the same as a started one in this environment."""
        return _read_at_start(environment) == self._variables

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int],
        ready: int | None = None,
    ) -> Command:
        """Fork `python -m module`; `streams`: its standard output and error, `ready`: for its --ready-fd, if any.

        The caller still owns its descriptors.
        """
        request = {"command": [module, *arguments], "environment": dict(environment), "folder": os.getcwd()}
        descriptors = streams if ready is None else (*streams, ready)
        with self.lock:
            return Command(self, int(self.ask(request, descriptors)))

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> str:
        """Ask the process. Raises RuntimeError with what it says instead of a number."""
        with self.lock:
            if self._socket is None:
                self._socket = self._begin()
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(MESSAGE_BYTES).decode()
        if not answer.lstrip("-").isdigit():
            raise RuntimeError(f"the process that forks commands has failed: {answer or 'it has ended'}")
        return answer

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=theirs.fileno(),
                env=self._environment,
                start_new_session=True,
            )
        return ours

    def close(self) -> None:
        """End the process; commands that still run belong to whoever started them."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
            self._socket = None


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


def serve() -> None:
    """Answer requests until the tests close their socket."""
    asker = socket.socket(fileno=os.dup(0))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if threads := len(os.listdir("/proc/self/task")) - 1:
        asker.send(f"{threads} threads besides the main one: forking would not be safe".encode())
        return
    while True:
        message, descriptors, _, _ = socket.recv_fds(asker, MESSAGE_BYTES, 3)
        if not message:
            return
        request = json.loads(message)
        if "status" in request:
            _, status = os.waitpid(request["status"], 0)
            asker.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            asker.close()
            run(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        asker.send(str(pid).encode())


def run(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """In the forked process: become the command."""
    status = 1
    try:
        os.setsid()
        output, errors, *ready = descriptors
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        # A shell without job control starts background processes with SIGINT ignored, which tests would inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        sys.path.insert(0, request["folder"])  # as `python -m` does
        sys.argv = [*request["command"]]
        for descriptor in ready:
            os.set_inheritable(descriptor, True)
            sys.argv += ["--ready-fd", str(descriptor)]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.exit(status)


def _stream(number: int) -> Any:
    """A standard stream as the interpreter makes it at its start; what it is written to has changed."""
    if not number:
        return open(number, closefd=False)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    file = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115 (open until the end)
    encoding = os.environ.get("PYTHONIOENCODING")
    errors = "backslashreplace" if number == 2 else "strict"
    return io.TextIOWrapper(file, encoding, errors, line_buffering=number == 2, write_through=unbuffered)


if __name__ == "__main__":
    serve()
