"""A prefilling and a decoding vLLM while one of them, or their server, is killed or stopped: tokens are those of an
engine alone, every wait ends, and nothing is held afterwards.  `PD_REQUESTS=1000` tries so many requests.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import amount
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmFailed
from tests.vllm.conftest import Rig, chunks_in_l1, make_prompt, rig_of, until

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(7_200)]

REQUESTS = int(os.environ.get("PD_REQUESTS", "40"))
WAIT_MS, STOPPED_S = 5_000, 1.0
ALONE = {"lmcache.skip_load": True, "lmcache.max_offload_tokens": 0}


class Fleet:
    """A server, and two engines that are replaced when they were killed."""

    def __init__(self, server: ServerProcess, model: Path, folder: Path, stack: contextlib.ExitStack) -> None:
        self.server, self._model, self._folder, self._stack = server, model, folder, stack
        self._started = 0
        self.prefill, self.decode = self.engine(), self.engine()

    def engine(self) -> Rig:
        self._started += 1
        folder = self._folder / f"{self._started}"
        return self._stack.enter_context(rig_of(self.server, self._model, folder, max_num_batched_tokens=256))

    def promises(self) -> Any:
        return self.server.get("/v1/status")["promises"]

    def replace_dead(self, killed: str) -> None:
        if killed == "server":
            self.server.start()
            for rig in (self.prefill, self.decode):
                until(lambda rig=rig: rig.vllm.ask("idle_steps", n=1) or rig.connected(), "attaching again")
        elif killed == "prefill":
            self.prefill = self.engine()
        elif killed == "decode":
            self.decode = self.engine()

    def ends_well(self) -> None:
        """Nobody promises, waits or holds anything."""
        for rig in (self.prefill, self.decode):
            rig.settle()
        left = self.promises()
        assert (left["live"], left["waits_now"]) == (0, 0)


@pytest.fixture
def fleet(small_model: Path, tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(tmp_path / "server", l1_mb=192).started())
        yield Fleet(server, small_model, tmp_path, stack)


def test_tokens_are_right_whoever_is_killed_or_stopped_at_any_moment(fleet: Fleet) -> None:
    seed = amount.seed()
    draw, told = random.Random(seed), []
    for number in range(REQUESTS):
        who = draw.choice(["", "", "prefill", "decode", "server"])
        how = draw.choice(["killed", "stopped", "stopped"]) if who else ""
        when = draw.choice(["promised", "half stored", "half loaded", "complete"])
        prompt = make_prompt(1_000 * seed + number, draw.randrange(500, 2_000))
        told.append(f"{number}: {who} {how} {when}")
        answer = one(fleet, prompt, who, how, when)
        if answer is not None:
            alone = fleet.prefill.again(prompt, transfer=ALONE)
            assert answer["tokens"] == alone["tokens"], told[-5:]
        if how == "killed" or number == REQUESTS - 1:
            fleet.ends_well()


def one(fleet: Fleet, prompt: list[int], who: str, how: str, when: str) -> dict[str, Any] | None:
    """The decoding engine's answer to a prompt that the other one computes; None if it was killed."""
    stored, soon = chunks_in_l1(fleet.server), fleet.promises()["waits"].get("soon", 0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        transfer = {"kvstrata.wait_ms": WAIT_MS}
        decoding = pool.submit(fleet.decode.vllm.generate, prompt, transfer=transfer)
        computing = pool.submit(fleet.prefill.vllm.generate, prompt, max_tokens=1)
        reached: dict[str, Callable[[], Any]] = {
            "promised": lambda: fleet.promises()["live"],
            "half stored": lambda: chunks_in_l1(fleet.server) > stored,
            "half loaded": lambda: fleet.promises()["waits"].get("soon", 0) > soon,
            "complete": computing.done,
        }
        if who:
            until(lambda: reached[when]() or computing.done() or decoding.done(), when)
            strike(fleet, who, how)
        answer = None
        if (who, how) == ("decode", "killed"):
            decoding.exception()
        else:
            answer = decoding.result(120)
        try:
            computing.result(120)
        except (VllmFailed, OSError):
            assert (who, how) == ("prefill", "killed")
    if how == "killed":
        fleet.replace_dead(who)
    return answer


def strike(fleet: Fleet, who: str, how: str) -> None:
    if who == "server":
        if how == "killed":
            fleet.server.kill()
            return
        with fleet.server.frozen():
            time.sleep(STOPPED_S)
        return
    rig = fleet.prefill if who == "prefill" else fleet.decode
    if how == "killed":
        rig.vllm.close()
        return
    os.killpg(rig.vllm.pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.killpg(rig.vllm.pid, signal.SIGCONT)
