"""Late stores with real vLLM: L1 gets what vLLM's own cache loses, and never wrong KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.server_process import ServerProcess
from tests.vllm.conftest import Rig, chunks_in_l1, records_of, rig_of, until

pytestmark = pytest.mark.vllm

BLOCKS = 40
"""vLLM's own cache holds three of the prompts, 20 MB."""
TOKENS = 1_400
WHOLE = 1_280


@pytest.fixture(scope="module")
def rig(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("late")
    options = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 256}
    with ServerProcess(folder / "server", l1_mb=32) as server:
        server.start()
        with rig_of(server, small_model, folder / "vllm", {"kvstrata.store": "auto"}, **options) as rig:
            until(
                lambda: rig.vllm.ask("late")["on"], "hearing that L1 is smaller than twice the engine's cache"
            )
            yield rig


@pytest.fixture
def answers(rig) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """The answers of new prompts, computed one after another. Afterwards each still has its answer, however it hits."""
    prompts = [rig.fresh_prompt(TOKENS) for _ in range(4)]
    found = {tuple(prompt): rig.vllm.generate(prompt)["tokens"] for prompt in prompts}
    yield found
    for prompt, tokens in found.items():
        assert rig.vllm.generate(list(prompt))["tokens"] == tokens
    rig.settle()


def test_what_left_vllms_cache_hits_and_what_it_has_is_not_copied(rig, answers):
    first, *_, last = map(list, answers)
    rig.vllm.ask("idle_steps", n=2)
    assert 0 < chunks_in_l1(rig.server) < 3 * records_of(TOKENS), "the newest prompts are not in L1"
    warm = rig.vllm.generate(first)
    assert warm["cached_tokens"] >= WHOLE and warm["tokens"] == answers[tuple(first)]
    assert rig.vllm.generate(last)["tokens"] == answers[tuple(last)]


def test_no_block_is_kept_for_a_store(rig, answers):
    assert rig.vllm.ask("reset_prefix_cache"), "vLLM resets its cache at once"


@pytest.mark.parametrize("how", ["killed", pytest.param("frozen", marks=pytest.mark.long)])
def test_a_server_that_is_away_costs_only_hits(rig, answers, how):
    rig.vllm.ask("submit", prompt=rig.fresh_prompt(TOKENS))
    rig.vllm.ask("step", n=3)  # takes blocks of the oldest prompt, whose stores are under way
    rig.server.kill() if how == "killed" else rig.server.freeze()
    while not rig.vllm.ask("step", n=4):
        pass
    for prompt, tokens in answers.items():
        assert rig.vllm.generate(list(prompt))["tokens"] == tokens
    rig.server.start() if how == "killed" else rig.server.thaw()
    until(rig.connected, "attaching again")


def test_preempted_and_aborted_requests_change_no_answer(rig, answers):
    prompts = [list(prompt) for prompt in answers]
    rig.vllm.ask("preemptions")
    names = [rig.vllm.ask("submit", prompt=prompt, max_tokens=280) for prompt in prompts]
    done = rig.vllm.ask("step", n=60)
    rig.vllm.ask("abort", request=names[0])
    for _ in range(600):
        if len(done) >= len(names) - 1:
            break
        done += rig.vllm.ask("step", n=20)
    assert rig.vllm.ask("preemptions") > 0, "there were enough blocks to test nothing"
    for one in done:
        prompt = prompts[names.index(one["request"])]
        assert one["tokens"][:16] == answers[tuple(prompt)]


def test_a_drain_stores_what_vllm_has(rig, answers):
    last = list(answers)[-1]
    rig.vllm.generate([5, 6, 7], transfer={"kvstrata.drain": True})

    def drained() -> bool:
        rig.vllm.ask("idle_steps", n=1)
        return not rig.vllm.ask("late")["draining"]

    until(drained, "storing the whole cache")
    warm = rig.again(list(last))
    assert warm["cached_tokens"] >= WHOLE and warm["tokens"] == answers[last]
