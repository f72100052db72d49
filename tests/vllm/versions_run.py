"""Checks our connector inside vLLM's own classes (`versions_engine`); run by the Python of the vLLM environment.

`versions_run.py FOLDER` checks the vLLM that it imports, so one script serves several versions. FOLDER gets a model's
configuration. Prints one line of JSON per result: {"check": name, ...}; test_versions.py judges them.
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
from collections.abc import Iterator
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
from kvstrata.config.lmcache.interfaces import CONNECTORS
from kvstrata.connectors import boundary
from kvstrata.connectors.vllm import build
from kvstrata.connectors.vllm.adapters import LoadedAdapters
from kvstrata.connectors.vllm.compat.contract import NEEDED, missing_names
from kvstrata.connectors.vllm.compat.packing import arrangement_namer
from kvstrata.connectors.vllm.compat.sleep_calls import follow_sleep
from kvstrata.connectors.vllm.connector import LMCacheConnectorV1
from kvstrata.connectors.vllm.engine_facts import HARMLESS, engine_facts, section_facts
from kvstrata.connectors.vllm.identity import layout_identity
from kvstrata.connectors.vllm.metadata import StepPlan
from kvstrata.connectors.vllm.weights import find_runner, loaded_weights
from kvstrata.errors import ConfigError
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
from tests.vllm.versions_groups import check_group_traces, check_groups_of
from tests.vllm.versions_tenants import check_api, check_request_kinds


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


def check_imports() -> Iterator[dict[str, Any]]:
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    for name in names:
        importlib.import_module(f"{package.__name__}.{name}")
    yield {"check": "imports", "modules": names}


def check_names() -> Iterator[dict[str, Any]]:
    """What vLLM's factory finds under LMCache's names, with and without a module path."""
    load_general_plugins()
    for name, modules in CONNECTORS.items():
        for module in (None, *modules):
            config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
            found = KVConnectorFactory.get_connector_class(config)
            yield {"check": "name", "asked": name, "module": found.__module__}


def check_signatures() -> Iterator[dict[str, Any]]:
    """For each method of vLLM's base class that ours overrides: can ours be called in every way that vLLM's can?"""
    for name, own in vars(LMCacheConnectorV1).items():
        theirs = of_vllm(name)
        if name.startswith("_") or theirs is None:
            continue
        kinds = [type(each).__name__ for each in (own, theirs)]
        yield {"check": "signature", "method": name, "kinds": kinds, "wrong": unlike(own, theirs)}
    yield {"check": "abstract", "methods": sorted(LMCacheConnectorV1.__abstractmethods__)}


def check_needed(folder: Path) -> Iterator[dict[str, Any]]:
    """Which needed names are missing, and a step of an engine whose vLLM lacks one."""
    missing, path = missing_names(), "vllm.v1.outputs.KVConnectorOutput"
    NEEDED[path] += ("no_such_field",)
    config, caught = vllm_config(folder), boundary.errors.total
    scheduler = Scheduler(config, cache_config(), StructuredOutputManager(config), block_size=BLOCK)
    scheduler.add_request(Request("r", list(range(300)), SamplingParams(max_tokens=1), None))
    output = scheduler.schedule()
    worker = LMCacheConnectorV1(config, KVConnectorRole.WORKER, cache_config())
    worker.register_kv_caches({})
    NEEDED[path] = NEEDED[path][:-1]
    yield {
        "check": "needed",
        "missing": missing,
        "scheduled": output.num_scheduled_tokens,
        "planned": output.kv_connector_metadata.plan != StepPlan(0),
        "errors": boundary.errors.total - caught,
    }


def check_traces(folder: Path) -> Iterator[dict[str, Any]]:
    """Traces of steps with either runner: a prompt in pieces, a hit, a failing load, a reset while a request runs."""
    for v2 in (False, True):
        for asynchronous in (False, True):
            Client.hits = 0
            engine = DryEngine(
                vllm_config(folder, extra={"kvstrata.load_mode": "async" if asynchronous else "sync"}),
                on_device=True,
                v2=v2,
            )
            trace = {}
            engine.add(1000)
            trace["fresh"] = engine.run()
            Client.hits = 100
            engine.add(1000, first=2000)
            trace["hit"] = engine.run()
            engine.copies.fails = 1
            engine.add(1000, first=4000)
            trace["failed"] = engine.run()
            engine.copies.fails = 0
            engine.add(1000, first=6000, max_tokens=50)
            engine.step()
            if asynchronous:
                engine.step()
            engine.side._weights.can_tell = False  # otherwise the request would wait for the workers' digests
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.copies.fails = 1
            trace["reset"] = [engine.step() for _ in range(4)]
            engine.run(at_most=60)
            yield {
                "check": "trace",
                "runner": "v2" if v2 else "v1",
                "asynchronous": asynchronous,
                **trace,
                "left": engine.left(),
            }


def check_starts(folder: Path) -> Iterator[dict[str, Any]]:
    """Engines with several orders of steps: whether each starts, and up to how many bytes it loads synchronously."""
    for case, options in {
        "one step": {},
        "asynchronous scheduling": {"asynchronous": True},
        "two stages": {"pipeline_parallel_size": 2},
    }.items():
        for load_mode in ("auto", "sync"):
            config = vllm_config(folder, extra={"kvstrata.load_mode": load_mode}, **options)
            yield {"check": "start", "case": case, "load_mode": load_mode, **started(config)}
    for v2 in (False, True):
        config = vllm_config(folder, pipeline_parallel_size=2)
        config.speculative_config = SimpleNamespace(model="draft", method="suffix")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
        yield {"check": "start", "case": "two stages with drafts", "v2": v2, **started(config)}
    del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
    config = vllm_config(folder)
    returning: Any = getattr(config, "aux_output_config", config.model_config)
    returning.enable_return_routed_experts = True
    yield {"check": "start", "case": "routed experts", **started(config)}


def started(config: VllmConfig) -> dict[str, Any]:
    """What the scheduler side of such an engine may do, or the field for which it is refused."""
    try:
        side = LMCacheConnectorV1(config, KVConnectorRole.SCHEDULER, cache_config())._scheduler
    except ConfigError as error:
        return {"refused": error.field}
    assert side is not None
    return {
        "sync_load_bytes": side._sync_load_bytes,
        "may_load": side._may_load,
        "may_store": side._may_store,
    }


def check_reports(folder: Path) -> Iterator[dict[str, Any]]:
    """What the scheduler hears of three steps, the first of which has a synchronous load that fails.

    The second step is planned before the failure is known. The stores of both must be dropped, that of the third made.
    """
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
        yield {
            "check": "reports",
            "runner": "v2" if v2 else "v1",
            "drafts": drafts,
            "on_device": on_device,
            "bad": [sorted(each.invalid_block_ids) if each else [] for each in said],
            "failures": [[report.failures for report in reports_of(each)] for each in said],
            "dropped": sorted(
                store for each in said for report in reports_of(each) for store in report.dropped
            ),
            "stored": sorted(
                store for each in said for report in reports_of(each) for store, _ in report.stored
            ),
            "sent": [sorted(each.finished_sending or ()) if each else [] for each in said],
            "made": copies.stored,
        }


def check_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """The adapter in the identity of a prompt's stores, after each event at which weights may have changed."""
    Client.hits = 0
    engine = DryEngine(vllm_config(folder))

    def stored(how: str, **reset: bool) -> dict[str, Any]:
        if how != "at the start":
            engine.scheduler.reset_prefix_cache(**reset)
        engine.plans.clear()
        engine.add(600)
        trace = engine.run()
        adapters = {store.identity.adapter for plan in engine.plans for store in plan.stores}
        return {"check": "weights", "how": how, "adapters": sorted(adapters), "waited": trace[0] == {}}

    yield stored("at the start")
    yield stored("prefix cache emptied")
    yield stored("paused", reset_running_requests=True, reset_connector=True)
    engine.copies.weights = "second"
    yield stored("prefix cache emptied, new weights")
    yield stored("paused, the same new weights", reset_running_requests=True, reset_connector=True)
    engine.copies.weights = "first"
    yield stored("paused, first weights", reset_running_requests=True, reset_connector=True)
    engine.add(1000, first=5000, max_tokens=300)
    engine.step()
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    yield {"check": "weights", "how": "while a request runs", "stale": engine.side._keys.engine_stale}
    engine.run(at_most=400)
    yield stored("after it", reset_connector=True)


def check_digests() -> Iterator[dict[str, Any]]:
    """Which changes of a model's parameters change the digest of its weights."""
    runner = ModelRunner()
    weights = runner.initialize_kv_cache()
    yield {"check": "digest", "change": "none", "seen": weights.digest() != weights.initial}
    other = ModelRunner().initialize_kv_cache()
    yield {"check": "digest", "change": "another start", "seen": other.initial != weights.initial}
    for name in ("large", "turned", "small", "fp8", "bytes"):
        parameter = getattr(runner.model, name)
        before = parameter.data.clone()
        wide = parameter.data.to(torch.float32)
        parameter.data.copy_((wide * 1.01 + (wide == 1)).to(parameter.dtype))
        yield {"check": "digest", "change": name, "seen": weights.digest() != weights.initial}
        parameter.data.copy_(before)
    for name, tensor in (
        ("scale", runner.model.scale),
        ("state", runner.model.state),
        ("packed", runner.model.packed.kept[0]),
    ):
        tensor.mul_(2)
        yield {"check": "digest", "change": name, "seen": weights.digest() != weights.initial}
        tensor.div_(2)
    yield {"check": "digest", "change": "all changed back", "seen": weights.digest() != weights.initial}
    yield {
        "check": "digest",
        "change": "no runner",
        "seen": loaded_weights(find_runner(), named=True) is not None,
    }
    unnamed = runner.initialize_kv_cache(named=False)
    yield {
        "check": "unnamed",
        "how": "load format",
        "initial": unnamed.initial,
        "told": unnamed.digest() != "",
    }
    runner.model.secondary_weights = ["hub/other"]
    unnamed = runner.initialize_kv_cache()
    yield {
        "check": "unnamed",
        "how": "of its own",
        "initial": unnamed.initial,
        "told": unnamed.digest() != "",
    }
    del runner.model.packed.input_size_per_partition
    yield {"check": "unnamed", "how": "packed", "initial": unnamed.initial, "told": unnamed.digest() != ""}


def check_adapters() -> Iterator[dict[str, Any]]:
    """Under which circumstances a worker has the LoRA adapter that it told the scheduler side of."""
    runner, lora = ModelRunner(), LoRARequest("one", 1, "/adapters/one")
    adapters = LoadedAdapters(runner)
    first = adapters.digest(1, lora)

    def still(how: str) -> dict[str, Any]:
        return {"check": "adapter", "how": how, "still": adapters.still(1)}

    yield still("loaded")
    runner.adapters.clear()
    yield still("evicted")
    runner.add_lora(lora)
    yield still("loaded again")
    runner.files = 2.0
    yield still("files replaced")
    runner.add_lora(lora)
    yield still("replaced in place")
    second = adapters.digest(2, lora)
    runner.adapters.clear()
    runner.files = 1.0
    other = LoRARequest("other", 7, "/adapters/other")
    yield {"check": "adapter", "how": "equal elsewhere", "still": adapters.digest(3, other) == first}
    yield {"check": "adapter", "how": "other content", "still": second == first}
    runner.lora_config.target_modules = ["k_proj"]
    yield {"check": "adapter", "how": "other layers", "still": adapters.digest(4, lora) == first}
    runner.add_lora = None  # type: ignore[method-assign,assignment]
    unread = LoRARequest("broken", 8, "/adapters/broken")
    yield {"check": "adapter", "how": "unreadable", "still": adapters.digest(5, unread) != ""}
    yield {"check": "adapter", "how": "never asked", "still": adapters.still(6)}


SECTIONS = {
    "model_config": ModelConfig,
    "multimodal_config": MultiModalConfig,
    "load_config": LoadConfig,
    "attention_config": AttentionConfig,
    "mamba_config": MambaConfig,
}


def check_settings(folder: Path) -> Iterator[dict[str, Any]]:
    """For each setting of vLLM that an identity may depend on: whether it does, changed alone."""
    config = vllm_config(folder)
    config.model_config.multimodal_config = MultiModalConfig()

    def identity() -> str:
        return layout_identity(config, kv_dtype="auto", chunk_tokens=CHUNK).weights

    before = identity()
    again = vllm_config(folder)
    again.model_config.multimodal_config = MultiModalConfig(
        mm_processor_kwargs={}, media_io_kwargs={}, mm_encoder_tp_mode="weights", mm_processor_cache_gb=4
    )
    written_out = layout_identity(again, kv_dtype="auto", chunk_tokens=CHUNK).weights
    yield {"check": "same settings", "same": written_out == before}
    facts = engine_facts(again)
    for section, owner in (("model_config", again), ("multimodal_config", again.model_config)):
        facts[section] = section_facts(section, getattr(owner, section))
    yield {"check": "default settings", "facts": facts}
    for section, kind in SECTIONS.items():
        owner: Any = config.model_config if section == "multimodal_config" else config
        settings = getattr(owner, section)
        for field in dataclasses.fields(kind):
            value = getattr(settings, field.name, None)
            if field.name not in ("model", "hf_config", "hf_text_config", "multimodal_config"):
                object.__setattr__(settings, field.name, "changed")
                seen = identity() != before
                object.__setattr__(settings, field.name, value)
                listed = field.name in HARMLESS[section]
                yield {"check": "setting", "name": f"{section}.{field.name}", "seen": seen, "listed": listed}
    yield {"check": "same settings", "same": identity() == before}


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


def check_packing() -> Iterator[dict[str, Any]]:
    """How arrangements are named of layers that pack alike, otherwise, or cannot be asked, in two versions of vLLM."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
    half = dataclasses.replace(spec, num_kv_heads=2)
    one, other = arrangement_namer("0.98"), arrangement_namer("0.99")
    layer = Packs()
    yield {
        "check": "packing",
        "alike": [one("CPU_ATTN", spec, layer), other("CPU_ATTN", spec, Packs())],
        "half": [
            [arrangement_namer("0.99")("CPU_ATTN", each, Packs(mixed=mixed)) for each in (spec, half)]
            for mixed in (False, True)
        ],
        "turned": arrangement_namer("0.99")("CPU_ATTN", spec, Packs(turned=1)),
        "not_asked": [one("CPU_ATTN", spec, SimpleNamespace()), other("SOMETHING", spec, Packs())],
        "asked": [one("CPU_ATTN", spec, layer) and layer.asked, layer.asked],
    }


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


def check_guards(folder: Path) -> Iterator[dict[str, Any]]:
    """Which methods that vLLM calls are guarded, and what those answer when everything behind them raises."""
    engine = DryEngine(vllm_config(folder))
    scheduler, worker = engine.connector, engine.runner.connector
    for name, own in vars(LMCacheConnectorV1).items():
        if name.startswith("_") or of_vllm(name) is None:
            continue
        result: dict[str, Any] = {"check": "guard", "method": name, "guarded": hasattr(own, "guarded")}
        if result["guarded"]:
            arguments = [None] * (len(inspect.signature(own).parameters) - 1 - (name == "start_load_kv"))
            answers = []
            for connector in (scheduler, worker):
                connector._scheduler = connector._worker = Broken()  # type: ignore[assignment]
                answers.append(getattr(connector, name)(*arguments))
            result["answers"] = [repr(answer) for answer in answers]
        yield result


def check_errors(folder: Path) -> Iterator[dict[str, Any]]:
    """A prompt and a hit while one internal function always raises; each function once."""
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
        before, raised = boundary.errors.total, ""
        try:
            for hits in (0, 100):
                Client.hits = hits
                engine.add(1000, first=2000 * hits)
                engine.run(at_most=30)
                engine.scheduler.reset_prefix_cache()
        except Exception as error:
            raised = repr(error)
        yield {
            "check": "error",
            "internal": f"{owner}.{name}",
            "asynchronous": asynchronous,
            "windows": windows,
            "raised": raised,
            "unfinished": engine.scheduler.get_num_unfinished_requests(),
            "left": engine.left(),
            "errors": boundary.errors.total - before,
        }


class Asleep(SleepModeBackend):
    """Notes when vLLM would unmap and map memory, in one list with the calls of the worker side."""

    events: ClassVar[list[str]] = []

    def suspend(self, level: int = 1) -> None:
        self.events.append("unmapped")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.events.append("unmapped")

    def resume(self, tags: list[str] | None = None) -> None:
        self.events.append("mapped")


def check_sleep(folder: Path) -> Iterator[dict[str, Any]]:
    """vLLM's worker goes to sleep in each of its ways, and wakes in one part or in two."""
    SleepModeBackendFactory.register_backend("asleep", __name__, "Asleep")
    torch.accelerator.synchronize = lambda: None
    torch.accelerator.get_memory_info = lambda: (0, 1)
    config = vllm_config(folder)
    config.model_config.enable_sleep_mode = True
    config.model_config.sleep_mode_backend = "asleep"
    supports = getattr(LMCacheConnectorV1, "supports_sleep_mode", lambda config: True)(
        config.kv_transfer_config
    )
    for way, calls in {
        "sleep": [("sleep", 1), ("wake_up", None)],
        "discard": [("discard", ("kv_cache",)), ("wake_up", ["kv_cache"])],
        "in parts": [("sleep", 1), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])],
    }.items():
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
        yield {
            "check": "sleep",
            "way": way,
            "events": list(Asleep.events),
            "stores": made,
            "supports": supports,
        }


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
    checks = [
        check_imports(),
        check_names(),
        check_signatures(),
        check_needed(model),
        check_traces(model),
        check_starts(model),
        check_groups_of(model),
        check_group_traces(model),
        check_reports(model),
        check_sleep(model),
        check_weights(model),
        check_digests(),
        check_adapters(),
        check_settings(model),
        check_packing(),
        check_guards(model),
        check_errors(model),
        check_api(),
        check_request_kinds(model, folder),
    ]
    print(json.dumps({"check": "version", "version": vllm.__version__}), flush=True)
    for result in itertools.chain.from_iterable(checks):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
