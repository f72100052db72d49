"""vLLM's OpenAI-compatible server, as `vllm serve` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.error
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.harness import vllm_env
from tests.harness.daemon import Daemon
from tests.harness.forks import Command, Forks
from tests.harness.http_read import read
from tests.harness.vllm_run import transfer


class VllmApi(Daemon):
    """One endpoint. `extra` is the connector's extra config, None for no connector.

    `state` is a folder for the log and for vLLM's files.  The models have no tokenizer, so prompts are token ids,
    unless `tokenizer` is the folder of one.
    """

    ready_s = 600.0
    fork_server: ClassVar[Forks | None] = None
    """Forks the servers, which saves each of them importing vLLM; None: they are started the usual way."""

    def __init__(
        self,
        model: Path,
        state: Path,
        *,
        extra: dict[str, Any] | None,
        flags: Sequence[str] = (),
        tokenizer: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        state.mkdir(parents=True, exist_ok=True)
        self._state, self._model, self._environment = state, str(model), environment or {}
        self._arguments = ["--model", str(model), "--enforce-eager", *flags]
        self._arguments += ["--tokenizer", str(tokenizer)] if tokenizer else ["--skip-tokenizer-init"]
        if extra is not None:
            self._arguments += ["--kv-transfer-config", json.dumps(transfer(extra))]
        super().__init__(state / "vllm-api.log", 1)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        module = [str(vllm_env.ensure()), "-m", "vllm.entrypoints.openai.api_server"]
        return [*module, *where, *self._arguments], {**vllm_env.environment(self._state), **self._environment}

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str] | None, log: int
    ) -> subprocess.Popen[bytes] | Command:
        if self.fork_server is None:
            return super()._run(command, environment, log)
        assert environment is not None
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), log, log)
            return self.fork_server.start(command[2:], environment, streams, folder=self._state)

    def _answers(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def get(self, path: str) -> str:
        return read(f"{self.url}{path}", token="", timeout_s=60.0).decode()

    def complete(self, prompt: Sequence[int], **more: Any) -> tuple[str, list[int]]:
        """The id of a completion with these fields, and its token ids."""
        body = {"model": self._model, "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
        answer = json.loads(
            read(f"{self.url}/v1/completions", body={**body, "ignore_eos": True}, token="", timeout_s=240.0)
        )
        return answer["id"], answer["choices"][0]["token_ids"]

    def kill(self) -> None:
        """Kill the server and every process that it started. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().kill()
