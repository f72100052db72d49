"""What an engine may load and store, and which engines are refused, as vLLM's configuration decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.engine import (
    media_are_counted,
    no_load_reason,
    no_reuse_reason,
)
from kvstrata.connectors.vllm.request_keys import media_items


@pytest.mark.parametrize("owner", ["aux_output_config", "model_config"])
def test_an_engine_that_returns_routed_experts_loads_nothing(owner):
    """The option is in `aux_output_config` from vLLM 0.31 on."""
    for on in (False, True):
        outputs = SimpleNamespace(enabled=on, enable_return_routed_experts=on)
        reason = no_load_reason(SimpleNamespace(**{"model_config": SimpleNamespace(), owner: outputs}))
        assert ("--enable-return-routed-experts" in reason) is on


def model(**settings):
    return SimpleNamespace(model_config=SimpleNamespace(**settings))


def test_pooling_that_needs_every_token_loads_nothing():
    for sequence, token in (("MEAN", None), ("CLS", None), (None, "STEP")):
        pooler = SimpleNamespace(seq_pooling_type=sequence, tok_pooling_type=token)
        reason = no_reuse_reason(model(is_prefix_caching_supported=False, pooler_config=pooler))
        assert f"with {sequence or token} pooling" in reason


def test_images_are_numbered_only_when_neither_cache_of_vllm_needs_their_content():
    for processor_gb, prefix_caching, counted in ((0, False, True), (4, False, False), (0, True, False)):
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                multimodal_config=SimpleNamespace(mm_processor_cache_gb=processor_gb)
            ),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        )
        assert media_are_counted(config) is counted
        config.model_config.multimodal_config = None
        assert media_are_counted(config) is False


def feature(identifier):
    return SimpleNamespace(mm_position=SimpleNamespace(offset=4, length=2), identifier=identifier)


def test_a_hash_of_an_images_content_is_shared_by_all_engines():
    for identifier in ("0" * 64, "adapter:" + "a1" * 32):
        assert media_items([feature(identifier)], "one") == media_items([feature(identifier)], "other")


def test_a_requesters_name_for_an_image_is_valid_in_one_run_of_one_engine():
    for identifier in ("img-1", "F" * 64, "0" * 63):
        first, again, other = (media_items([feature(identifier)], engine) for engine in ("one", "one", "two"))
        assert first == again != other
