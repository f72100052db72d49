"""The view of blocks on KV caches that vLLM's own code lays out, for the attention backends that it has."""

from __future__ import annotations

import json

import pytest

from tests.vllm.conftest import run_in_vllm

pytestmark = pytest.mark.vllm

ALL = {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"}
LATENTS = ["FLASHMLA auto 64/64", "TRITON_MLA fp8 16/16", "FLASHMLA_SPARSE fp8_ds_mla 64/64"]


@pytest.fixture(scope="module")
def results(vllm_python, tmp_path_factory):
    """One line a case, see the script."""
    printed = run_in_vllm(tmp_path_factory.mktemp("layouts"), "tests.vllm.layouts_run")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def made(results):
    return [result for result in results if "gathered" in result]


def test_blocks_of_every_backend_in_every_layout_are_copied_as_torch_sees_them(results):
    assert len(made(results)) > 50
    for result in made(results):
        assert result["gathered"] and result["scattered"] and result["chunk_bytes"], result
        assert result["loops"] == (result["layout"] in ("LHBNC", "BHLNC") and "MLA" not in result["case"]), (
            result
        )


def test_a_backend_that_allows_several_layouts_is_tested_in_all_of_them(results):
    for case in ("FLASH_ATTN auto 16/16", "FLASH_ATTN fp8 32/32", "TRITON_ATTN auto 16/16", *LATENTS):
        assert {result["layout"] for result in made(results) if result["case"] == case} == ALL


def test_axes_are_named_heads_and_tokens_only_for_known_backends(results):
    axes = {(result["case"], result["layout"]): result["axes"] for result in made(results)}
    heads, tokens, content = ["kv_heads", 4], ["tokens", 16], [["kv", 2], ["dim", 64]]
    assert axes["FLASH_ATTN auto 16/16", "LBNHC"] == [tokens, heads, *content]
    assert axes["FLASH_ATTN auto 16/16", "LHBNC"] == [heads, tokens, *content]
    assert axes["FLASH_ATTN auto 64/16", "LBHNC"] == [["tokens", 4], heads, tokens, *content]
    assert axes["FLASH_ATTN auto 64/16", "LBNHC"] == [["tokens", 64], heads, *content]
    assert axes["TRITON_ATTN fp8_per_token_head 16/16", "LBHNC"] == [heads, tokens, ["kv", 2], ["dim", 68]]
    assert axes["FLASH_ATTN_DIFFKV auto 16/16", "LBNHC"] == [tokens, heads, ["k64+v32", 96]]
    assert axes["FLASHMLA auto 64/64", "BLNHC"] == [["tokens", 64], ["latent", 576]]
    assert axes["CPU_ATTN auto 128/32", "LBHNC"] == [
        ["cpu_attn/amx@V.tokens", 4],
        heads,
        ["cpu_attn/amx@V.tokens", 32],
        ["cpu_attn/amx@V.content", 128],
    ]
    for unknown in ("TURBOQUANT turboquant_k8v4 16/16", "TRITON_ATTN int4_per_token_head 16/16"):
        assert not {"tokens", "kv_heads", "kv"} & {name for name, _ in axes[unknown, "LBNHC"]}
    assert {size for name, size in axes["B12X auto 64/64", "LBHNC"] if name == "b12x@V.heads"} == {2}


def test_scales_of_quantised_layers_are_facts(results):
    for result in made(results):
        layer = [(0.5).hex(), (2.0).hex()]
        quantised = [layer, []] * 3 if "indexer" in result["case"] else [layer] * 3
        assert result["scales"] == ([] if result["quantisation"] == "NONE" else quantised), result
    fp8 = [result for result in made(results) if result["case"] == "FLASH_ATTN fp8 32/32"]
    assert {(result["stored"], result["quantisation"]) for result in fp8} == {("uint8", "FP8_PER_TENSOR")}


def test_latents_and_an_indexer_are_sections_of_one_record_with_facts_of_their_own(results):
    mixed = [result for result in made(results) if "indexer" in result["case"]]
    assert {result["layout"] for result in mixed} == {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
    for result in mixed:
        assert result["section_makes"] == [0, 1] * 3
        assert [make["axes"] for make in result["makes"]] == [
            [["tokens", 64], ["latent/fp8_ds_mla", 656]],
            [["deepseek_v32_indexer@V.tokens", 64], ["deepseek_v32_indexer@V.content", 132]],
        ]


def test_records_are_recut_between_backends_layouts_and_numbers_of_workers(results):
    recuts = [result for result in results if "recut" in result]
    assert len(recuts) == 7
    for result in recuts:
        assert (result["outcome"], result["same"], result["copies"]) == (0, True, 2), result


def test_loads_come_layer_by_layer_only_where_vllm_waits_for_each_layer(results):
    [asks] = [result["asks"] for result in results if "asks" in result]
    assert asks == {"attention": True, "latents": True, "latents and indexer": False, "vllm waits": True}
