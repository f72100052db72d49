"""Our connector beside another one in vLLM's `MultiConnector`, in both orders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.daemon import free_port
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess, transfer
from tests.vllm.conftest import OPTIONS, Rig, chunks_in_l1, until

pytestmark = [pytest.mark.vllm, pytest.mark.long]

NOT_OURS = {"lmcache.max_offload_tokens": 0}
"""A request with these parameters is stored by the other connector only."""

THEIR_SETTINGS = {
    "lmcache.mp.host": "tcp://localhost",
    "lmcache.mp.mq_timeout": 300,
    "lmcache.mp.port": "5555",
}


class BesideRig(Rig):
    """A server and an engine with two connectors; while the file `switch` exists, the other one's loads hang."""

    def __init__(self, server: ServerProcess, vllm: VllmProcess, switch: Path, *, first: bool) -> None:
        super().__init__(server, vllm)
        self.switch, self.first = switch, first
        self.counted: dict[str, float] = {}

    def news(self) -> dict[str, float]:
        """Our counters on vLLM's /metrics: what was added since the last call, without zeros."""
        self.vllm.generate([7] * 8, max_tokens=1)  # vLLM publishes counts with its steps
        self.settle()
        counted = self.vllm.ask("metrics")
        news = {name: count - self.counted.get(name, 0) for name, count in counted.items()}
        self.counted = counted
        return {name: count for name, count in news.items() if count}


def engine(
    server: ServerProcess,
    model: Path,
    folder: Path,
    other: dict[str, Any],
    *,
    first: bool,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> VllmProcess:
    """Start an engine with our connector, `first` or second, and the other one."""
    ours = transfer(server.connector_config(**THEIR_SETTINGS), bare_name=True)
    ours["kv_connector"] = "LMCacheMPConnector"
    del ours["kv_load_failure_policy"]  # vLLM reads the outer one
    both = [ours, other] if first else [other, ours]
    outer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": both, "lmcache.mp.port": 1},
    }
    more = {
        "max_num_batched_tokens": 512,
        "disable_log_stats": False,
        "kv_transfer_config": outer,
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
    }
    return VllmProcess(model, folder, extra=None, options=OPTIONS | more | options, environment=environment)


@pytest.fixture(scope="module", params=[True, False], ids=["ours-first", "ours-second"])
def first(request: pytest.FixtureRequest) -> bool:
    """Whether vLLM asks our connector first."""
    return bool(request.param)


@pytest.fixture(scope="module")
def offloading(first, server, vllm_model_folder, tmp_path_factory) -> Iterator[BesideRig]:
    """Beside `OffloadingConnector`, whose loads are asynchronous, with a model that has windows."""
    folder = tmp_path_factory.mktemp("offloading")
    extra = {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "HostSpec",
        "spec_module_path": "tests.vllm.other_connectors",
        "hold_file": str(folder / "hold"),
    }
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with engine(server, vllm_model_folder("gemma3"), folder / "vllm", other, first=first) as vllm:
        yield BesideRig(server, vllm, folder / "hold", first=first)


def test_settings_are_read_from_our_entry_and_the_policy_from_the_outer_configuration(offloading):
    log = offloading.vllm.log_text()
    assert "kv_connector_extra_config: lmcache.mp.mq_timeout has no effect" in log
    assert "kv_connector_extra_config of MultiConnector: lmcache.mp.port has no effect there" in log
    assert "kv_load_failure_policy is" not in log


def test_whoever_serves_the_hit_our_counts_events_and_leases_are_right(offloading):
    rig = offloading
    prompt = rig.fresh_prompt(1_000)
    rig.news()
    rig.vllm.ask("events")
    cold = rig.vllm.generate(prompt)
    stored = rig.news()
    assert cold["cached_tokens"] == 0 and stored["store_stored_chunks"] > 0
    assert "lookup_hit_tokens" not in stored
    events = rig.vllm.ask("events")
    told = [event for event in events if event["block_size"] == 256]
    assert sum(event["blocks"] for event in told) == 3
    by_vllm = {event["group_idx"] for event in events if event["kv_cache_spec_kind"] == "full_attention"}
    assert {event["group_idx"] for event in told} == by_vllm, "not the windows of Gemma 3"
    before = chunks_in_l1(rig.server)

    warm = rig.again(prompt)
    served = rig.news()
    assert warm["tokens"] == cold["tokens"] and warm["cached_tokens"] >= 768
    if rig.first:
        assert (served["lookup_hit_tokens"], served["loads_async"]) == (warm["cached_tokens"], 1)
    else:
        assert not {"lookup_hit_tokens", "loads_async", "loaded_chunks"} & served.keys()
    assert served["lookups"] == 1
    assert "store_stored_chunks" not in served and chunks_in_l1(rig.server) == before


def test_what_the_other_one_loads_is_stored_by_us_once_and_right(offloading):
    rig = offloading
    prompt = rig.fresh_prompt(1_100)
    cold = rig.vllm.generate(prompt, transfer=NOT_OURS)
    rig.news()
    before = chunks_in_l1(rig.server)
    warm = rig.again(prompt)
    served = rig.news()
    assert (warm["tokens"], warm["cached_tokens"]) == (cold["tokens"], 1_024)
    assert not {"lookup_hit_tokens", "loads_async"} & served.keys()
    assert chunks_in_l1(rig.server) == before + served["store_stored_chunks"] > before
    until(lambda: rig.forget(connector=True), "letting the other one forget its chunks")
    ours = rig.again(prompt)
    assert (ours["tokens"], ours["cached_tokens"]) == (cold["tokens"], 1_024)
    assert "store_stored_chunks" not in rig.news()


@pytest.mark.parametrize("tokens", [200, 1_000])
def test_abort_while_the_other_one_loads_stores_nothing_and_leaks_no_block(offloading, tokens):
    rig = offloading
    prompt = rig.fresh_prompt(tokens)
    cold = rig.vllm.generate(prompt, transfer=NOT_OURS)
    rig.settle()
    free, before = rig.vllm.ask("free_blocks"), chunks_in_l1(rig.server)
    rig.switch.touch()
    request = rig.vllm.ask("submit", prompt=prompt)
    until(lambda: rig.vllm.ask("step", n=1) or rig.vllm.ask("free_blocks") < free, "beginning the load")
    rig.vllm.ask("abort", request=request)
    rig.vllm.ask("idle_steps", n=3)
    rig.switch.unlink()
    until(
        lambda: rig.vllm.ask("idle_steps", n=1) or rig.vllm.ask("free_blocks") == free, "freeing all blocks"
    )
    rig.settle()
    assert chunks_in_l1(rig.server) == before
    assert rig.again(prompt)["tokens"] == cold["tokens"]


def test_prefill_and_decode_over_nixl_in_both_orders_with_windows(
    server, vllm_model_folder, nixl_environment, tmp_path, tmp_path_factory
):
    """Each engine prefills for the other one; each has a server of its own, so that only NIXL can bring a hit."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    model = vllm_model_folder("gemma3")

    def start(server: ServerProcess, name: str, *, first: bool) -> BesideRig:
        variables = {
            "PYTHONPATH": nixl_environment["PYTHONPATH"],
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        vllm = engine(server, model, tmp_path / name, nixl, first=first, environment=variables)
        return BesideRig(server, vllm, tmp_path / "unused", first=first)

    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=96).started() as another:
        one = start(server, "one", first=True)
        with one.vllm:
            two = start(another, "two", first=False)
            with two.vllm:
                for prefills, decodes in ((one, two), (two, one)):
                    hand_over(prefills, decodes)


def hand_over(prefills: BesideRig, decodes: BesideRig) -> None:
    """Let one engine prefill a prompt that the other one decodes, which stores what it got; then it hits that."""
    prompt = prefills.fresh_prompt(1_100)
    cold = prefills.vllm.generate(prompt)
    until(prefills.forget, "letting all blocks go")
    decodes.news()
    free = [rig.vllm.ask("free_blocks") for rig in (prefills, decodes)]
    before = chunks_in_l1(decodes.server)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = prefills.vllm.generate(prompt, max_tokens=1, transfer=asked)
    decodes.vllm.ask("submit", prompt=prompt, transfer=prefilled["transfer"])

    def decoded() -> Any:
        prefills.vllm.ask("idle_steps", n=1)
        return decodes.vllm.ask("step", n=1)

    [warm] = until(decoded, "decoding")
    assert warm["tokens"] == cold["tokens"] and warm["cached_tokens"] >= 1_024
    news = decodes.news()
    assert not {"lookup_hit_tokens", "loads_async"} & news.keys()
    assert chunks_in_l1(decodes.server) == before + news["store_stored_chunks"] > before
    ours = decodes.again(prompt)
    assert (ours["tokens"], ours["cached_tokens"]) == (cold["tokens"], 1_024)
    for rig, blocks in zip((prefills, decodes), free, strict=True):
        rig.settle()
        assert rig.vllm.ask("free_blocks") == blocks
