"""A process that has imported what its children need, and forks them: most of what a start costs is importing.

`Forks` is the tests' side.  Run as a script, this file is the process: it imports a set of modules, then answers
requests on the socket that is its standard input, one at a time.  A forked child has a session, standard streams,
environment and folder of its own, as one that was started; but /proc shows the command line and the environment of the
process that forked it.  So a test of these starts its command, as does one with variables that only the loader or the
interpreter reads.

There are two sets of modules: `kvstrata`, our commands, and `vllm`, for which the Python of vLLM's environment runs
this file; it does not import kvstrata, since each engine finds and loads the connector by itself.  A forked engine
starts in a second; importing vLLM takes ten.

Forking is safe because the process has one thread, no ZMQ context, and no OpenMP pool: it never computes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):
    # This file runs as a script: modules of its folder must not hide others.
    sys.path = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

MESSAGE_BYTES = 1 << 18
START_S = 500.0
"""Longest wait for the process, which imports before its first answer."""
RUN_S = 600.0
VARIABLE = "FORKS_VLLM"
"""Environment variable that tells a child process the descriptor and the log of a lent process: `NUMBER:LOG`."""
READ_AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "ASAN_", "KVSTRATA_SIMD")
"""Beginnings of variables that a forked command would read too late."""
PRELOADED = {
    "kvstrata": (
        "kvstrata.cli.bench.engine",
        "kvstrata.cli.ctl",
        "kvstrata.cli.starting",
        "kvstrata.config.flags",
        "kvstrata.config.lmcache.keys",
        "kvstrata.controller.process",
        "kvstrata.gateway.process",
        "kvstrata.process.http",
        "kvstrata.process.http_connections",
        "kvstrata.server.process",
        "kvstrata.tiers.media.disk",
        "kvstrata.tiers.media.fs",
        "prometheus_client",
        "pydantic.v1",
        "uvicorn",
    ),
    # What an engine imports before its first token.
    "vllm": (
        "vllm",
        "vllm.plugins",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.engine.core",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.models.llama",
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "vllm.entrypoints.llm",
        "vllm.lora.request",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        "vllm.model_executor.model_loader",
    ),
}


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

    def __init__(
        self,
        modules: str = "kvstrata",
        *,
        python: str | Path = sys.executable,
        environment: Mapping[str, str] = os.environ,
        log: Path | None = None,
    ) -> None:
        """`modules`: a name in `PRELOADED`; `log`: gets what the process writes."""
        self.lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._modules, self._python, self._log = modules, str(python), log
        self._environment = dict(environment)
        self._variables = _read_at_start(self._environment)

    @classmethod
    def inherited(cls) -> Forks | None:
        """Return what the parent process lent (`lend`), None when it lent nothing. It must not use it meanwhile."""
        if (lent := os.environ.get(VARIABLE)) is None:
            return None
        number, _, log = lent.partition(":")
        forks = cls(log=Path(log) if log else None)
        forks._socket = socket.socket(fileno=int(number))
        forks._socket.settimeout(START_S)
        return forks

    def lend(self) -> tuple[int, dict[str, str]]:
        """Return a descriptor that a child process must inherit to use this, and the variable that names it."""
        if self._socket is None:
            self._socket = self._begin()
        return self._socket.fileno(), {VARIABLE: f"{self._socket.fileno()}:{self._log or ''}"}

    def can(self, environment: Mapping[str, str]) -> bool:
        """Whether a forked command would be the same as a started one in this environment."""
        return _read_at_start(environment) == self._variables

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        *,
        ready: int | None = None,
        folder: Path | None = None,
    ) -> Command:
        """Fork a command: a module, as after `python -m`, or a script's path, and its arguments.

        `streams`: its standard streams, `ready`: for its --ready-fd, if any.  The caller still owns its descriptors.
        """
        where = str(folder or os.getcwd())
        request = {"command": list(command), "environment": dict(environment), "folder": where}
        descriptors = streams if ready is None else (*streams, ready)
        with self.lock:
            return Command(self, int(self.ask(request, descriptors)))

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        text: str = "",
        timeout_s: float = RUN_S,
    ) -> subprocess.CompletedProcess[str]:
        """Fork a command with `text` as its input and wait for its end. Raises subprocess.TimeoutExpired."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
            files[0].write(text)
            files[0].seek(0)
            given, output, errors = (file.fileno() for file in files)
            process = self.start(command, environment, (given, output, errors), folder=folder)
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            for file in files:
                file.seek(0)
            return subprocess.CompletedProcess(list(command), status, files[1].read(), files[2].read())

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> str:
        """Ask the process. Raises RuntimeError with what it says instead of a number."""
        with self.lock:
            if self._socket is None:
                self._socket = self._begin()
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                answer = self._socket.recv(MESSAGE_BYTES).decode()
            except OSError as error:
                answer = str(error)
        if not answer.lstrip("-").isdigit():
            log = self._log.read_text(errors="replace")[-6000:] if self._log else ""
            raise RuntimeError(f"the process that forks has failed: {answer or 'it has ended'}\n{log}")
        return answer

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            log = None
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(open(self._log, "ab"))
            self._process = subprocess.Popen(
                [self._python, __file__, self._modules],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=None if self._log is None else self._log.parent,
                start_new_session=True,
            )
        ours.settimeout(START_S)
        return ours

    def close(self) -> None:
        """End the process; commands that still run belong to whoever started them."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
            self._socket = None


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


def serve(modules: str) -> None:
    """Answer requests until the tests close their socket."""
    asker = socket.socket(fileno=os.dup(0))
    for name in PRELOADED[modules]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children that collect garbage would copy the pages of what is shared here
    while True:
        message, descriptors, _, _ = socket.recv_fds(asker, MESSAGE_BYTES, 4)
        if not message:
            return
        request = json.loads(message)
        if "status" in request:
            _, status = os.waitpid(request["status"], 0)
            asker.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        if threads := len(os.listdir("/proc/self/task")) - 1:
            asker.send(f"{threads} threads besides the main one: forking would not be safe".encode())
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
        ready = descriptors[3:]
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        # A shell without job control starts background processes with SIGINT ignored, which tests would inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        # As `python -m` does; Python read the variable before the fork.
        path = [request["folder"], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        sys.path[:0] = [entry for entry in path[:1] if entry]
        sys.path += [entry for entry in path[1:] if entry and entry not in sys.path]
        sys.argv = [*request["command"]]
        for descriptor in ready:
            os.set_inheritable(descriptor, True)
            sys.argv += ["--ready-fd", str(descriptor)]
        if "vllm" in sys.modules:
            fork_children()
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.exit(status)


def fork_children() -> None:
    """Let vLLM fork the processes of its engine, which on a CPU it always spawns: each would import vLLM again."""
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]


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
    serve(sys.argv[1])
