"""TensorRT-LLM's connector interface, and an engine that calls it, without TensorRT-LLM, torch or a GPU.

The base classes and the two classes of data are written from the published signatures of
`tensorrt_llm/_torch/pyexecutor/connectors/kv_cache_connector.py` (main branch, 2026); TensorRT-LLM itself was never
run.  The engine has paged blocks in host memory, whose bytes follow from the tokens up to the end of the block, so that
wrong KV is seen.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import math
import pickle
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

BLOCK_TOKENS = 4
CHUNK_TOKENS = 8
LAYERS = 3
LAYER_BYTES = 64
RANK = {"value": 0}
"""The rank that `mpi_rank()` answers."""


class Worker(ABC):
    """`KvCacheConnectorWorker`."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...
    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...
    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class Scheduler(ABC):
    """`KvCacheConnectorScheduler`."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...
    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...
    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


@dataclasses.dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclasses.dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = dataclasses.field(default_factory=list)
    cached_requests: list[RequestData] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class LlmRequest:
    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    lora_task_id: int | None = None

    def get_tokens(self, beam: int) -> list[int]:
        return self.tokens


@dataclasses.dataclass
class CacheConfig:
    tokens_per_block: int = BLOCK_TOKENS
    dtype: str = "auto"


@dataclasses.dataclass
class Arguments:
    """`TorchLlmArgs`, as far as it is read."""

    model: str = "org/model"
    revision: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_attention_dp: bool = False
    kv_cache_config: CacheConfig = dataclasses.field(default_factory=CacheConfig)


class Tensor:
    """The tensor (blocks, layers, K and V, elements) with the KV of one rank."""

    dtype = "torch.bfloat16"

    def __init__(self, blocks: int, kind: str = "cpu") -> None:
        self.shape = (blocks, LAYERS, 2, LAYER_BYTES // 4)
        self.device = types.SimpleNamespace(type=kind, index=0)
        self._block_bytes = LAYERS * LAYER_BYTES
        self._memory = ctypes.create_string_buffer(blocks * self._block_bytes)

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(4))

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return ctypes.addressof(self._memory)

    def write(self, block: int, data: bytes) -> None:
        ctypes.memmove(self.data_ptr() + block * self._block_bytes, data, self._block_bytes)

    def read(self, block: int) -> bytes:
        return ctypes.string_at(self.data_ptr() + block * self._block_bytes, self._block_bytes)


class Engine:
    """An executor that serves one request at a time; blocks come from a list, last freed first used."""

    def __init__(
        self,
        connectors: Any,
        *,
        ranks: int = 1,
        blocks: int = 64,
        gpu: Any = None,
        **arguments: Any,
    ) -> None:
        """`gpu` is a `SimulatedGpu` that the blocks count as memory of; None: they are in host memory."""
        args = Arguments(tensor_parallel_size=ranks, **arguments)
        self.stream = None if gpu is None else types.SimpleNamespace(cuda_stream=gpu.stream())
        self.scheduler = connectors.KvstrataScheduler(args)
        self.tensors = [Tensor(blocks, "cpu" if gpu is None else "cuda") for _ in range(ranks)]
        for tensor in self.tensors if gpu is not None else ():
            gpu.adopt(tensor.data_ptr(), blocks * LAYERS * LAYER_BYTES)
        self.workers = []
        for rank, tensor in enumerate(self.tensors):
            RANK["value"] = rank
            worker = connectors.KvstrataWorker(args)
            worker.register_kv_caches(tensor)
            self.workers.append(worker)
        self.free = list(range(blocks))
        self.held: dict[int, list[int]] = {}
        """Blocks of finished requests that the workers still read."""
        self.step_with(SchedulerOutput())

    def close(self) -> None:
        self.scheduler._side.close()
        for worker in self.workers:
            worker._side.close()

    def connected(self) -> bool:
        """Whether scheduler and workers have a server that knows all their slices."""
        client = self.scheduler._side._client
        mine = [worker._side._opened[0]._client for worker in self.workers]
        if not all(each.connected for each in (client, *mine)):
            return False
        from kvstrata.types import RequestIdentity

        return all(each.identity(RequestIdentity()).ready for each in (client, *mine))

    def serve(
        self,
        request: LlmRequest,
        *,
        computed: int = 0,
        answers: int = 0,
        prefill: int = 10_000,
        cancel: int | None = None,
    ) -> int:
        """Serve a request; returns the tokens that it took from the cache.

        The engine has its first `computed` tokens itself, computes `prefill` prompt tokens in a step, then `answers`
        tokens; of what it is promised, it does not use the tokens from number `cancel` on.
        """
        matched, asynchronous = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert not asynchronous
        if cancel is not None and matched:
            self.scheduler.cancel_load(request, cancel, computed + matched)
            matched = max(0, cancel - computed)
        prompt = len(request.tokens)
        assert computed + matched < prompt, "the last token of a prompt is computed"
        blocks = [self.free.pop() for _ in range(-(-(prompt + answers) // BLOCK_TOKENS))]
        for block in blocks:
            for tensor in self.tensors:
                tensor.write(block, bytes(LAYERS * LAYER_BYTES))
        self.compute(request.tokens, blocks, 0, computed)
        self.scheduler.update_state_after_alloc(request, blocks)
        at, new = computed + matched, True
        while at < prompt + answers:
            if at >= prompt:
                request.tokens.append(1000 + at)
            size = min(prefill, prompt - at) if at < prompt else 1
            data = RequestData(
                request.request_id,
                request.tokens[:] if new else request.tokens[prompt:][-1:] if at >= prompt else [],
                blocks[:] if new else [],
                at - (matched if new else 0),
                size,
            )
            self.step_with(
                SchedulerOutput([data], []) if new else SchedulerOutput([], [data]),
                lambda at=at, size=size: self.compute(request.tokens, blocks, at, at + size),
            )
            if new:
                self.check(request.tokens, blocks, computed + matched)
            at, new = at + size, False
        self.check(request.tokens, blocks, prompt)
        if self.scheduler.request_finished(request, blocks):
            self.held[request.request_id] = blocks
            self.poll([request.request_id])
        else:
            self.free.extend(blocks)
        return matched

    def step_with(self, output: SchedulerOutput, compute: Any = lambda: None) -> None:
        """One forward pass of all ranks."""
        plan = self.scheduler.build_connector_meta(output)
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(pickle.dumps(plan)))
            worker.start_load_kv(self.stream)
        compute()
        for worker in self.workers:
            worker.wait_for_save(self.stream)

    def poll(self, finished: Sequence[int] = ()) -> None:
        """Ask the workers which finished requests they are done with, and free their blocks."""
        done = [set(worker.get_finished(list(finished), [])[0]) for worker in self.workers]
        for worker, each in zip(self.workers, done, strict=True):
            worker.done = getattr(worker, "done", set()) | each
        for request in set.intersection(*(worker.done for worker in self.workers)) & set(self.held):
            self.free.extend(self.held.pop(request))

    def compute(self, tokens: list[int], blocks: list[int], start: int, end: int) -> None:
        """Write the KV of whole blocks of tokens [start, end), as a model would."""
        for number in range(start // BLOCK_TOKENS, end // BLOCK_TOKENS):
            for rank, tensor in enumerate(self.tensors):
                tensor.write(blocks[number], kv_of(tokens, number, rank))

    def check(self, tokens: list[int], blocks: list[int], end: int) -> None:
        """Assert that whole blocks of the first `end` tokens hold their KV."""
        for number in range(end // BLOCK_TOKENS):
            for rank, tensor in enumerate(self.tensors):
                assert tensor.read(blocks[number]) == kv_of(tokens, number, rank), f"block {number} is wrong"


def kv_of(tokens: list[int], number: int, rank: int) -> bytes:
    """The KV of block `number` of a prompt, in one rank."""
    seed = hashlib.sha256(repr((tokens[: (number + 1) * BLOCK_TOKENS], rank)).encode()).digest()
    return (seed * (LAYERS * LAYER_BYTES // len(seed) + 1))[: LAYERS * LAYER_BYTES]


def modules() -> Iterator[Any]:
    """Put the double in TensorRT-LLM's place and yield our package; all are forgotten afterwards."""
    base = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"__version__": "1.3.0", "__path__": []},
        "tensorrt_llm._utils": {"mpi_rank": lambda: RANK["value"]},
        "tensorrt_llm._torch": {"__path__": []},
        "tensorrt_llm._torch.pyexecutor": {"__path__": []},
        "tensorrt_llm._torch.pyexecutor.connectors": {"__path__": []},
        base: {"KvCacheConnectorScheduler": Scheduler, "KvCacheConnectorWorker": Worker},
    }
    ours = "kvstrata.connectors.tensorrt_llm.connector"
    with pytest.MonkeyPatch.context() as patch:
        for name, values in contents.items():
            module = types.ModuleType(name)
            module.__dict__.update(values)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, ours, raising=False)
        from kvstrata.connectors import tensorrt_llm

        yield tensorrt_llm
        patch.delitem(sys.modules, ours, raising=False)
