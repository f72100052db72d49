"""A process that has imported vLLM and forks engines: a forked engine starts in a second; importing vLLM takes ten.

`ForkServer` is the parent's side. Run as a script by the Python of the vLLM environment, this file is the server: it
imports vLLM, then answers requests on the socket that is its standard input. A request holds an engine's environment
variables and folder. It also holds either `options`, those of an `LLM`, or `module`, the command line of `python -m`.
With it come three descriptors, the engine's standard streams. The answer is the engine's process id.

A forked engine with `options` runs `vllm_engine.main` in a session of its own, like one that was started as a script.
Forking is safe because the server never computes: it has one thread and no OpenMP pool. It does not import kvstrata;
each engine finds and loads the connector by itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
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
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):
    # This file runs as a script: modules of its folder must not hide modules of vLLM's environment.
    sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]

START_S = 500.0
RUN_S = 600.0
STATUS = "exit-status"
"""A process leaves its exit status in this file of its folder, since only its parent, the server, could wait for it."""
MESSAGE_BYTES = 1 << 17
# The modules that an engine imports before its first token.
PRELOADED = (
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
)

VARIABLE = "FORKS_VLLM"
"""Environment variable that tells a child process the descriptor and the folder of a fork server: `NUMBER:FOLDER`."""


class ForkServer:
    """Forks engines from its first `start` to `close`; it keeps its state and its log in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder / "fork-server.log"
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def inherited(cls) -> ForkServer | None:
        """Return the server that the parent process lent (`lend`), None when it lent none.

        The parent itself must not use the server meanwhile.
        """
        if (lent := os.environ.get(VARIABLE)) is None:
            return None
        number, _, folder = lent.partition(":")
        server = cls(Path(folder))
        server._socket = socket.socket(fileno=int(number))
        server._socket.settimeout(START_S)
        return server

    def lend(self) -> tuple[int, dict[str, str]]:
        """Return a descriptor that a child process must inherit to use this server, and the variable that names it."""
        if self._socket is None:
            self._socket = self._begin()
        return self._socket.fileno(), {VARIABLE: f"{self._socket.fileno()}:{self._folder}"}

    def _begin(self) -> socket.socket:
        from tests.harness import vllm_env

        python = vllm_env.find()
        assert python is not None, "the vLLM environment is gone"
        self._folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [str(python), __file__],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env={**vllm_env.environment(self._folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                cwd=self._folder,
                start_new_session=True,
            )
        ours.settimeout(START_S)
        return ours

    def start(
        self, options: dict[str, Any], variables: dict[str, str], folder: Path, streams: tuple[int, int, int]
    ) -> Forked:
        """Fork an engine with these standard streams; the caller still owns its descriptors."""
        request = {"options": options, "variables": variables, "folder": str(folder)}
        return self._ask(request, streams)

    def start_module(
        self, command: list[str], variables: Mapping[str, str], folder: Path, streams: tuple[int, int, int]
    ) -> Forked:
        """Fork a process that runs `python -m` with this module and its arguments, in the environment of vLLM."""
        return self._ask({"module": command, "variables": dict(variables), "folder": str(folder)}, streams)

    def run_module(
        self, command: list[str], variables: Mapping[str, str], folder: Path, text: str = ""
    ) -> tuple[int, str, str]:
        """Run such a process to its end with `text` as its input; return exit status, output and errors."""
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
            streams[0].write(text)
            streams[0].seek(0)
            given, out, errors = (stream.fileno() for stream in streams)
            self.start_module(command, variables, folder, (given, out, errors)).wait(RUN_S)
            for stream in streams:
                stream.seek(0)
            return int((folder / STATUS).read_text()), streams[1].read(), streams[2].read()

    def _ask(self, request: dict[str, Any], streams: tuple[int, int, int]) -> Forked:
        if self._socket is None:
            self._socket = self._begin()
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            answer = self._socket.recv(MESSAGE_BYTES)
        except OSError as error:
            answer = str(error).encode()
        if not answer.isdigit():
            raise RuntimeError(
                f"vLLM's fork server failed: {answer.decode()}\n{self._log.read_text(errors='replace')[-6000:]}"
            )
        return Forked(int(answer))

    def close(self) -> None:
        """End the server; engines that still run belong to whoever started them."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()


class Forked:
    """An engine's process. It is not our child: we can wait for its end but do not learn its exit status."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = -1

    def poll(self) -> str | None:
        """Return None while the process runs, else "unknown" in place of its exit status."""
        try:
            return self.wait(0)
        except TimeoutError:
            return None

    def wait(self, timeout: float | None = None) -> str:
        if self._descriptor >= 0:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
            os.close(self._descriptor)
            self._descriptor = -1
        return "unknown"

    def kill(self) -> None:
        if self._descriptor >= 0:
            for end in (os.killpg, os.kill):  # the process may not have called setsid yet
                with contextlib.suppress(ProcessLookupError):
                    end(self.pid, signal.SIGKILL)
            self.wait()


def serve() -> None:
    asker = socket.socket(fileno=os.dup(0))
    for name in PRELOADED:
        importlib.import_module(name)
    root = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, root)
    from tests.harness import vllm_engine

    sys.path.remove(root)
    gc.freeze()  # vLLM collects garbage while it starts, which else would copy the pages of what is shared here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets engines that ended
    while True:
        message, streams, _, _ = socket.recv_fds(asker, MESSAGE_BYTES, 3)
        if not message:
            return
        if threads := len(os.listdir("/proc/self/task")) - 1:
            asker.send(f"{threads} threads besides the main one: forking would not be safe".encode())
            continue
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asker.close()
            run_engine(vllm_engine.main, json.loads(message), streams)
        for descriptor in streams:
            os.close(descriptor)
        asker.send(str(pid).encode())


def run_engine(main: Any, request: dict[str, Any], streams: list[int]) -> NoReturn:
    """In the forked child: become the process that the request describes."""
    status = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["variables"])
        # Python read the variable before the fork.
        sys.path += [
            each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path
        ]
        os.chdir(request["folder"])
        fork_children()
        if "module" in request:
            sys.argv = request["module"]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            main(request["options"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    Path(request["folder"], STATUS).write_text(str(status))
    sys.exit(status)


def fork_children() -> None:
    """Let vLLM fork the processes of its engine, which on a CPU it always spawns: each would import vLLM again."""
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]


if __name__ == "__main__":
    serve()
