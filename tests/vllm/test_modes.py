"""Asynchronous loads, preemption, generated chunks, other LoRA adapters: other options of engine and connector."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.cli import asking
from tests.harness.records import Extents
from tests.harness.server_process import ServerProcess
from tests.vllm.conftest import Rig, rig_of, until

pytestmark = pytest.mark.vllm

BLOCKS = 40
"""5,120 tokens of KV cache: two long requests do not fit together."""


@pytest.fixture(scope="module")
def rig(server: ServerProcess, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Asynchronous loads, little memory, generated chunks stored, KV events and LoRA on."""
    extra = {
        "kvstrata.load_mode": "async",
        "lmcache.mp.save_decode_cache": True,
        "kvstrata.enable_kv_events": True,
    }
    options = {"num_gpu_blocks_override": BLOCKS, "enable_lora": True, "max_lora_rank": 8}
    with rig_of(server, small_model, tmp_path_factory.mktemp("modes"), extra, **options) as rig:
        yield rig


def test_asynchronous_hit_gives_the_same_tokens(rig):
    for tokens, hit in ((1_000, 896), (1_024, 1_023), (2_600, 2_560)):
        prompt = rig.fresh_prompt(tokens)
        cold = rig.stored(prompt)
        warm = rig.again(prompt)
        assert (warm["cached_tokens"], warm["tokens"]) == (hit, cold["tokens"])


def test_asynchronous_load_that_fails_is_computed(rig):
    prompt = rig.fresh_prompt(1_400)
    extents = Extents(rig.server.segment_dir)
    before = {header.key for header in extents.records().values()}
    cold = rig.stored(prompt)
    for at, header in extents.records().items():
        if header.key not in before:
            extents.flip_a_byte(at, header)
    extents.close()
    bad = rig.again(prompt)
    assert bad["tokens"] == cold["tokens"]
    healed = until(lambda: rig.full_hit(prompt, 1_280), "storing the chunks again")
    assert healed["tokens"] == cold["tokens"]


@pytest.mark.long
def test_an_answers_chunks_and_its_tail_are_stored_and_hit_by_the_next_turn(rig):
    prompt = rig.fresh_prompt(500)
    first = rig.vllm.generate(prompt, max_tokens=410)
    turn = [*prompt, *first["tokens"][:-1], 5, 6, 7]
    expected = rig.again(turn, salt="reference")["tokens"]
    again = until(lambda: rig.full_hit(turn, 896), "storing the answer: two chunks, and a block of the third")
    assert again["tokens"] == expected


@pytest.mark.long
def test_preempted_requests_give_the_same_tokens(rig):
    # Nine blocks each, and ten before they end: all four start, and not all can end at once.
    prompts = [rig.fresh_prompt(n) for n in (1_150, 1_149, 1_151, 1_148)]
    alone = [rig.vllm.generate(p, max_tokens=40, salt="reference")["tokens"] for p in prompts]
    until(rig.forget, "letting all blocks go")
    together = rig.vllm.ask("generate", prompts=prompts, max_tokens=40)
    assert rig.vllm.ask("preemptions") > 0, "the cache was not small enough to test anything"
    assert [r["tokens"] for r in together] == alone
    until(rig.forget, "letting all blocks go")
    warm = rig.vllm.ask("generate", prompts=prompts, max_tokens=40)
    assert [r["tokens"] for r in warm] == alone
    rig.settle()


def test_events_name_stored_chunks_with_their_tokens_and_removed_chunks(rig):
    rig.vllm.ask("events")
    prompt = rig.fresh_prompt(800)
    rig.stored(prompt)
    told = [e for e in rig.vllm.ask("events") if e["medium"] == "CPU"]
    stored = [e for e in told if e["event"] == "BlockStored"]
    tokens = [token for event in stored for token in event["token_ids"]]
    assert tokens == prompt[:768]
    assert {event["block_size"] for event in stored} == {256}
    assert not any(key for event in stored for key in event["extra_keys"] or ())
    rig.stored(prompt, salt="other")
    told = [e for e in rig.vllm.ask("events") if (e["medium"], e["event"]) == ("CPU", "BlockStored")]
    salted = [key for event in told for key in event["extra_keys"]]
    assert salted == [["other"], None, None], "as in vLLM's own events"
    for _ in range(2):
        rig.vllm.generate([5, 6, 7])  # events are taken in steps, and vLLM makes none without requests
    asking.ask(rig.server.url, asking.Ask("/v1/clear", {"tier": "l1"}))
    removed = []

    def gone():
        rig.vllm.generate([5, 6, 7])
        told = rig.vllm.ask("events")
        removed.extend(e["blocks"] for e in told if (e["event"], e["medium"]) == ("BlockRemoved", "CPU"))
        return sum(removed) >= 3

    until(gone, "telling that the chunks are gone")


def test_adapters_share_nothing_with_each_other_or_the_base_model(rig, tmp_path, vllm_python):
    prompt = rig.fresh_prompt(600)
    base = rig.stored(prompt)
    adapters = {}
    for number, seed in enumerate((1, 2, 1), start=1):
        folder = tmp_path / f"adapter-{number}"
        rig.vllm.ask("make_adapter", folder=str(folder), seed=seed)
        adapters[number] = folder
    one = [f"one-{tmp_path.name}", 1, str(adapters[1])]
    two = [f"two-{tmp_path.name}", 2, str(adapters[2])]
    first = rig.stored(prompt, lora=one)
    assert first["cached_tokens"] == 0 and first["tokens"] != base["tokens"]
    second = rig.stored(prompt, lora=two)
    assert second["cached_tokens"] == 0 and second["tokens"] not in (base["tokens"], first["tokens"])
    for lora, expected in ((None, base), (one, first), (two, second)):
        warm = rig.again(prompt, lora=lora)
        assert (warm["cached_tokens"], warm["tokens"]) == (512, expected["tokens"])
    # The same content under the same name, loaded from elsewhere as another number: the same KV.
    copied = rig.again(prompt, lora=[one[0], 3, str(adapters[3])])
    assert (copied["cached_tokens"], copied["tokens"]) == (512, first["tokens"])
    # Other files count from the time at which vLLM reads them: it has room for one adapter, so it has to read this one.
    exchange(adapters[1], adapters[2])
    replaced = rig.again(prompt, lora=one)
    assert (replaced["cached_tokens"], replaced["tokens"]) == (0, second["tokens"])
    exchange(adapters[1], adapters[3])
    kept = until(lambda: rig.full_hit(prompt, 512, lora=one), "storing the chunks of the replaced adapter")
    assert kept["tokens"] == second["tokens"], "vLLM has not read the files again"
    rig.vllm.ask("load_adapter_again", lora=one)
    for _ in range(2):  # vLLM tells nobody that it has loaded them
        assert rig.again(prompt, lora=one)["tokens"] == first["tokens"]
    found = until(lambda: rig.full_hit(prompt, 512, lora=one), "finding the chunks of the first adapter")
    assert found["tokens"] == first["tokens"]


def exchange(folder: Path, other: Path) -> None:
    """Put the files of another adapter in the place of those in `folder`."""
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
