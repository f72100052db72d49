"""The main job with real vLLM: a prompt is computed once, and all tokens are the same as without kvstrata."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import BLOCK, chunks_in_l1, records_of, until

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("tokens", "hit"),
    [
        (1_000, 896),  # three chunks and a tail of one block
        (1_024, 1_023),  # the whole prompt: one token is computed
        (300, 256),
        (256, 255),
        (255, 128),
        (128, 127),
        (127, 0),
        (3_000, 2_944),  # prefilled in pieces
    ],
)
def test_a_prompt_is_stored_and_hit_and_its_answer_has_the_same_tokens(rig, tokens, hit):
    prompt = rig.fresh_prompt(tokens)
    cold = rig.stored(prompt)
    assert cold["cached_tokens"] == 0
    warm = rig.again(prompt)
    assert (warm["cached_tokens"], warm["tokens"]) == (hit, cold["tokens"])


def test_a_hit_continues_the_prefix_in_vllms_own_cache(rig):
    prompt = rig.fresh_prompt(1_500)
    cold = rig.stored(prompt)
    until(rig.forget, "letting all blocks go")
    # Half of the first chunk comes from vLLM, the rest of it and the others from us.
    rig.vllm.generate(prompt[: BLOCK + 40], max_tokens=1)
    warm = rig.vllm.generate(prompt)
    assert (warm["cached_tokens"], warm["tokens"]) == (1_408, cold["tokens"])


def test_a_longer_prompt_hits_the_shared_part_and_stores_the_rest(rig):
    prompt = rig.fresh_prompt(2_000)
    rig.stored(prompt[:1_100])
    before = chunks_in_l1(rig.server)
    first = rig.again(prompt)
    assert first["cached_tokens"] == 1_024
    until(lambda: chunks_in_l1(rig.server) == before + 4, "storing the new chunks and the tail")
    second = rig.again(prompt)
    assert (second["cached_tokens"], second["tokens"]) == (1_920, first["tokens"])


def test_a_request_bounds_what_is_loaded_and_the_server_hears_how_fast_the_engine_computes(rig):
    prompt = rig.fresh_prompt(3_000)
    cold = rig.stored(prompt)
    warm = rig.again(prompt, transfer={"max_load_tokens": 1_000})
    assert (warm["cached_tokens"], warm["tokens"]) == (768, cold["tokens"])
    for _ in range(3):
        rig.stored(rig.fresh_prompt(1_500))
    until(lambda: rig.server.get("/v1/status")["engines"][0]["prompt_tokens_s"] > 0, "a ping tells it")


def test_simultaneous_requests_hit_and_give_the_same_tokens(rig):
    prompts = [rig.fresh_prompt(n) for n in (700, 1_300, 256, 2_048, 900)]
    wanted = chunks_in_l1(rig.server) + sum(records_of(len(p)) for p in prompts)
    cold = rig.vllm.ask("generate", prompts=prompts)
    rig.until_stored(wanted)
    assert chunks_in_l1(rig.server) == wanted
    until(rig.forget, "letting all blocks go")
    warm = rig.vllm.ask("generate", prompts=prompts)
    assert [r["tokens"] for r in warm] == [r["tokens"] for r in cold]
    assert [r["cached_tokens"] for r in warm] == [640, 1_280, 255, 2_047, 896]


def test_requests_for_prompt_logprobs_load_nothing(rig):
    prompt = rig.fresh_prompt(600)
    cold = rig.stored(prompt)
    full = rig.again(prompt, logprobs=1)
    assert (full["cached_tokens"], full["tokens"]) == (0, cold["tokens"])


def test_abort_in_prefill_while_waiting_and_after_a_hit_leaks_nothing(rig):
    prompt = rig.fresh_prompt(3_000)
    request = rig.vllm.ask("submit", prompt=prompt)
    rig.vllm.ask("step", n=2)
    rig.vllm.ask("abort", request=request)
    known = rig.fresh_prompt(2_000)
    cold = rig.stored(known)
    until(rig.forget, "letting all blocks go")
    waiting = rig.vllm.ask("submit", prompt=known)
    rig.vllm.ask("abort", request=waiting)
    running = rig.vllm.ask("submit", prompt=known)
    rig.vllm.ask("step", n=1)
    rig.vllm.ask("abort", request=running)
    warm = rig.again(known)
    assert (warm["cached_tokens"], warm["tokens"]) == (1_920, cold["tokens"])
    rig.settle()


def test_vllm_can_reset_its_cache_after_requests_of_one_token_without_a_further_step(rig):
    prompts = [rig.fresh_prompt(n) for n in (1_000, 600, 300)]
    rig.vllm.ask("generate", prompts=prompts, max_tokens=1)
    assert rig.vllm.ask("reset_prefix_cache")
    rig.settle()
    assert rig.again(prompts[0])["cached_tokens"] == 896


def test_kv_of_requests_that_run_during_a_reset_is_not_stored(rig):
    rig.vllm.generate(
        [5, 6, 7]
    )  # the first request after a reset waits for the workers' report of their weights
    prompt = rig.fresh_prompt(3_000)
    before = chunks_in_l1(rig.server)
    rig.vllm.ask("submit", prompt=prompt)
    rig.vllm.ask("step", n=2)
    until(lambda: chunks_in_l1(rig.server) == before + 4, "storing what two steps computed")
    rig.vllm.ask("change_weights", factor=2.0)
    assert not rig.vllm.ask("reset_prefix_cache", connector=True), "running requests hold blocks"
    assert rig.vllm.ask("step", n=100)
    # vLLM's own cache has kept the old blocks and offers them to the next request.
    follower = rig.vllm.generate(prompt + rig.fresh_prompt(300))
    assert follower["cached_tokens"] > 2_500
    other = rig.fresh_prompt(600)
    rig.vllm.generate(other)
    # Stores are made in order: stores of the two requests would have been made before this one.
    until(lambda: chunks_in_l1(rig.server) >= before + 6, "storing what rests on nothing old")
    assert chunks_in_l1(rig.server) == before + 6
    assert rig.again(prompt)["cached_tokens"] == 0
    assert rig.again(other)["cached_tokens"] == 512

    rig.vllm.ask("change_weights", factor=2.0)
    until(lambda: rig.forget(connector=True), "emptying both caches")
    cold = rig.stored(prompt)
    assert cold["cached_tokens"] == 0
    warm = rig.again(prompt)
    assert (warm["cached_tokens"], warm["tokens"]) == (2_944, cold["tokens"])
    # What vLLM itself has now is new, and so is what rests on it.
    before = chunks_in_l1(rig.server)
    assert rig.vllm.generate(prompt + rig.fresh_prompt(300))["cached_tokens"] > 2_500
    until(lambda: chunks_in_l1(rig.server) == before + 1, "storing the rest of a longer prompt")

    # With the weights of the start it finds what it stored with them.
    rig.vllm.ask("change_weights", factor=0.25)
    assert rig.again(prompt)["cached_tokens"] == 1_024
