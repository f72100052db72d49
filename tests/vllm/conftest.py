"""Real vLLM and a real server: what the tests of this folder share. One vLLM process serves many tests."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.harness import vllm_env
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_api import VllmApi
from tests.harness.vllm_run import VllmForks, VllmProcess
from tests.tools.provision import ROOT

CHUNK = 256
BLOCK = 128
PATIENCE_S = 120.0
EXACT = "float32"
"""A hit, a batch or a preempted request is computed in other shapes than a prompt alone; in bf16 that would change a
token now and then, as it does with vLLM's own prefix cache."""
OPTIONS = {
    "dtype": EXACT,
    "max_num_batched_tokens": 1024,
    "max_model_len": 4096,
    "num_gpu_blocks_override": 96,  # vLLM would zero a gigabyte
}
"""Of an `LLM`."""
API_FLAGS = ("--dtype", EXACT, "--max-model-len", "4096", "--num-gpu-blocks-override", "96")
"""Of vLLM's server."""


def make_prompt(seed: int, tokens: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    draw = random.Random(seed)
    return [draw.randrange(3, 32_000) for _ in range(tokens)]


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; fails the test when none comes in its time and in three tries."""
    deadline_s = time.monotonic() + PATIENCE_S
    tries = 0
    while True:
        value = condition()
        if value:
            return value
        tries += 1
        assert tries < 3 or time.monotonic() < deadline_s, f"{what} did not happen within {PATIENCE_S:.0f} s"
        time.sleep(0.02)


def whole_blocks(tokens: int) -> int:
    """The tokens of the whole blocks of a prompt, which a hit reaches."""
    return tokens // BLOCK * BLOCK


def records_of(tokens: int) -> int:
    """The records of a prompt: its chunks, and its tail."""
    return tokens // CHUNK + (tokens % CHUNK >= BLOCK)


def chunks_in_l1(server: ServerProcess) -> int:
    """Number of chunks that can be hit, and of tails."""
    return int(server.get("/v1/status")["pool"]["entries"]["ready"])


class Rig:
    """A server and an in-process vLLM that uses it; as a context it ends the engine."""

    seeds = itertools.count(1000)
    """One sequence for all rigs, since engines of one model that share a server hit each other's prompts."""

    def __init__(self, server: ServerProcess, vllm: VllmProcess) -> None:
        self.server, self.vllm = server, vllm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.vllm.close()

    def fresh_prompt(self, tokens: int) -> list[int]:
        return make_prompt(next(self.seeds), tokens)

    def stored(self, prompt: list[int], **arguments: Any) -> dict[str, Any]:
        """Generate from a prompt that is new, and wait until its chunks are in L1; the result."""
        wanted = chunks_in_l1(self.server) + records_of(len(prompt))
        result = self.vllm.generate(prompt, **arguments)
        self.until_stored(wanted)
        return result

    def until_stored(self, wanted: int) -> None:
        until(lambda: chunks_in_l1(self.server) >= wanted, "storing all chunks")
        self.vllm.ask("idle_steps", n=2)

    def again(self, prompt: list[int], **arguments: Any) -> dict[str, Any]:
        """Generate with vLLM's own prefix cache emptied."""
        until(self.forget, "letting all blocks go")
        return self.vllm.generate(prompt, **arguments)

    def forget(self, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache, and `connector` with it; False while a block is still held."""
        self.vllm.ask("idle_steps", n=1)
        return bool(self.vllm.ask("reset_prefix_cache", connector=connector))

    def settle(self) -> None:
        """Wait until all stores have an outcome and no lease is left, then empty vLLM's own prefix cache."""
        until(self._stores_ended, "the end of all stores")
        until(lambda: self.server.get("/v1/status")["pool"]["leased_bytes"] == 0, "giving all leases back")
        until(self.forget, "letting all blocks go")

    def _stores_ended(self) -> bool:
        self.vllm.ask("idle_steps", n=1)  # vLLM hears of ends in steps
        return not self.vllm.ask("stores")["in_flight"]

    def full_hit(self, prompt: list[int], tokens: int, **arguments: Any) -> dict[str, Any] | None:
        """The result if so many tokens hit, else None."""
        result = self.again(prompt, **arguments)
        return result if result["cached_tokens"] == tokens else None

    def connected(self) -> bool:
        return bool(self.vllm.ask("connected"))


def rig_of(
    server: ServerProcess,
    model: Path,
    folder: Path,
    extra: dict[str, Any] | None = None,
    *,
    attached: bool = True,
    **options: Any,
) -> Rig:
    """Start an engine of `server` with these changes of `OPTIONS`; `extra` goes into the connector's extra config.

    With `attached` the server runs, and the engine is ready to use it.
    """
    extra = server.connector_config(**(extra or {}))
    rig = Rig(server, VllmProcess(model, folder, extra=extra, options=OPTIONS | options))
    try:
        if attached:
            until(rig.connected, "attaching")
            rig.vllm.generate([5, 6, 7])  # the first request waits for the worker's report of its weights
    except BaseException:
        rig.vllm.close()
        raise
    return rig


def run_in_vllm(folder: Path, *command: str, text: str = "", status: int | None = 0) -> str:
    """Run `python -m` with this module and its arguments in vLLM's environment; return what it prints.

    `status` is the exit status that it must have; None: any.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variables = vllm_env.environment(folder)
    variables["PYTHONPATH"] += f":{ROOT}"
    assert VllmProcess.fork_server is not None
    ended = VllmProcess.fork_server.run(command, variables, folder=folder, text=text)
    assert status in (None, ended.returncode), ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture(scope="session", autouse=True)
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines are forked by a process that has imported vLLM; each computes with one thread.

    These models are so small that a second thread only waits, and a waiting OpenMP thread spins.
    """
    server = VllmForks(tmp_path_factory.mktemp("forks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # compiling would take longer than it saves
        patch.setattr(VllmProcess, "fork_server", server)
        patch.setattr(VllmApi, "fork_server", server)
        yield
    server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> Iterator[ServerProcess]:
    """A running server without L2."""
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=192).started() as process:
        yield process


@pytest.fixture(scope="module")
def small_model(vllm_model_folder: Callable[[str], Path]) -> Path:
    """Four layers, 2 KiB of KV a token: 512 KiB a chunk."""
    return vllm_model_folder("19m")


@pytest.fixture(scope="module")
def rig(server: ServerProcess, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine that prefills in pieces of 512 tokens."""
    with rig_of(server, small_model, tmp_path_factory.mktemp("vllm"), max_num_batched_tokens=512) as rig:
        yield rig
