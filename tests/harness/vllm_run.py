"""Real vLLM in a child process that takes requests as JSON lines: one start (5-30 s) serves many checks.

This module is the parent's side; the child is `vllm_engine`, whose `Engine` has the operations.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar, Self

from tests.harness import vllm_engine, vllm_env
from tests.harness.forks import Command, Forks

START_S = 500.0
ANSWER_S = 240.0
MODULE = "kvstrata.connectors.vllm"


class VllmForks(Forks):
    """Forks engines with vLLM's Python, in the environment of its first `start`; its log and files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__("vllm", log=folder / "forks.log")
        self._folder = folder

    def _begin(self) -> socket.socket:
        python = vllm_env.find()
        assert python is not None, "the vLLM environment is gone"
        self._python = str(python)
        self._environment = {**vllm_env.environment(self._folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return super()._begin()


class VllmFailed(Exception):
    """The child answered with an error or has ended; the message holds the end of its log."""


def transfer(extra: dict[str, Any], *, bare_name: bool = False) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config`; `bare_name` leaves the module path out."""
    return {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
        **({} if bare_name else {"kv_connector_module_path": MODULE}),
    }


class VllmProcess:
    """A child process with one `LLM`.

    `extra` is the connector's extra config, None for no connector; `options` go to `LLM`.  `bare_name` leaves the
    module path out.  With `processes` the child runs its engine in another process, as in production.  `state` is a
    folder for the log and for vLLM's files; `in_front` has another version of vLLM (`tests/tools/vllm_python.py`).
    """

    fork_server: ClassVar[Forks | None] = None
    """Forks the children and their engines' processes, so that none of them imports vLLM; None: none is forked."""

    def __init__(
        self,
        model: Path,
        state: Path,
        *,
        extra: dict[str, Any] | None,
        bare_name: bool = False,
        processes: bool = False,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        in_front: Path | None = None,
    ) -> None:
        state.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.log = state / "vllm.log"
        llm: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "seed": 0,
            **(options or {}),
        }
        if extra is not None:
            llm["kv_transfer_config"] = transfer(extra, bare_name=bare_name)
        variables = vllm_env.environment(state, in_front)
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if processes else "0"
        variables.update(environment or {})
        self._buffer = b""
        self.started_s = time.monotonic()
        python = vllm_env.find()
        assert python is not None, "the vLLM environment is gone"
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._pipes = {self._requests, self._answers}
        try:
            with open(self.log, "ab") as log:
                streams = (requests, answers, log.fileno())
                self._process: Command | subprocess.Popen[bytes]
                command = [vllm_engine.__file__, json.dumps(llm)]
                if self.fork_server is not None and in_front is None:
                    self._process = self.fork_server.start(command, variables, streams, folder=state)
                else:
                    self._process = subprocess.Popen(
                        [str(python), *command],
                        stdin=requests,
                        stdout=answers,
                        stderr=log,
                        env=variables,
                        cwd=state,
                        start_new_session=True,
                    )
        except BaseException:
            self._close_pipes(self._requests, self._answers)
            raise
        finally:
            os.close(requests)
            os.close(answers)
        try:
            self.info: dict[str, Any] = self._answer(START_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - self.started_s

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **arguments: Any) -> Any:
        """Run an operation of `vllm_engine.Engine`; return its result. Raises VllmFailed."""
        self.send(op, **arguments)
        return self._answer(ANSWER_S)

    def send(self, op: str, **arguments: Any) -> None:
        """Begin an operation; `result` returns its answer."""
        line = json.dumps({"op": op, **arguments}).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except BrokenPipeError:
            raise VllmFailed(self.log_tail()) from None

    def result(self, timeout_s: float = ANSWER_S) -> Any:
        """Wait for the answer to the oldest `send`. Raises VllmFailed."""
        return self._answer(timeout_s)

    def generate(self, prompt: list[int], **arguments: Any) -> dict[str, Any]:
        """Answer one prompt; return {"tokens", "cached_tokens", "ttft_s", "wall_s", ...}."""
        found: dict[str, Any] = self.ask("generate", prompts=[prompt], **arguments)[0]
        return found

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        return self.log_text()[-6000:]

    def quit(self) -> None:
        """End the child in order: vLLM shuts the connector down."""
        self._close_pipes(self._requests)
        try:
            self._process.wait(60)
        finally:
            self.close()

    def close(self) -> None:
        """Kill the child and every process that it started. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()  # a forked child may not have called setsid yet
        self._process.wait()
        self._close_pipes(self._requests, self._answers)

    def _close_pipes(self, *pipes: int) -> None:
        for pipe in self._pipes.intersection(pipes):
            os.close(pipe)
        self._pipes.difference_update(pipes)

    def _answer(self, timeout_s: float) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._answers], [], [], left_s)[0]:
                raise VllmFailed(f"no answer for {timeout_s:.0f} s\n{self.log_tail()}")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise VllmFailed(f"exit status {self._process.wait()}\n{self.log_tail()}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise VllmFailed(f"{reply['error']}\n{self.log_tail()}")
        return reply["reply"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
