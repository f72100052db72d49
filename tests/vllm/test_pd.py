"""One real vLLM prefills for another: tokens are those of an engine alone, whatever happens to the prefilling one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.observability.load_line import LEAST_BATCHES
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_model import dtype_of, ensure_model
from tests.harness.vllm_run import VllmProcess
from tests.vllm.conftest import CHUNK, OPTIONS, Rig, chunks_in_l1, make_prompt, rig_of, until

pytestmark = pytest.mark.vllm

TOKENS = 2_000
STEP = 512
WAITS = {"kvstrata.wait_ms": 60_000}
ALONE = {"lmcache.skip_load": True, "lmcache.max_offload_tokens": 0}


def rig_in(folder: Path, server: ServerProcess, model: Path) -> Rig:
    return rig_of(server, model, folder, max_num_batched_tokens=STEP)


@pytest.fixture(scope="module")
def both(
    server: ServerProcess, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Rig, Rig]]:
    """A prefilling and a decoding engine."""
    folder = tmp_path_factory.mktemp("pd")
    with contextlib.ExitStack() as stack:
        prefilling, decoding = (
            stack.enter_context(rig_in(folder / name, server, small_model)) for name in ("p", "d")
        )
        yield prefilling, decoding


@pytest.fixture
def another(server: ServerProcess, small_model: Path, tmp_path: Path) -> Iterator[Rig]:
    """A prefilling engine that may be killed."""
    with rig_in(tmp_path / "vllm", server, small_model) as rig:
        yield rig


def promises(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v1/status")["promises"]
    return found


def begin(decoding: Rig, prompt: list[int]) -> None:
    """Send the decoding engine a prompt that another one is said to compute, and see it wait."""
    decoding.vllm.send("generate", prompts=[prompt], transfer=WAITS)
    until(lambda: promises(decoding.server)["waits_now"], "waiting for the prefill")


def ended(decoding: Rig, prompt: list[int], prefilling: Rig | None) -> int:
    """The cached tokens of the decoding engine's answer, which is that of an engine alone; nothing is left."""
    [answer] = decoding.vllm.result()
    alone = decoding.again(prompt, transfer=ALONE)
    assert (alone["cached_tokens"], alone["tokens"]) == (0, answer["tokens"])
    for rig in (decoding, prefilling):
        if rig is not None:
            rig.settle()
    left = promises(decoding.server)
    assert (left["live"], left["waits_now"]) == (0, 0)
    return int(answer["cached_tokens"])


def test_the_decoding_engine_loads_what_the_other_computes_for_it(both):
    rig, decoding = both
    for order in ("decoding first", "prefilling first"):
        prompt = rig.fresh_prompt(TOKENS)
        if order == "prefilling first":
            rig.vllm.ask("submit", prompt=prompt, max_tokens=1)
            rig.vllm.ask("step")
        begin(decoding, prompt)
        if order == "decoding first":
            rig.vllm.generate(prompt, max_tokens=1)
        else:
            rig.vllm.ask("step", n=100)
            rig.vllm.ask("idle_steps", n=2)
        until(
            lambda: rig.vllm.ask("idle_steps", n=1) or not promises(rig.server)["live"], "the promise's end"
        )
        assert ended(decoding, prompt, rig) >= TOKENS // CHUNK * CHUNK, order


@pytest.mark.long
def test_blocks_are_filled_in_parts_while_the_last_chunks_are_computed(both):
    rig, decoding = both
    for _ in range(LEAST_BATCHES + 4):
        prompt = rig.fresh_prompt(TOKENS)
        begin(decoding, prompt)
        rig.vllm.generate(prompt, max_tokens=1)
        until(lambda: rig.vllm.ask("idle_steps", n=1) or not promises(rig.server)["live"], "its end")
        assert ended(decoding, prompt, rig) >= TOKENS // CHUNK * CHUNK
    assert promises(rig.server)["waits"]["soon"] > 0


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "aborted"])
def test_the_rest_is_computed_when_the_prefilling_engine_gives_up(both, another, how):
    _, decoding = both
    prompt = another.fresh_prompt(TOKENS)
    request = another.vllm.ask("submit", prompt=prompt, max_tokens=1)
    another.vllm.ask("step")
    begin(decoding, prompt)
    another.vllm.ask("step")
    if how == "killed":
        another.vllm.close()
    else:
        another.vllm.ask("abort", request=request)
        until(lambda: another.vllm.ask("idle_steps", n=1) or not promises(another.server)["live"], "its end")
    cached = ended(decoding, prompt, None if how == "killed" else another)
    assert cached % CHUNK == 0  # of a request that held blocks for the rest, vLLM counts the rest too
    assert promises(decoding.server)["waits"]["broken"] > 0


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "llama4", "qwen3-next"])
def test_windows_and_states_of_the_prompts_end_are_waited_for_too(family, tmp_path):
    """The last prompt ends with a chunk, so the other engine asks for one chunk less than is promised."""
    options = {"max_num_batched_tokens": 512, "dtype": dtype_of(family), "num_gpu_blocks_override": 160}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(tmp_path / "server", l1_mb=512).started())
        decoding, rig = (  # an engine that is alone promises nothing
            stack.enter_context(rig_of(server, ensure_model(family), tmp_path / name, **options))
            for name in ("d", "p")
        )
        for tokens in (TOKENS, TOKENS + 300, TOKENS // CHUNK * CHUNK):
            prompt = rig.fresh_prompt(tokens)
            before = promises(server)["waits"].get("ready", 0)
            begin(decoding, prompt)
            rig.vllm.generate(prompt, max_tokens=1)
            until(
                lambda: rig.vllm.ask("idle_steps", n=1) or not promises(server)["live"], "the promise's end"
            )
            assert ended(decoding, prompt, rig) == (tokens - 1) // CHUNK * CHUNK
            assert promises(server)["waits"]["ready"] == before + 1


@pytest.mark.long
def test_all_workers_of_a_tensor_parallel_engine_keep_its_promises(server, small_model, tmp_path):
    options = OPTIONS | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    prompt, there = make_prompt(7_003, TOKENS), len(server.get("/v1/status")["engines"])
    with contextlib.ExitStack() as stack:
        prefilling, decoding = (
            stack.enter_context(
                VllmProcess(
                    small_model, tmp_path / name, extra=server.connector_config(), processes=True,
                    options=options | {"max_num_batched_tokens": STEP},
                )
            )
            for name in ("p", "d")
        )  # fmt: skip
        until(lambda: len(server.get("/v1/status")["engines"]) >= there + 2, "attaching")
        for one in (prefilling, decoding):
            one.generate([5, 6, 7])
        before = chunks_in_l1(server)
        decoding.send("generate", prompts=[prompt], transfer=WAITS)
        until(lambda: promises(server)["waits_now"], "waiting for the prefill")
        prefilling.generate(prompt, max_tokens=1)
        [answer] = decoding.result()
        assert answer["cached_tokens"] >= TOKENS // CHUNK * CHUNK
        assert chunks_in_l1(server) >= before + TOKENS // CHUNK
        assert answer["tokens"] == decoding.generate(prompt, transfer=ALONE, salt="alone")["tokens"]
