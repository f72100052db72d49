"""What `versions_run.py` adds to the engine without a model (`kvstrata.connectors.vllm.compat.dry_engine`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvstrata.connectors.vllm.compat.dry_engine import BLOCK, CHUNK, SLICE, Runner
from kvstrata.connectors.vllm.connector import StepMetadata
from kvstrata.connectors.vllm.metadata import Load, StepPlan, Store
from kvstrata.connectors.vllm.weights import find_runner, loaded_weights
from kvstrata.types import EXTENT, LeaseName, RequestIdentity


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
