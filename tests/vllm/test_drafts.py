"""Speculative decoding with a draft that keeps KV: a hit costs no acceptance, whatever follows the chunks that it has.

The draft imitates the model, and chunks are small, so one position of the draft's KV that belongs to another token
shows in the number of accepted tokens.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import vllm_model
from tests.harness.server_process import ServerProcess
from tests.vllm.conftest import Rig, rig_of

pytestmark = [pytest.mark.vllm, pytest.mark.long]

BLOCK, CHUNK = 32, 64
ANSWER_TOKENS = 32
LENGTHS = (200, 230, 255, 256, 258, 300)
"""None leaves a single token: vLLM pads it with placeholders, and counts these as drafted."""


def answered(rig: Rig, prompts: list[list[int]], salt: str | None = None) -> tuple[list[Any], list[int]]:
    """For each prompt tokens, drafts and accepted tokens; and the tokens that hit."""
    seen, hits = [], []
    for prompt in prompts:
        rig.vllm.ask("drafts")
        answer = rig.vllm.generate(prompt, max_tokens=ANSWER_TOKENS, salt=salt)
        seen.append((answer["tokens"], rig.vllm.ask("drafts")))
        hits.append(answer["cached_tokens"])
    rig.settle()
    return seen, hits


@contextlib.contextmanager
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Rig]]:
    """Two processes with the same model and draft."""
    options = {
        "max_model_len": 1_024,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 256,
        "disable_log_stats": False,
        "speculative_config": {
            "method": "eagle",
            "model": str(model / vllm_model.DRAFT),
            "num_speculative_tokens": 3,
        },
    }
    extra = {"kvstrata.chunk_size": CHUNK}
    folder = tmp_path_factory.mktemp("drafts")
    with ServerProcess(folder / "server", l1_mb=96, chunk_tokens=CHUNK) as server:
        server.start()
        with (
            rig_of(server, model, folder / "first", extra, **options) as first,
            rig_of(server, model, folder / "second", extra, **options) as second,
        ):
            yield first, second


@pytest.fixture(scope="module")
def engines_of_one_server(vllm_model_folder, tmp_path_factory) -> Iterator[tuple[Rig, Rig]]:
    with engines(vllm_model_folder(vllm_model.DRAFTED), tmp_path_factory) as both:
        yield both


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, vllm_model.VOCABULARY) for _ in range(count)]


def test_a_hit_from_another_process_has_the_tokens_and_the_acceptance_of_a_cold_prompt(engines_of_one_server):
    first, second = engines_of_one_server
    draw = random.Random(1)
    prompts = [tokens(draw, length) for length in LENGTHS]
    cold, hits = answered(first, prompts)
    assert hits == [0] * len(prompts)
    accepted = sum(drafts["accepted_tokens"] for _, drafts in cold)
    drafted = sum(drafts["draft_tokens"] for _, drafts in cold)
    assert accepted > 0.8 * drafted, "the draft imitates the model"
    warm, hits = answered(second, prompts)
    assert warm == cold
    # The record that ends with a prompt of 256 tokens has the sampled token in its key.
    assert hits == [192, 224, 224, 224, 256, 288]


def test_a_record_in_front_of_another_token_is_not_served(engines_of_one_server):
    first, second = engines_of_one_server
    draw = random.Random(2)
    shared = [tokens(draw, chunks * CHUNK) for chunks in (2, 3, 3, 4)]
    branches = [prompt + tokens(draw, 20) for prompt in shared]
    cold, _ = answered(second, branches, salt="cold")
    answered(first, [prompt + tokens(draw, 20) for prompt in shared])
    # Whatever is hit of the other continuation, the draft must not attend to its next token.
    warm, hits_of_others = answered(second, branches)
    assert warm == cold
    again, hits = answered(first, branches)
    assert again == cold
    assert hits_of_others == [len(prompt) - CHUNK for prompt in shared]
    assert hits == [len(prompt) for prompt in shared]


def test_windows_beside_a_draft_with_full_attention_cost_neither_tokens_nor_acceptance(
    vllm_model_folder: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model keeps its last 100 tokens only, so it and its draft are two groups."""
    model = tmp_path / "model"
    shutil.copytree(vllm_model_folder(vllm_model.DRAFTED), model)
    described = json.loads((model / "config.json").read_text())
    described |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100}
    (model / "config.json").write_text(json.dumps(described))
    draw = random.Random(3)
    with engines(model, tmp_path_factory) as (first, second):
        prompts = [tokens(draw, length) for length in LENGTHS]
        cold, _ = answered(first, prompts)
        warm, hits = answered(second, prompts)
        assert warm == cold
        assert hits == [192, 192, 192, 192, 256, 256]
        shared = [tokens(draw, chunks * CHUNK) for chunks in (2, 3, 4)]
        branches = [prompt + tokens(draw, 20) for prompt in shared]
        cold, _ = answered(second, branches, salt="cold")
        answered(first, [prompt + tokens(draw, 20) for prompt in shared])
        warm, hits = answered(second, branches)
        assert warm == cold
        beyond = [hit >= len(prompt) for hit, prompt in zip(hits, shared, strict=True)]
        assert not any(beyond), "another token follows"
        again, hits = answered(first, branches)
        assert again == cold
        assert hits == [len(prompt) for prompt in shared]
