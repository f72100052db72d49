"""Run by the Python of the vLLM environment: our connector inside vLLM's own classes, without a model or a server.

`versions_run.py FOLDER` checks the vLLM that it imports, so one script serves several versions; FOLDER is for a model's
configuration.  The scheduler, the KV cache groups and the order of the calls to the connector are vLLM's; client and
copies are stand-ins.  One JSON line per result: {"check": name, ...}.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import kvstrata.connectors.vllm as package
from kvstrata.client.calls import LoadItem, LoadJob, LookupCall, LookupResult, StoreJob, StoreOutcome
from kvstrata.connectors.vllm import boundary
from kvstrata.connectors.vllm import connector as ours
from kvstrata.connectors.vllm.connector import LMCacheConnectorV1, StepMetadata
from kvstrata.connectors.vllm.kv_view import check_groups
from kvstrata.connectors.vllm.metadata import Load, StepPlan, Store
from kvstrata.connectors.vllm.weights import loaded_weights
from kvstrata.connectors.vllm.worker import WorkerSide
from kvstrata.errors import ConfigError
from kvstrata.keys import ChunkHasher
from kvstrata.types import EXTENT, LeaseName, RequestIdentity, identity_root

BLOCK, CHUNK, BLOCKS, LAYERS = 128, 256, 64, 4
SLICE = b"\2" * 32
LAYER_NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]


# -- stand-ins -----------------------------------------------------------------------------------------------------


class Client:
    """Both sides' client: `hits` chunks of every prompt are in L1. Counts leases that were not given back."""

    hits = 0
    connected, has_l2, slices = True, False, (SLICE,)
    numbers = itertools.count(1)

    def __init__(self, settings: Any, *, layout: Any = None, **others: Any) -> None:
        self.settings, self.layout = settings, layout
        self.leases: set[LeaseName] = set()

    def start(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass

    def identity(self, request: RequestIdentity) -> Any:
        root = identity_root(self.layout, request)
        return SimpleNamespace(
            request=request,
            root=root,
            slices=self.slices,
            hasher=lambda media=(): ChunkHasher(root, CHUNK, media),
        )

    def peek(self, identity: Any, hasher: ChunkHasher) -> int:
        return min(Client.hits, hasher.n_chunks)

    def present(self, chain: bytes) -> list[bool] | None:
        return None

    def lookup(self, identity: Any, hasher: ChunkHasher, *, request_id: str, deadline_ms: int) -> LookupCall:
        found = self.peek(identity, hasher)
        lease = LeaseName(b"s" * 16, next(self.numbers), 1)
        call = LookupCall(lambda call: self.release([lease]))
        self.leases.add(lease)
        call.finish(LookupResult(found, lease, EXTENT.pack(0, 1, 0, 1, 0) * found, 1, ""))
        return call

    def release(self, leases: Sequence[Any], *, group: bool = False) -> None:
        self.leases.difference_update(leases)


class Copies:
    """A worker's mover: copies end at once. `fails` is how many of the next loads fail."""

    broken = False
    weights = "first"
    """Of the engine, which changes nothing of its copies."""

    def __init__(self, *, on_device: bool) -> None:
        # Where layers wait for their sections, a synchronous load goes on beside the model.
        self.sections = dict.fromkeys(LAYER_NAMES, 0) if on_device else {}
        self.fails = 0
        self.stored: list[int] = []

    def store(self, identity: Any, store: Store, blocks: Sequence[Sequence[int]]) -> StoreJob:
        self.stored.append(store.store_id)
        job = StoreJob(len(blocks), lambda job: None)
        job.ended_gather(len(blocks))
        job.settle(range(len(blocks)), StoreOutcome.STORED)
        return job

    def load(self, lease: LeaseName, items: Sequence[LoadItem], *, sync: bool) -> LoadJob:
        job = LoadJob(lambda job: None)
        failed = range(len(items)) if self.fails > 0 else ()
        self.fails -= 1
        job.finish(failed, 0)
        return job

    def await_section(self, job: LoadJob, section: int | None, timeout_s: float) -> bool:
        return True

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


# -- vLLM ----------------------------------------------------------------------------------------------------------


def model_folder(parent: Path) -> Path:
    """The configuration of a Llama of four layers; nobody reads weights."""
    folder = parent / "model"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "vocab_size": 32000,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def vllm_config(
    folder: Path, *, extra: dict[str, Any] | None = None, asynchronous: bool = False, **parallel: Any
) -> VllmConfig:
    """What an engine with our connector has."""
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = BLOCKS
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=8192)
    config = VllmConfig(
        model_config=model,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(**parallel),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=8192,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheConnectorV1",
            kv_connector_module_path="kvstrata.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"kvstrata.chunk_size": CHUNK, **(extra or {})},
        ),
    )
    # On the CPU vLLM takes it back.
    config.scheduler_config.async_scheduling = asynchronous
    return config


def cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(LAYER_NAMES, spec)]
    )


def worker_connector(config: VllmConfig, copies: Copies) -> LMCacheConnectorV1:
    """A worker's connector, as after `register_kv_caches`."""
    connector = LMCacheConnectorV1(config, KVConnectorRole.WORKER, cache_config())
    client = Client(None, layout=connector._layout)
    weights: Any = SimpleNamespace(initial="first", digest=lambda: copies.weights)
    connector._worker = WorkerSide(
        client,
        copies,
        slice_digest=SLICE,
        chunk_blocks=CHUNK // BLOCK,
        make_item=LoadItem,
        weights=weights,
    )
    return connector


class Runner:
    """The calls that one of vLLM's model runners makes to a worker's connector in one step, by vLLM's own code.

    `drafts`: the engine has a draft model, so vLLM may end the step's copies behind it.
    """

    def __init__(self, config: VllmConfig, copies: Copies, *, v2: bool, drafts: bool) -> None:
        self.config, self.copies, self.v2, self.drafts = config, copies, v2, drafts
        self.connector = worker_connector(config, copies)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        if v2:
            self.active = ActiveKVConnector.__new__(ActiveKVConnector)
            self.active.__dict__.update(
                vllm_config=config, kv_connector=self.connector, _pending_load_kwargs=None, _disabled=False
            )

    def step(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """What the scheduler gets to hear of the step. The model is a call for each of its layers."""
        with set_forward_context(None, self.config):
            return self._v2(output) if self.v2 else self._v1(output)

    def _forward(self) -> None:
        for name in LAYER_NAMES:
            self.connector.wait_for_layer_load(name)

    def _v1(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        self.connector.handle_preemptions(output.kv_connector_metadata)
        mixin = KVConnectorModelRunnerMixin
        defer = self.drafts and output.total_num_scheduled_tokens > 0
        with mixin.maybe_get_kv_connector_output(output, defer_finalize=defer) as said:
            self._forward()
        said = frozen(said)
        if defer:
            mixin.finalize_kv_connector()
        return said

    def _v2(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        if not output.total_num_scheduled_tokens:
            return self.active.no_forward(output).kv_connector_output
        self.active.pre_forward(output)
        self._forward()
        self.active.finish_forward()
        if self.drafts and hasattr(self.active, "finalize_step"):
            said = frozen(self.active.post_forward(output.finished_req_ids, defer_finalize=True))
            self.active.finalize_step()
            return said
        return self.active.post_forward(output.finished_req_ids)


def frozen(said: KVConnectorOutput | None) -> KVConnectorOutput | None:
    """As it is now: another process gets a copy, and nothing that is added to the object later."""
    return copy.deepcopy(said)


class Engine:
    """vLLM's scheduler with our connector, and one worker of a runner's kind."""

    def __init__(self, config: VllmConfig, *, on_device: bool = False, v2: bool = False) -> None:
        self.copies = Copies(on_device=on_device)
        self.scheduler = Scheduler(config, cache_config(), StructuredOutputManager(config), block_size=BLOCK)
        connector = self.scheduler.connector
        assert isinstance(connector, LMCacheConnectorV1) and connector._scheduler is not None
        self.connector, self.side = connector, connector._scheduler
        self.client: Any = self.side._client
        self.runner = Runner(config, self.copies, v2=v2, drafts=False)
        init_none_hash(sha256)
        self.names = itertools.count(0)
        self.plans: list[StepPlan] = []
        self.know_weights()

    def know_weights(self) -> None:
        """As after the first request of all, which waits for a step in which the workers tell their weights."""
        self.add(1)
        self.run()
        self.names = itertools.count(1)
        self.plans.clear()

    def add(self, n_tokens: int, first: int = 0, max_tokens: int = 3) -> Request:
        request = Request(
            f"r{next(self.names)}",
            list(range(first, first + n_tokens)),
            SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, Any]:
        """One step; what was planned and said, as it can be compared."""
        output = self.scheduler.schedule()
        plan: StepPlan = output.kv_connector_metadata.plan
        self.plans.append(plan)
        said = self.runner.step(output)
        names = list(output.num_scheduled_tokens)
        sampled = [[7] if self._samples(name) else [] for name in names]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=said,
            ),
        )
        told = {
            "scheduled": dict(output.num_scheduled_tokens),
            "loads": [
                [load.request_id, len(load.chain) // 32, load.asynchronous, load.blocks]
                for load in plan.loads
            ],
            "stores": [[store.request_id, len(store.chain) // 32, store.blocks] for store in plan.stores],
            "preempted": sorted(plan.preempted),
            "awaited": sorted(plan.awaited),
            "bad": sorted(said.invalid_block_ids) if said is not None else [],
            "received": sorted(said.finished_recving or ()) if said is not None else [],
            "sent": sorted(said.finished_sending or ()) if said is not None else [],
        }
        return {what: value for what, value in told.items() if value}

    def _samples(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)

    def run(self, at_most: int = 20) -> list[dict[str, Any]]:
        """Steps until nothing is left to do."""
        trace = []
        while self.scheduler.has_requests() and len(trace) < at_most:
            trace.append(self.step())
        return trace

    def left(self) -> dict[str, int]:
        """What is still held when all requests have ended."""
        manager = self.scheduler.kv_cache_manager
        held = BLOCKS - 1 - manager.block_pool.get_num_free_blocks()
        return {"blocks": held, "leases": len(self.client.leases), "tracked": len(self.side._tracked)}


# -- checks --------------------------------------------------------------------------------------------------------


def check_imports() -> Iterator[dict[str, Any]]:
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    for name in names:
        importlib.import_module(f"{package.__name__}.{name}")
    yield {"check": "imports", "modules": names}


def check_signatures() -> Iterator[dict[str, Any]]:
    """For each method of vLLM's that we have: whether ours can be called in every way that vLLM's can."""
    for name, own in vars(LMCacheConnectorV1).items():
        theirs = inspect.getattr_static(KVConnectorBase_V1, name, None)
        if name.startswith("_") or theirs is None:
            continue
        kinds = [type(each).__name__ for each in (own, theirs)]
        yield {"check": "signature", "method": name, "kinds": kinds, "wrong": unlike(own, theirs)}
    yield {"check": "abstract", "methods": sorted(LMCacheConnectorV1.__abstractmethods__)}


def unlike(own: Any, theirs: Any) -> str:
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


def check_traces(folder: Path) -> Iterator[dict[str, Any]]:
    """Step by step: a prompt in pieces, a hit, a failing hit, a reset in the middle, with either runner."""
    for v2 in (False, True):
        for asynchronous in (False, True):
            Client.hits = 0
            engine = Engine(
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
            engine.side._weights.can_tell = False  # else the request would wait for the workers to tell them
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
    """Engines whose order of steps decides what is safe: how they start, and from how many bytes on loads may wait."""
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
    config.aux_output_config.enable_return_routed_experts = True
    yield {"check": "start", "case": "routed experts", **started(config)}


def started(config: VllmConfig) -> dict[str, Any]:
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


def check_groups_of(folder: Path) -> Iterator[dict[str, Any]]:
    """What vLLM makes of layers of several kinds with our connector, and what we say to it."""
    module = "planning" if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") else "utils"
    grouping = importlib.import_module(f"vllm.v1.core.kv_cache_{module}")
    config = vllm_config(folder)
    size = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(**size), SlidingWindowSpec(sliding_window=512, **size)
    large = FullAttentionSpec(**size | {"head_size": 64})
    latent = MLAAttentionSpec(**size | {"num_kv_heads": 1, "head_size": 576})
    indexer = MLAAttentionSpec(**size | {"num_kv_heads": 1, "head_size": 132, "dtype": torch.uint8})
    for case, specs in {
        "full": [full] * 4,
        "latents": [latent] * 4,
        "latents and indexer": [latent, indexer] * 2,
        "full of two sizes": [full, large] * 2,
        "windows": [window] * 4,
        "windows and full": [window, window, window, full],
    }.items():
        groups = grouping.get_kv_cache_groups(config, dict(zip(LAYER_NAMES, specs, strict=True)))
        try:
            verdict: Any = check_groups(groups)
        except ConfigError as error:
            verdict = str(error)
        yield {
            "check": "groups",
            "case": case,
            "kinds": [type(group.kv_cache_spec).__name__ for group in groups],
            "verdict": verdict,
        }


def check_reports(folder: Path) -> Iterator[dict[str, Any]]:
    """What each of three steps says, of which the first has a synchronous load that fails.

    The second was planned before that was known.  Stores of both must not be made, that of the third must.
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


def reported(runner: Runner, plan: StepPlan) -> KVConnectorOutput | None:
    """What a step with this plan, in which one token is computed, says."""
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = StepMetadata(plan)
    output.has_sync_kv_loads = any(not load.asynchronous for load in plan.loads)
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"r": 1}, 1
    return runner.step(output)


def reports_of(said: KVConnectorOutput | None) -> list[Any]:
    meta = said.kv_connector_worker_meta if said is not None else None
    return meta.reports if meta is not None else []


def load_of(request: str, blocks: list[int]) -> Load:
    chunks = len(blocks) * BLOCK // CHUNK
    extents = EXTENT.pack(0, 1, 0, 1, 0) * chunks
    lease = LeaseName(b"s" * 16, 1, 1)
    return Load(request, lease, b"k" * 32 * chunks, extents, (SLICE,), blocks, asynchronous=False)


def store_of(store_id: int) -> Store:
    return Store(store_id, "r", RequestIdentity(), b"", b"k" * 32, [8, 9], b"")


def check_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """The adapter in the identity of a prompt's stores, after what vLLM does when weights may have changed."""
    Client.hits = 0
    engine = Engine(vllm_config(folder))

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
    yield {"check": "weights", "how": "while a request runs", "stale": engine.side._engine_stale}
    engine.run(at_most=400)
    yield stored("after it", reset_connector=True)


class Model(torch.nn.Module):
    """Parameters as vLLM has them: large, small, transposed, of one byte, empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.large = torch.nn.Parameter(torch.randn(512, 1024, dtype=torch.bfloat16), requires_grad=False)
        self.turned = torch.nn.Parameter(torch.randn(300, 700).t(), requires_grad=False)
        self.small = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.bytes = torch.nn.Parameter(torch.ones(5000, dtype=torch.uint8), requires_grad=False)
        self.fp8 = torch.nn.Parameter(torch.randn(64, 96).to(torch.float8_e4m3fn), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class ModelRunner:
    """Calls us as vLLM's model runners do."""

    def __init__(self) -> None:
        self.model = Model()

    def get_model(self) -> Model:
        return self.model

    def initialize_kv_cache(self) -> Any:
        return (lambda: [loaded_weights()])()[0]


def check_digests() -> Iterator[dict[str, Any]]:
    """Which changes of a model's parameters are seen in the digest of its samples."""
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
    yield {"check": "digest", "change": "all changed back", "seen": weights.digest() != weights.initial}
    yield {"check": "digest", "change": "no runner", "seen": loaded_weights() is not None}


SCHEDULER_INTERNALS = (
    ("side", "_know_weights"),
    ("side", "_weights_settled"),
    ("side", "_track"),
    ("side", "_identity"),
    ("side", "_prepare"),
    ("side", "_ask"),
    ("side", "_answered"),
    ("side", "matched_tokens"),
    ("side", "allocated"),
    ("side", "_load_of"),
    ("side", "plan_step"),
    ("side", "_plan_stores"),
    ("side", "_store_of"),
    ("side", "heard"),
    ("side", "_stored"),
    ("side", "finished"),
    ("side", "take_events"),
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
    ("worker", "_identity"),
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
    """Which methods that vLLM calls are guarded, and what they answer when nothing of ours works."""
    engine = Engine(vllm_config(folder))
    scheduler, worker = engine.connector, engine.runner.connector
    for name, own in vars(LMCacheConnectorV1).items():
        if name.startswith("_") or inspect.getattr_static(KVConnectorBase_V1, name, None) is None:
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
    """A prompt and a hit, with an internal function that always raises."""
    configs = {
        mode == "async": vllm_config(folder, extra={"kvstrata.load_mode": mode}) for mode in ("sync", "async")
    }
    for asynchronous, (owner, name) in itertools.product(configs, (*SCHEDULER_INTERNALS, *WORKER_INTERNALS)):
        Client.hits = 0
        engine = Engine(configs[asynchronous], on_device=True)
        owners = {
            "side": engine.side,
            "client": engine.client,
            "worker": engine.runner.connector._worker,
            "copies": engine.copies,
        }
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
            "raised": raised,
            "unfinished": engine.scheduler.get_num_unfinished_requests(),
            "left": engine.left(),
            "errors": boundary.errors.total - before,
        }


class Asleep(SleepModeBackend):
    """Tells when memory would be taken away and given back, beside what the worker does."""

    events: ClassVar[list[str]] = []

    def suspend(self, level: int = 1) -> None:
        self.events.append("unmapped")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.events.append("unmapped")

    def resume(self, tags: list[str] | None = None) -> None:
        self.events.append("mapped")


def check_sleep(folder: Path) -> Iterator[dict[str, Any]]:
    """The worker of vLLM goes to sleep, by each of its ways, and wakes in one part or in two."""
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
        copies = Copies(on_device=True)
        runner = Runner(config, copies, v2=False, drafts=False)
        runner.connector._follow_sleep()
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
        told(side, "suspend", Asleep.events)
        told(side, "resume", Asleep.events)
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


def told(side: Any, name: str, events: list[str]) -> None:
    """Note each call of a method in `events`."""
    method = getattr(side, name)

    def noted() -> None:
        events.append(name)
        method()

    setattr(side, name, noted)


def main(folder: Path) -> None:
    ours.CacheClient = Client  # type: ignore[misc,assignment]
    model = model_folder(folder)
    checks = [
        check_imports(),
        check_signatures(),
        check_traces(model),
        check_starts(model),
        check_groups_of(model),
        check_reports(model),
        check_sleep(model),
        check_weights(model),
        check_digests(),
        check_guards(model),
        check_errors(model),
    ]
    print(json.dumps({"check": "version", "version": vllm.__version__}), flush=True)
    for result in itertools.chain.from_iterable(checks):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
