"""Models of full attention, of windows, states or chunked attention: hits, outages, few blocks, and other versions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.amount import ALL, amount
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_model import ensure_model
from tests.tools import vllm_python as pythons
from tests.tools.families import as_it_should, draw_lengths, measure, run_for_real
from tests.vllm.conftest import Rig, make_prompt, rig_of

pytestmark = pytest.mark.vllm

IN_GATE = ("19m", "gemma3")
"""Full attention, and windows. Everything reads them from a peer too: records of all families take the same way."""
RARE = [pytest.param(name, marks=pytest.mark.long) for name in ("gpt-oss", "mistral", "llama4", "qwen3-next")]


@pytest.mark.parametrize("family", [*IN_GATE, *RARE])
def test_a_family_hits_from_l1_after_a_kill_from_disk_and_from_a_peer(family, tmp_path, vllm_python):
    seed = amount(1, random.randrange(10_000))
    lengths = draw_lengths(amount(2, 3), seed)
    ways = measure(family, lengths, tmp_path, outages=ALL, peer=ALL and family in IN_GATE)
    assert all(way.good for way in ways), (seed, lengths, ways)


LENGTHS = (1_150, 1_149, 1_151, 1_148)
"""Nine blocks of full attention each, and ten before they end: all four start, and not all can end at once."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> Iterator[Rig]:
    """gpt-oss, in an engine that must preempt requests when it answers all of `LENGTHS` at once."""
    folder = tmp_path_factory.mktemp("families")
    options = {"max_num_batched_tokens": 512, "max_model_len": 2_304, "num_gpu_blocks_override": 50}
    with ServerProcess(folder / "server", l1_mb=256) as server:
        server.start()
        with rig_of(server, ensure_model("gpt-oss"), folder / "vllm", **options) as rig:
            yield rig


@pytest.mark.long
def test_a_prompt_that_parts_from_another_one_lets_the_next_hit_up_to_there(rig: Rig) -> None:
    """Only the windows at a prompt's end are stored; where two prompts part, the second one stores them."""
    rig.settle()
    shared = make_prompt(8_300, 800)
    rest = [make_prompt(8_301 + number, 400) for number in range(3)]
    cached, tokens = [], []
    for each in (*rest, rest[2]):
        found = rig.vllm.generate(shared + each, salt="parts")
        cached.append(found["cached_tokens"])
        tokens.append(found["tokens"])
        rig.settle()
    assert cached == [0, 0, 768, 1_024]
    assert tokens[2] == tokens[3] == rig.vllm.generate(shared + rest[2], salt="reference")["tokens"]
    rig.settle()


@pytest.mark.long
def test_versions_hit_their_own_records_and_those_of_each_other_exactly_if_the_facts_agree(
    vllm_python, tmp_path
):
    seed = random.randrange(10_000)
    ways = list(run_for_real(pythons.for_real(), draw_lengths(2, seed), tmp_path))
    assert {name for _, way in ways for name in [way.name]} >= {
        f"records of {pythons.for_real()[0]}",
        f"records of {pythons.for_real()[0]}, with other facts",
    }
    assert all(as_it_should(way) for _, way in ways), (seed, ways)
