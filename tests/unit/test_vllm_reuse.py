"""Which engines and which requests may reuse KV, by vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.reuse import no_reuse_reason


def config(**model):
    return SimpleNamespace(model_config=SimpleNamespace(**model))


def test_engines_whose_prefixes_vllm_caches_may_use_the_cache():
    assert no_reuse_reason(config(is_prefix_caching_supported=True, pooler_config=None)) == ""


@pytest.mark.parametrize(("sequence", "token"), [("MEAN", None), ("CLS", None), (None, "STEP")])
def test_pooling_that_needs_every_token_loads_nothing(sequence, token):
    pooler = SimpleNamespace(seq_pooling_type=sequence, tok_pooling_type=token)
    reason = no_reuse_reason(config(is_prefix_caching_supported=False, pooler_config=pooler))
    assert f"with {sequence or token} pooling" in reason
