"""Which loads are safe, and which engines are refused, by the order of vLLM's steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstrata.connectors.vllm.steps import check_steps, may_load_synchronously, no_load_reason
from kvstrata.errors import ConfigError


def config(*, batches=1, stages=1, drafts=False, v2=False):
    return SimpleNamespace(
        max_concurrent_batches=batches,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=SimpleNamespace() if drafts else None,
        use_v2_model_runner=v2,
    )


@pytest.mark.parametrize(
    ("batches", "stages", "named"), [(2, 1, "--no-async-scheduling"), (2, 2, "pipeline_parallel_size")]
)
def test_synchronous_loads_are_refused_where_a_step_is_planned_before_the_one_before_has_ended(
    batches, stages, named
):
    engine = config(batches=batches, stages=stages)
    assert not may_load_synchronously(engine)
    with pytest.raises(ConfigError, match=r"^load_mode: 'sync'") as raised:
        check_steps(engine, "sync")
    assert raised.value.field == "load_mode" and named in str(raised.value)
    check_steps(engine, "auto")
    check_steps(engine, "async")


def test_an_engine_that_ends_each_step_before_it_plans_the_next_may_load_synchronously():
    engine = config()
    check_steps(engine, "sync")
    assert may_load_synchronously(engine)


def test_drafts_over_several_stages_are_refused_on_the_runner_that_never_begins_their_stores():
    with pytest.raises(ConfigError, match=r"^speculative_config: .*pipeline_parallel_size 2"):
        check_steps(config(batches=2, stages=2, drafts=True), "auto")
    check_steps(config(batches=2, stages=2, drafts=True, v2=True), "auto")
    check_steps(config(drafts=True), "auto")


@pytest.mark.parametrize("owner", ["aux_output_config", "model_config"])
def test_an_engine_that_returns_routed_experts_loads_nothing(owner):
    """The option is in `aux_output_config` from vLLM 0.31 on."""
    for on in (False, True):
        outputs = SimpleNamespace(enabled=on, enable_return_routed_experts=on)
        reason = no_load_reason(SimpleNamespace(**{"model_config": SimpleNamespace(), owner: outputs}))
        assert ("--enable-return-routed-experts" in reason) is on
