"""vLLM's scheduler and model runners around our connector: without a model, a server or a GPU.

The scheduler and the order of the calls to the connector are vLLM's; client and copies are stand-ins.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvstrata.client.handles import LoadItem, LoadJob, StoreJob, StoreOutcome
from kvstrata.connectors.vllm.connector import LMCacheConnectorV1, StepMetadata
from kvstrata.connectors.vllm.metadata import Load, StepPlan, Store
from kvstrata.connectors.vllm.weights import find_runner, loaded_weights
from kvstrata.connectors.vllm.worker import GroupSide, WorkerSide
from kvstrata.types import EXTENT, LeaseName, RequestIdentity
from tests.harness.scheduler_side import FakeClient

BLOCK, CHUNK, BLOCKS, LAYERS = 128, 256, 64, 4
SLICE = b"\2" * 32
LAYER_NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]


class Client(FakeClient):
    """The client of both sides: `hits` chunks of every prompt are in L1."""

    hits = 0

    def __init__(self, settings: Any, *, layout: Any = None, **others: Any) -> None:
        super().__init__(Client.hits, slices=(SLICE,))
        self.settings, self.layout, self.chunk_tokens = settings, layout, CHUNK
        del self.hits  # that of the class counts

    def start(self) -> None:
        pass

    def peek_whole(self, identity: Any, chain: bytes) -> int:
        return int(self.peek(identity, chain))

    def release(self, leases: Sequence[LeaseName], *, group: bool = False) -> None:
        """Its workers have the leases too, and give them back at any time."""
        self.leases = [lease for lease in self.leases if lease not in leases]


class Copies:
    """Stands for a worker's mover: each copy ends at once. The next `fails` loads fail."""

    broken = False
    weights = "first"
    """What the digest of the engine's weights says; copies do not depend on it."""
    replaced: set[int] | frozenset[int] = frozenset()
    """Questions about LoRA adapters in whose place the worker has another adapter by now."""

    def __init__(self, *, on_device: bool) -> None:
        # With sections, layers wait for their own section, and a synchronous load goes on beside the model.
        self.sections = dict.fromkeys(LAYER_NAMES, 0) if on_device else {}
        self.fails = 0
        self.stored: list[int] = []

    def store(self, identity: Any, store: Any, blocks: Sequence[Sequence[int]]) -> StoreJob:
        self.stored.append(store.store_id)
        job = StoreJob(len(blocks), lambda job: None)
        job.ended_gather(len(blocks))
        job.settle(range(len(blocks)), StoreOutcome.STORED)
        return job

    def load(self, identity: Any, lease: LeaseName, items: Sequence[LoadItem], *, sync: bool) -> LoadJob:
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


def model_folder(parent: Path) -> Path:
    """A folder with the configuration of a Llama of four layers, and a file of weights without weights."""
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
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def vllm_config(
    folder: Path, *, extra: dict[str, Any] | None = None, asynchronous: bool = False, **parallel: Any
) -> VllmConfig:
    """vLLM's configuration of an engine with our connector."""
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = BLOCKS
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=8192)
    config = VllmConfig(
        model_config=model,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(**parallel),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=512, max_model_len=8192, is_encoder_decoder=False
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheConnectorV1",
            kv_connector_module_path="kvstrata.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "kvstrata.chunk_size": CHUNK,
                "kvstrata.save_unfull_chunk": False,
                **(extra or {}),
            },
        ),
    )
    # vLLM has switched this off for the CPU.
    config.scheduler_config.async_scheduling = asynchronous
    return config


def cache_config(*, windows: bool = False) -> KVCacheConfig:
    """One group of full attention, with `windows` and one of sliding windows."""
    size = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(LAYER_NAMES, FullAttentionSpec(**size))]
    if windows:
        spec = SlidingWindowSpec(sliding_window=CHUNK, **size)
        groups.append(KVCacheGroupSpec([f"{name}.window" for name in LAYER_NAMES], spec))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def worker_connector(config: VllmConfig, copies: Copies, *, windows: bool = False) -> LMCacheConnectorV1:
    """A worker's connector in its state after `register_kv_caches`."""
    connector = LMCacheConnectorV1(config, KVConnectorRole.WORKER, cache_config(windows=windows))
    client: Any = Client(None, layout=connector._setup.layout)
    weights: Any = SimpleNamespace(initial="first", digest=lambda: copies.weights)
    adapters: Any = SimpleNamespace(
        digest=lambda number, lora: f"weights at {lora.lora_path}",
        still=lambda number: number not in copies.replaced,
    )
    connector._worker = WorkerSide(
        [
            GroupSide(client, copies, slice_digest=SLICE, record_blocks=group.record_blocks)
            for group in connector._setup.groups
        ],
        by_request=windows,
        weights=weights,
        adapters=adapters,
    )
    return connector


class Runner:
    """Makes vLLM's own code call a worker's connector as one of its model runners does in a step.

    `v2` chooses the runner. `drafts`: the engine has a draft model, after which vLLM may end the step's copies.
    """

    def __init__(
        self, config: VllmConfig, copies: Copies, *, v2: bool, drafts: bool, windows: bool = False
    ) -> None:
        self.config, self.copies, self.v2, self.drafts = config, copies, v2, drafts
        self.connector = worker_connector(config, copies, windows=windows)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        if v2:
            self.active = ActiveKVConnector.__new__(ActiveKVConnector)
            self.active.__dict__.update(
                vllm_config=config, kv_connector=self.connector, _pending_load_kwargs=None, _disabled=False
            )

    def step(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """Run one step; returns what the scheduler hears of it. The model only waits for each of its layers."""
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
    """A copy, as another process would get it: nothing that is added to the object later is in it."""
    return copy.deepcopy(said)


class DryEngine:
    """vLLM's scheduler with our connector, and one worker behind a `Runner`."""

    def __init__(
        self, config: VllmConfig, *, on_device: bool = False, v2: bool = False, windows: bool = False
    ) -> None:
        self.copies = Copies(on_device=on_device)
        kv = cache_config(windows=windows)
        self.scheduler = Scheduler(config, kv, StructuredOutputManager(config), block_size=BLOCK)
        connector = self.scheduler.connector
        assert isinstance(connector, LMCacheConnectorV1) and connector._scheduler is not None
        self.connector, self.side = connector, connector._scheduler
        self.client: Any = self.side._client
        self.runner = Runner(config, self.copies, v2=v2, drafts=False, windows=windows)
        init_none_hash(sha256)
        self.names = itertools.count(0)
        self.plans: list[StepPlan] = []
        self.know_weights()

    def know_weights(self) -> None:
        """Run the first request, which waits for a step in which the workers tell their weights."""
        self.add(1)
        self.run()
        self.names = itertools.count(1)
        self.plans.clear()

    def add(
        self,
        n_tokens: int,
        first: int = 0,
        max_tokens: int = 3,
        *,
        prompt: Sequence[int] | None = None,
        params: Any = None,
        **fields: Any,
    ) -> Request:
        """Hand a request to the scheduler. `params`: its `kv_transfer_params`; `fields`: of vLLM's Request."""
        extra = None if params is None else {"kv_transfer_params": params}
        request = Request(
            f"r{next(self.names)}",
            list(range(first, first + n_tokens) if prompt is None else prompt),
            SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            **fields,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, Any]:
        """Run one step; returns what was planned and reported, in comparable form, without empty entries."""
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
            "not_loaded": sorted(said.failed_recving) if said is not None else [],
            "sent": sorted(said.finished_sending or ()) if said is not None else [],
        }
        return {what: value for what, value in told.items() if value}

    def _samples(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)

    def run(self, at_most: int = 20) -> list[dict[str, Any]]:
        trace: list[dict[str, Any]] = []
        while self.scheduler.has_requests() and len(trace) < at_most:
            trace.append(self.step())
        return trace

    def left(self) -> dict[str, int]:
        """Counts of blocks, leases and lookups that are still held."""
        manager = self.scheduler.kv_cache_manager
        held = BLOCKS - 1 - manager.block_pool.get_num_free_blocks()
        return {"blocks": held, "leases": len(self.client.leases), "tracked": len(self.side._lookups.tracked)}


def reported(runner: Runner, plan: StepPlan) -> KVConnectorOutput | None:
    """Run a step with this plan that computes one token; returns what the scheduler hears of it."""
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
    return Load(
        request, lease, RequestIdentity(), b"k" * 32 * chunks, extents, (SLICE,), blocks, asynchronous=False
    )


def store_of(store_id: int) -> Store:
    return Store(store_id, "r", RequestIdentity(), b"", b"k" * 32, [8, 9], b"")


class Model(torch.nn.Module):
    """Parameters of the kinds that vLLM has: large, small, transposed, of one byte, empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.large = torch.nn.Parameter(torch.randn(512, 1024, dtype=torch.bfloat16), requires_grad=False)
        self.turned = torch.nn.Parameter(torch.randn(300, 700).t(), requires_grad=False)
        self.small = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.bytes = torch.nn.Parameter(torch.ones(5000, dtype=torch.uint8), requires_grad=False)
        self.fp8 = torch.nn.Parameter(torch.randn(64, 96).to(torch.float8_e4m3fn), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("state", torch.ones(3), persistent=False)
        self.packed = Packed()


class Packed(torch.nn.Module):
    """A linear layer as vLLM packs it for the CPU: its parameter is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size_per_partition = 100
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.kept = [torch.randn(40, 100)]

    def cpu_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.kept[0], bias)


class ModelRunner:
    """Calls `find_runner` from the method from which vLLM's model runners call it; has one LoRA adapter loaded."""

    def __init__(self) -> None:
        self.model = Model()
        self.lora_manager = self
        self._adapter_manager: Any = self
        self.lora_config = SimpleNamespace(target_modules=["q_proj"])
        self.adapters: dict[int, Any] = {}
        self.files = 1.0

    def get_model(self) -> Model:
        return self.model

    def get_adapter(self, lora_id: int) -> Any:
        return self.adapters.get(lora_id)

    def add_lora(self, lora: LoRARequest) -> None:
        layer = LoRALayerWeights(
            "q", 8, 16, torch.full((8, 20), self.files), torch.ones(20, 8), scaling=self.files
        )
        self.adapters[lora.lora_int_id] = LoRAModel(lora.lora_int_id, 8, {"q": layer})

    def initialize_kv_cache(self, *, named: bool = True) -> Any:
        return (lambda: [loaded_weights(find_runner(), named=named)])()[0]
