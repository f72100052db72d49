"""Real vLLM and a real server: what the tests of this folder share. One vLLM process serves many tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.types import MissReason
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_api import VllmApi
from tests.harness.vllm_fork import ForkServer
from tests.harness.vllm_run import VllmProcess

CHUNK = 256
BLOCK = 128
PATIENCE_S = 120.0
EXACT = "float32"
"""A hit, a batch or a preempted request is computed in other shapes than a prompt alone; in bf16 that would change a
token now and then, as it does with vLLM's own prefix cache."""


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


def unanswered(vllm: VllmProcess) -> float:
    """How many lookups the engine gave up because the server was silent, as its metrics name them.

    The engine has the option `disable_log_stats` False.
    """
    counted = vllm.ask("metrics")
    return sum(counted[f"miss_{reason}"] for reason in (MissReason.DEADLINE, MissReason.BREAKER_OPEN))


def stores_given_up(vllm: VllmProcess) -> float:
    """How many chunks the engine has not stored because its server was silent; see `unanswered`.

    vLLM publishes its counts with its steps only, so this answers a short prompt first.
    """
    vllm.generate([7] * 8)
    counted = vllm.ask("metrics")
    return sum(counted[f"store_{outcome}_chunks"] for outcome in ("unavailable", "failed"))


class Rig:
    """A server and an in-process vLLM that uses it."""

    def __init__(self, server: ServerProcess, vllm: VllmProcess) -> None:
        self.server, self.vllm = server, vllm
        self.seeds = iter(range(1000, 10_000_000))

    def fresh_prompt(self, tokens: int) -> list[int]:
        return make_prompt(next(self.seeds), tokens)

    def stored(self, prompt: list[int], **arguments: Any) -> dict[str, Any]:
        """Generate from a prompt that is new, and wait until its chunks are in L1; the result.

        On a busy machine the server may be silent for long enough that the engine gives a store up, and counts it;
        then the prompt is computed and stored again.
        """
        wanted, given_up = chunks_in_l1(self.server) + records_of(len(prompt)), self.given_up()
        result = self.vllm.generate(prompt, **arguments)
        self.until_stored(wanted, given_up, lambda: self.again(prompt, **arguments))
        return result

    def until_stored(self, wanted: int, given_up: int, again: Callable[[], object]) -> None:
        """Wait until L1 holds `wanted` chunks; call `again` when the engine gives up more stores than `given_up`."""

        def there() -> bool:
            nonlocal given_up
            if chunks_in_l1(self.server) >= wanted:
                return True
            if self.given_up() > given_up:
                given_up = self.given_up()
                again()
            return False

        until(there, "storing all chunks")
        self.vllm.ask("idle_steps", n=2)

    def given_up(self) -> int:
        """How many chunks the engine has not stored because its server was silent."""
        counts = self.vllm.ask("client")["worker"]
        return sum(counts.get(f"store_{outcome}_chunks", 0) for outcome in ("unavailable", "failed"))

    def again(self, prompt: list[int], **arguments: Any) -> dict[str, Any]:
        """Generate with vLLM's own prefix cache emptied."""
        until(self.forget, "letting all blocks go")
        return self.vllm.generate(prompt, **arguments)

    def forget(self) -> bool:
        """Empty vLLM's own prefix cache; False while a block is still held."""
        self.vllm.ask("idle_steps", n=1)
        return bool(self.vllm.ask("reset_prefix_cache"))


@pytest.fixture(scope="session", autouse=True)
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines are forked by a process that has imported vLLM; each computes with one thread.

    These models are so small that a second thread only waits, and a waiting OpenMP thread spins.
    """
    server = ForkServer(tmp_path_factory.mktemp("forks"))
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
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=192) as process:
        process.start()
        yield process


@pytest.fixture(scope="module")
def small_model(vllm_model_folder: Callable[[str], Path]) -> Path:
    """Four layers, 2 KiB of KV a token: 512 KiB a chunk."""
    return vllm_model_folder("19m")


@pytest.fixture(scope="module")
def rig(server: ServerProcess, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine that prefills in pieces of 512 tokens."""
    with VllmProcess(
        small_model,
        tmp_path_factory.mktemp("vllm"),
        extra=server.connector_config(),
        options={"dtype": EXACT, "max_num_batched_tokens": 512, "max_model_len": 8192},
    ) as vllm:
        yield Rig(server, vllm)
