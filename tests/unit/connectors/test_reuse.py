"""Which engines and requests may reuse KV, as vLLM's configuration decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.reuse import media_are_counted, media_items, no_reuse_reason


def config(**model):
    return SimpleNamespace(model_config=SimpleNamespace(**model))


def test_engines_whose_prefixes_vllm_caches_may_use_the_cache():
    assert no_reuse_reason(config(is_prefix_caching_supported=True, pooler_config=None)) == ""


@pytest.mark.parametrize(("sequence", "token"), [("MEAN", None), ("CLS", None), (None, "STEP")])
def test_pooling_that_needs_every_token_loads_nothing(sequence, token):
    pooler = SimpleNamespace(seq_pooling_type=sequence, tok_pooling_type=token)
    reason = no_reuse_reason(config(is_prefix_caching_supported=False, pooler_config=pooler))
    assert f"with {sequence or token} pooling" in reason


@pytest.mark.parametrize(
    ("processor_gb", "prefix_caching", "counted"), [(0, False, True), (4, False, False), (0, True, False)]
)
def test_images_are_numbered_only_when_neither_cache_of_vllm_needs_their_content(
    processor_gb, prefix_caching, counted
):
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=processor_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert media_are_counted(config) is counted
    config.model_config.multimodal_config = None
    assert media_are_counted(config) is False


def feature(identifier):
    return SimpleNamespace(mm_position=SimpleNamespace(offset=4, length=2), identifier=identifier)


@pytest.mark.parametrize("identifier", ["0" * 64, "f" * 128, "adapter:" + "a1" * 32])
def test_a_hash_of_an_images_content_is_shared_by_all_engines(identifier):
    assert media_items([feature(identifier)], "one") == media_items([feature(identifier)], "other")


@pytest.mark.parametrize("identifier", ["cat", "img-1", "F" * 64, "0" * 63, "renderer0-mm-7-image-0"])
def test_a_requesters_name_for_an_image_is_valid_in_one_run_of_one_engine(identifier):
    first, again, other = (media_items([feature(identifier)], engine) for engine in ("one", "one", "two"))
    assert first == again != other
