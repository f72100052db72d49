"""Checks our connector inside vLLM's own classes (`versions_engine`); run by the Python of the vLLM environment.

`versions_run.py FOLDER` checks the vLLM that it imports, so one script serves several versions. FOLDER gets a model's
configuration. Prints its version, and for each `check_` function a line of JSON with the traceback of its failure.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import vllm
from vllm.config import (
    AttentionConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    MultiModalConfig,
    VllmConfig,
)
from vllm.config.mamba import MambaConfig
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.lora.request import LoRARequest
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_worker import Worker

import kvstrata.connectors.vllm as package
from kvstrata.config.lmcache import CONNECTORS
from kvstrata.connectors import boundary
from kvstrata.connectors.vllm import build
from kvstrata.connectors.vllm.compat.contract import NEEDED, missing_names
from kvstrata.connectors.vllm.compat.packing import arrangement_namer
from kvstrata.connectors.vllm.compat.sleep_calls import follow_sleep
from kvstrata.connectors.vllm.connector import LMCacheConnectorV1
from kvstrata.connectors.vllm.identity import HARMLESS, engine_facts, layout_identity, section_facts
from kvstrata.connectors.vllm.metadata import StepPlan
from kvstrata.connectors.vllm.weights import LoadedAdapters, find_runner, loaded_weights
from kvstrata.errors import ConfigError
from tests.vllm import versions_groups, versions_late, versions_tenants
from tests.vllm.versions_engine import (
    BLOCK,
    CHUNK,
    Client,
    Copies,
    DryEngine,
    ModelRunner,
    Runner,
    cache_config,
    load_of,
    model_folder,
    reported,
    reports_of,
    store_of,
    vllm_config,
)


def of_vllm(name: str) -> Any:
    """What vLLM's base classes of ours have under this name; None if they have nothing."""
    for base in (KVConnectorBase_V1, SupportsHMA):
        if name in vars(base):
            return vars(base)[name]
    return inspect.getattr_static(KVConnectorBase_V1, name, None)


def unlike(own: Any, theirs: Any) -> str:
    """The difference between the parameters that our method takes and those that vLLM gives; empty if none matters."""
    own, theirs = (getattr(each, "__func__", getattr(each, "fget", each)) for each in (own, theirs))
    if not callable(own) or not callable(theirs):
        return ""
    takes, asked = (list(inspect.signature(each).parameters.values()) for each in (own, theirs))
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes)
    for position, parameter in enumerate(asked):
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        if position >= len(takes) or takes[position].name != parameter.name:
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and open_ended:
                continue
            return f"takes {[p.name for p in takes]}, vLLM gives {[p.name for p in asked]}"
    return ""


def check_every_module_of_the_connector_can_be_imported(folder: Path) -> None:
    names = {module.name for module in pkgutil.iter_modules(package.__path__)}
    for name in names:
        importlib.import_module(f"{package.__name__}.{name}")
    assert {"connector", "scheduler", "worker", "plugin"} <= names


def check_vllm_finds_our_connector_under_each_of_lmcaches_names(folder: Path) -> None:
    """By its own factory, with and without a published module path."""
    load_general_plugins()
    for name, modules in CONNECTORS.items():
        for module in (None, *modules):
            config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
            found = KVConnectorFactory.get_connector_class(config)
            assert found.__module__ == "kvstrata.connectors.vllm.connector"


def check_each_method_can_be_called_in_every_way_that_vllm_calls_it(folder: Path) -> None:
    methods = 0
    for name, own in vars(LMCacheConnectorV1).items():
        theirs = of_vllm(name)
        if not name.startswith("_") and theirs is not None:
            methods += 1
            assert type(own) is type(theirs) and not unlike(own, theirs), (name, unlike(own, theirs))
    assert methods > 20 and not LMCacheConnectorV1.__abstractmethods__


def check_an_engine_whose_vllm_lacks_a_needed_name_serves_without_the_cache(folder: Path) -> None:
    assert missing_names() == []
    path = "vllm.v1.outputs.KVConnectorOutput"
    kept = NEEDED[path]
    NEEDED[path] += ("no_such_field",)
    config, caught = vllm_config(folder), boundary.errors.total
    scheduler = Scheduler(config, cache_config(), StructuredOutputManager(config), block_size=BLOCK)
    scheduler.add_request(Request("r", list(range(100)), SamplingParams(max_tokens=1), None))
    output = scheduler.schedule()
    worker = LMCacheConnectorV1(config, KVConnectorRole.WORKER, cache_config())
    worker.register_kv_caches({})
    NEEDED[path] = kept
    assert output.num_scheduled_tokens == {"r": 100}
    assert output.kv_connector_metadata.plan == StepPlan(0) and boundary.errors.total == caught


NOTHING_LEFT = {"blocks": 0, "leases": 0, "tracked": 0}
FRESH = [
    {"scheduled": {"r1": 512}, "stores": [["r1", 2, [1, 2, 3, 4]]]},
    {"scheduled": {"r1": 488}, "stores": [["r1", 1, [5, 6]]]},
]


def check_a_request_is_stored_loaded_and_recovered_step_by_step(folder: Path) -> None:
    """vLLM's own scheduler plans, and both of its model runners call the connector in their ways."""
    for v2 in (False, True):
        for asynchronous in (False, True):
            Client.hits = 0
            engine = DryEngine(
                vllm_config(folder, extra={"kvstrata.load_mode": "async" if asynchronous else "sync"}),
                on_device=True,
                v2=v2,
            )
            engine.add(1000)
            assert engine.run()[:2] == FRESH
            Client.hits = 100
            engine.add(1000, first=2000)
            loads = {"loads": [["r2", 3, asynchronous, [8, 9, 10, 11, 12, 13]]]}
            assert engine.run()[:2] == (
                [{**loads, "received": ["r2"]}, {"scheduled": {"r2": 232}}]
                if asynchronous
                else [{"scheduled": {"r2": 232}, **loads}, {"scheduled": {"r2": 1}}]
            )
            engine.copies.fails = 1
            engine.add(1000, first=4000)
            failed, again, *_ = engine.run()
            assert failed["bad"] == failed["loads"][0][3] and "stores" not in failed
            assert again["scheduled"] == {"r3": 512} and again["stores"][0][1] == 2
            engine.copies.fails = 0
            engine.add(1000, first=6000, max_tokens=50)
            engine.step()
            if asynchronous:
                engine.step()
            engine.side._weights.can_tell = False  # otherwise the request would wait for the workers' digests
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.copies.fails = 1
            # The request is preempted and loaded again in one step; what was not loaded is stored again.
            failed, *later = [engine.step() for _ in range(4)]
            [[request, chunks, _, blocks]] = failed["loads"]
            assert (failed["preempted"], failed["bad"]) == ([request], sorted(blocks))
            stored = [block for step in later for _, _, found in step.get("stores", ()) for block in found]
            assert chunks == 3 and sorted(stored) == sorted(blocks)
            engine.run(at_most=60)
            assert engine.left() == NOTHING_LEFT


def check_loads_are_synchronous_only_where_vllm_ends_a_step_before_it_plans_the_next(folder: Path) -> None:
    for options, found in (
        ({}, {"auto": 256 << 20, "sync": 256 << 20}),
        ({"asynchronous": True}, {"auto": 0, "sync": "load_mode"}),
        ({"pipeline_parallel_size": 2}, {"auto": 0, "sync": "load_mode"}),
    ):
        for load_mode, expected in found.items():
            side = started(vllm_config(folder, extra={"kvstrata.load_mode": load_mode}, **options))
            assert (side if isinstance(side, str) else side._engine.sync_load_bytes) == expected, (
                options,
                load_mode,
            )
    config = vllm_config(folder)
    returning: Any = getattr(config, "aux_output_config", config.model_config)
    returning.enable_return_routed_experts = True
    side = started(config)
    assert (side._engine.may_load, side._engine.may_store) == (False, True)


def check_drafts_over_several_stages_are_refused_on_the_v1_model_runner(folder: Path) -> None:
    for v2 in (False, True):
        config = vllm_config(folder, pipeline_parallel_size=2)
        config.speculative_config = SimpleNamespace(model="draft", method="suffix")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
        assert (started(config) == "speculative_config") is not v2
    del os.environ["VLLM_USE_V2_MODEL_RUNNER"]


def started(config: VllmConfig) -> Any:
    """The scheduler side of such an engine, or the field for which it is refused."""
    try:
        return LMCacheConnectorV1(config, KVConnectorRole.SCHEDULER, cache_config())._scheduler
    except ConfigError as error:
        return error.field


def check_a_failed_load_is_reported_in_its_own_step_and_nothing_computed_on_it_is_stored(
    folder: Path,
) -> None:
    """The second step is planned before the failure is known; with drafts, a step's copies end after its report."""
    config = vllm_config(folder)
    for v2, drafts, on_device in itertools.product((False, True), repeat=3):
        copies = Copies(on_device=on_device)
        copies.fails = 1
        runner = Runner(config, copies, v2=v2, drafts=drafts)
        said = []
        for step in (1, 2, 3):
            plan = StepPlan(step, failures_seen=0 if step < 3 else 1)
            plan.loads = [load_of("r", [4, 5, 6, 7])] if step == 1 else []
            plan.stores = [store_of(step)]
            plan.awaited = {"ended"} if step == 1 else set()
            said.append(reported(runner, plan))
        said += [reported(runner, StepPlan(step, failures_seen=1)) for step in (4, 5)]
        reports = [reports_of(each) for each in said]
        assert [sorted(each.invalid_block_ids) if each else [] for each in said] == [[4, 5, 6, 7], *[[]] * 4]
        assert [report.failures for report in reports[0]] == [1]
        flat = list(itertools.chain.from_iterable(reports))
        assert sorted(store for report in flat for store in report.dropped) == [1, 2]
        assert [store for report in flat for store, _ in report.stored] == copies.stored == [3]
        assert [name for each in said if each for name in each.finished_sending or ()] == ["ended"]


def check_keys_change_with_the_weights_and_return_with_the_first_ones(folder: Path) -> None:
    """vLLM tells its connector of a pause, but not that its prefix cache was emptied after a reload of weights."""
    Client.hits = 0
    engine = DryEngine(vllm_config(folder))

    def stored(waits: bool = True) -> str:
        """The adapter in the identity of a prompt's stores; its first step waits for the workers' digests."""
        engine.plans.clear()
        engine.add(600)
        assert (engine.run()[0] == {}) is waits
        [adapter] = {store.identity.adapter for plan in engine.plans for store in plan.stores}
        return adapter

    def emptied(**reset: bool) -> str:
        engine.scheduler.reset_prefix_cache(**reset)
        return stored()

    paused = {"reset_running_requests": True, "reset_connector": True}
    assert stored(waits=False) == emptied() == emptied(**paused) == ""
    engine.copies.weights = "second"
    new = emptied()
    assert new.startswith('["weights",') and emptied(**paused) == new
    engine.copies.weights = "first"
    assert emptied(**paused) == ""
    engine.add(1000, first=5000, max_tokens=300)
    engine.step()
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.side._keys.engine_stale, "a request runs"
    engine.run(at_most=400)
    assert emptied(reset_connector=True) == ""


def check_a_digest_of_the_weights_sees_every_parameter_and_nothing_else(folder: Path) -> None:
    runner = ModelRunner()
    weights = runner.initialize_kv_cache()

    def seen() -> bool:
        return weights.digest() != weights.initial

    assert not seen() and ModelRunner().initialize_kv_cache().initial == weights.initial
    for name in ("large", "turned", "small", "fp8", "bytes"):
        parameter = getattr(runner.model, name)
        before = parameter.data.clone()
        wide = parameter.data.to(torch.float32)
        parameter.data.copy_((wide * 1.01 + (wide == 1)).to(parameter.dtype))
        assert seen(), name
        parameter.data.copy_(before)
    for tensor, counts in (
        (runner.model.scale, True),
        (runner.model.state, False),
        (runner.model.packed.kept[0], True),
    ):
        tensor.mul_(2)
        assert seen() is counts
        tensor.div_(2)
    assert not seen(), "all was changed back"
    assert loaded_weights(find_runner(), named=True) is None
    for named in (False, True):  # by its load format, then by weights of its own
        unnamed = runner.initialize_kv_cache(named=named)
        assert unnamed.initial == "unnamed" and unnamed.digest()
        runner.model.secondary_weights = ["hub/other"]
    del runner.model.packed.input_size_per_partition
    assert unnamed.initial == "unnamed" and not unnamed.digest()


def check_a_worker_notices_when_it_has_another_adapter_than_it_told(folder: Path) -> None:
    runner, lora = ModelRunner(), LoRARequest("one", 1, "/adapters/one")
    adapters = LoadedAdapters(runner)
    first = adapters.digest(1, lora)

    assert adapters.still(1)
    runner.adapters.clear()
    assert adapters.still(1), "evicted"
    runner.add_lora(lora)
    assert adapters.still(1), "loaded again"
    runner.files = 2.0
    assert adapters.still(1), "vLLM has not read the replaced files"
    runner.add_lora(lora)
    assert not adapters.still(1), "replaced in place"
    second = adapters.digest(2, lora)
    runner.adapters.clear()
    runner.files = 1.0
    other = LoRARequest("other", 7, "/adapters/other")
    assert adapters.digest(3, other) == first != second
    runner.lora_config.target_modules = ["k_proj"]
    assert adapters.digest(4, lora) != first, "other layers"
    runner.add_lora = None  # type: ignore[method-assign,assignment]
    unread = LoRARequest("broken", 8, "/adapters/broken")
    assert adapters.digest(5, unread) == "" and not adapters.still(6)


SECTIONS = {
    "model_config": ModelConfig,
    "multimodal_config": MultiModalConfig,
    "load_config": LoadConfig,
    "attention_config": AttentionConfig,
    "mamba_config": MambaConfig,
}


def check_each_setting_is_in_the_identity_or_on_the_list_of_harmless_ones(folder: Path) -> None:
    """A setting that a new version of vLLM brings is in the identity until it is put on the list."""
    config = vllm_config(folder)
    config.model_config.multimodal_config = MultiModalConfig()

    def identity() -> str:
        return layout_identity(config, kv_dtype="auto", chunk_tokens=CHUNK).weights

    before, count = identity(), 0
    again = vllm_config(folder)
    again.model_config.multimodal_config = MultiModalConfig(
        mm_processor_kwargs={}, media_io_kwargs={}, mm_encoder_tp_mode="weights", mm_processor_cache_gb=4
    )
    assert layout_identity(again, kv_dtype="auto", chunk_tokens=CHUNK).weights == before, (
        "defaults, written out"
    )
    facts = engine_facts(again)
    for section, owner in (("model_config", again), ("multimodal_config", again.model_config)):
        facts[section] = section_facts(section, getattr(owner, section))
    # Engines of all versions share KV: a new setting whose default does something would part them.
    assert facts == {
        "load_config": {"load_format": "folder", "ignore_patterns": ["original/**/*"]},
        "attention_config": {"indexer_kv_dtype": "auto"},
        "mamba_config": None,
        "model_config": {
            **dict.fromkeys(("runner", "convert", "tokenizer_mode", "model_impl"), "auto"),
            "dtype": "torch.float32",
        },
        "multimodal_config": {"mm_device_do_normalize": True, "video_pruning_method": "evs"},
    }
    for section, kind in SECTIONS.items():
        owner: Any = config.model_config if section == "multimodal_config" else config
        settings = getattr(owner, section)
        for field in dataclasses.fields(kind):
            value = getattr(settings, field.name, None)
            if field.name not in ("model", "hf_config", "hf_text_config", "multimodal_config"):
                object.__setattr__(settings, field.name, "changed")
                assert (identity() == before) is (field.name in HARMLESS[section]), field.name
                object.__setattr__(settings, field.name, value)
                count += 1
    assert count > 90 and identity() == before


class Packs:
    """An attention layer that packs the K and V of each head, with K's tokens turned by `turned`.

    With `mixed` it puts the heads in the opposite order.
    """

    isa = "vec"

    def __init__(self, turned: int = 0, *, mixed: bool = False) -> None:
        self.impl, self.turned, self.mixed, self.asked = self, turned, mixed, 0

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.asked += 1
        packed = torch.cat([key.roll(self.turned, 0), value], -1).transpose(0, 1)
        cache[slots[0] // BLOCK] = packed.flip(0) if self.mixed else packed


def check_arrangements_have_one_name_in_two_versions_exactly_if_both_pack_alike(folder: Path) -> None:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
    half = dataclasses.replace(spec, num_kv_heads=2)
    one, other = arrangement_namer("0.98"), arrangement_namer("0.99")
    layer = Packs()
    alike = one("CPU_ATTN", spec, layer)
    assert alike.startswith("#") and alike == other("CPU_ATTN", spec, Packs()) == one("CPU_ATTN", spec, layer)
    assert layer.asked == 3, "layers that are alike are asked once: for all heads, the first and the last"
    assert arrangement_namer("0.99")("CPU_ATTN", spec, Packs(turned=1)) not in (alike, "@0.99")
    assert one("CPU_ATTN", spec, SimpleNamespace()) == "@0.98"
    assert other("SOMETHING", spec, Packs()) == "@0.99"
    assert arrangement_namer("0.99")("CPU_ATTN", half, Packs()) == alike, "fewer heads, each packed by itself"
    mixed = [arrangement_namer("0.99")("CPU_ATTN", each, Packs(mixed=True)) for each in (spec, half)]
    assert len({alike, *mixed}) == 3, "here the heads are not packed by themselves"


SCHEDULER_INTERNALS = (
    ("keys", "know_weights"),
    ("keys", "weights_settled"),
    ("lookups", "track"),
    ("keys", "identity"),
    ("keys", "prepare"),
    ("lookups", "ask"),
    ("lookups", "_answered"),
    ("side", "matched_tokens"),
    ("side", "allocated"),
    ("side", "_load_of"),
    ("side", "plan_step"),
    ("stores", "plan"),
    ("stores", "_add_store"),
    ("side", "heard"),
    ("stores", "_stored"),
    ("side", "finished"),
    ("stores", "take_events"),
    ("side", "take_counts"),
    ("client", "peek"),
    ("client", "lookup"),
    ("client", "release"),
)
WORKER_INTERNALS = (
    ("worker", "before_step"),
    ("worker", "start_loads"),
    ("worker", "_begin_load"),
    ("worker", "wait_layer"),
    ("worker", "end_loads"),
    ("worker", "start_stores"),
    ("group", "identity"),
    ("worker", "finished"),
    ("worker", "_ended_load"),
    ("worker", "_settle_stores"),
    ("worker", "take_bad_blocks"),
    ("worker", "report"),
    ("worker", "take_counts"),
    ("copies", "load"),
    ("copies", "store"),
    ("copies", "await_section"),
    ("copies", "take_counts"),
)


def planted(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("planted")


class Broken:
    """A side whose every attribute raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("planted")


def check_every_method_that_vllm_calls_while_it_serves_is_guarded(folder: Path) -> None:
    """A guarded method answers though everything behind it raises."""
    engine = DryEngine(vllm_config(folder))
    unguarded = set()
    answers = {"get_num_new_matched_tokens": (0, False), "request_finished": (True, None)}
    for name, own in vars(LMCacheConnectorV1).items():
        if name.startswith("_") or of_vllm(name) is None:
            continue
        if not hasattr(own, "guarded"):
            unguarded.add(name)
            continue
        arguments = [None] * (len(inspect.signature(own).parameters) - 1 - (name == "start_load_kv"))
        for connector in (engine.connector, engine.runner.connector):
            connector._scheduler = connector._worker = Broken()  # type: ignore[assignment]
            answer = getattr(connector, name)(*arguments)
            assert name not in answers or answer == answers[name], name
    # An error of these stops vLLM's sleep, which would unmap memory that a copy touches. They exist from vLLM 0.33 on.
    unguarded -= {"unregister_kv_caches", "restore_kv_caches"}
    # These are called at the start only, or do nothing.
    assert unguarded == {
        *("register_kv_caches", "save_kv_layer", "requires_kv_delivery"),
        *("build_kv_connector_stats", "build_prom_metrics"),
    }


def check_no_error_inside_the_connector_ends_the_engine_or_keeps_anything(folder: Path) -> None:
    """One internal function always raises: a prompt and a hit end, and their blocks and leases are given back."""
    configs = {
        mode == "async": vllm_config(folder, extra={"kvstrata.load_mode": mode}) for mode in ("sync", "async")
    }
    engines = ((False, False), (True, False), (True, True))
    internals = (*SCHEDULER_INTERNALS, *WORKER_INTERNALS)
    for (asynchronous, windows), (owner, name) in itertools.product(engines, internals):
        Client.hits = 0
        engine = DryEngine(configs[asynchronous], on_device=True, windows=windows)
        owners = {
            "side": engine.side,
            "lookups": engine.side._lookups,
            "keys": engine.side._keys,
            "stores": engine.side.stores,
            "client": engine.client,
            "worker": engine.runner.connector._worker,
            "group": engine.runner.connector._worker._groups[0],
            "copies": engine.copies,
        }
        assert hasattr(owners[owner], name), f"{owner} has no {name} that could raise"
        setattr(owners[owner], name, planted)
        before, case = boundary.errors.total, (f"{owner}.{name}", asynchronous, windows)
        print("raises:", *case, file=sys.stderr)
        for hits in (0, 100):
            Client.hits = hits
            engine.add(1000, first=2000 * hits)
            engine.run(at_most=30)
            engine.scheduler.reset_prefix_cache()
        left = engine.left()
        assert engine.scheduler.get_num_unfinished_requests() == left["blocks"] == left["tracked"] == 0, case
        # When releasing fails, the server takes the leases back.
        assert left["leases"] == 0 or name == "release", case
        # The model waits for sections of synchronous loads only.
        assert boundary.errors.total > before or (name, asynchronous) == ("await_section", True), case


class Asleep(SleepModeBackend):
    """Notes when vLLM would unmap and map memory, in one list with the calls of the worker side."""

    events: ClassVar[list[str]] = []

    def suspend(self, level: int = 1) -> None:
        self.events.append("unmapped")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.events.append("unmapped")

    def resume(self, tags: list[str] | None = None) -> None:
        self.events.append("mapped")


def check_no_copy_touches_kv_memory_that_vllm_has_unmapped_in_its_sleep(folder: Path) -> None:
    """vLLM's worker sleeps in each of its ways, and wakes in one part or two, also where no connector hears of it."""
    SleepModeBackendFactory.register_backend("asleep", __name__, "Asleep")
    torch.accelerator.synchronize = lambda: None
    torch.accelerator.get_memory_info = lambda: (0, 1)
    config = vllm_config(folder)
    config.model_config.enable_sleep_mode = True
    config.model_config.sleep_mode_backend = "asleep"
    supports = getattr(LMCacheConnectorV1, "supports_sleep_mode", lambda config: True)
    assert supports(config.kv_transfer_config), "vLLM would refuse --enable-sleep-mode"
    once = ["suspend", "unmapped", "mapped", "resume"]
    ways: list[tuple[list[tuple[str, Any]], list[str]]] = [
        ([("sleep", 1), ("wake_up", None)], once),
        ([("discard", ("kv_cache",)), ("wake_up", ["kv_cache"])], once),
        # Weights wake first: KV memory is still unmapped then.
        (
            [("sleep", 1), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])],
            ["suspend", "unmapped", "mapped", "mapped", "resume"],
        ),
    ]
    for calls, events in ways:
        if not all(hasattr(Worker, method) for method, _ in calls):
            continue  # vLLM 0.30 has no `discard`
        copies = Copies(on_device=True)
        runner = Runner(config, copies, v2=False, drafts=False)
        follow_sleep(runner.connector, config.model_config)
        side = runner.connector._worker
        assert side is not None
        worker = SimpleNamespace(
            vllm_config=config,
            sleep_mode_backend=SleepModeBackendFactory.create_backend(config.model_config),
            synchronize_device=lambda: None,
            _sleep_saved_parameters={},
            _sleep_saved_buffers={},
            _sleep_saved_draft_buffers={},
        )
        Asleep.events.clear()
        note_calls(side, "suspend", Asleep.events)
        note_calls(side, "resume", Asleep.events)
        made = []
        for step, (method, argument) in enumerate(calls, 1):
            getattr(Worker, method)(worker, argument)
            plan = StepPlan(step)
            plan.stores = [store_of(step)]
            reported(runner, plan)
            made.append(copies.stored == [step])
        assert Asleep.events == events, calls
        assert made == [False] * (len(calls) - 1) + [True], calls


def note_calls(side: Any, name: str, events: list[str]) -> None:
    """From now on each call of the method appends its name to `events`."""
    method = getattr(side, name)

    def noted() -> None:
        events.append(name)
        method()

    setattr(side, name, noted)


def main(folder: Path) -> None:
    build.CacheClient = Client  # type: ignore[misc,assignment]
    model = model_folder(folder)
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for module in (sys.modules[__name__], versions_groups, versions_late, versions_tenants):
        for name in [name for name in vars(module) if name.startswith("check_")]:
            try:
                getattr(module, name)(model)
                failure = ""
            except Exception:
                failure = traceback.format_exc()
            print(json.dumps({"check": name, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
