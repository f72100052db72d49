"""`KvstrataScheduler` and `KvstrataWorker`: TensorRT-LLM's pair of connector classes.

Errors at the start reach TensorRT-LLM and stop its start.  Afterwards a mistake of ours or a server that is away means
a miss; only a promise that cannot be kept is raised (see `scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorrt_llm
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
)
from tensorrt_llm._utils import mpi_rank

from kvstrata.client import CacheClient
from kvstrata.connectors.boundary import guarded
from kvstrata.connectors.tensorrt_llm.plan import StepPlan
from kvstrata.connectors.tensorrt_llm.scheduler import open_scheduler
from kvstrata.connectors.tensorrt_llm.setup import BlocksOfTensor, read_setup, read_tensor
from kvstrata.connectors.tensorrt_llm.worker import Opened, WorkerSide, attach_host
from kvstrata.errors import ConfigError
from kvstrata.types import Role


class KvstrataScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """Rank 0's part of the connector that plans."""

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError for settings or a parallelism that are not supported."""
        super().__init__(llm_args)
        self._side = open_scheduler(read_setup(llm_args, tensorrt_llm.__version__))

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of a new request that the cache has behind those that the engine has itself; never asynchronous."""
        return self._side.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        """Nothing to do: the plan of the step reads the blocks."""

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """The plan of the next step. Raises InternalError if the engine has no blocks for what it was promised."""
        plan, promised = self._side.plan(scheduler_output)
        self._plan_stores(plan, scheduler_output, promised)
        return plan

    @guarded(None)
    def _plan_stores(self, plan: StepPlan, output: Any, promised: dict[int, int]) -> None:
        plan.stores = self._side.plan_stores(output.new_requests, output.cached_requests, promised)

    @guarded(True)
    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        """Whether the request's blocks must stay until the workers report it."""
        return self._side.forget(request.request_id)

    @guarded(None)
    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The engine does not use the promised tokens [start, end)."""
        self._side.cancelled(request.request_id, start)

    @guarded(None)
    def request_reset(self, request: Any) -> None:
        """The request loses its blocks and starts again."""
        self._side.forget(request.request_id)


class KvstrataWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """Each rank's part of the connector that copies."""

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError for settings or a parallelism that are not supported."""
        super().__init__(llm_args)
        self._setup = read_setup(llm_args, tensorrt_llm.__version__)
        self._side: WorkerSide | None = None
        self._stream = 0

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Take the tensor (blocks, layers, …) with this rank's KV. Raises ConfigError if it cannot be copied."""
        setup = self._setup
        view, part, facts = read_tensor(kv_cache_tensor, setup, mpi_rank())
        make_client = partial(
            CacheClient,
            setup.settings,
            role=Role.WORKER,
            layout=setup.layout,
            engine_slices=setup.ranks,
            slice=part,
            facts=facts,
        )
        kind = kv_cache_tensor.device.type
        if kind == "cpu":
            copies = view.plan()
            attach = lambda group: attach_host(make_client(group=group), copies)  # noqa: E731
        elif kind == "cuda":
            attach = self._on_device(make_client, view, kv_cache_tensor.device)
        else:
            raise ConfigError(f"device: {kind} is not supported, only cpu and cuda", field="device")
        self._side = WorkerSide(part.digest(), attach)

    def bind_connector_meta(self, metadata: Any) -> None:
        """Take the plan of the next step."""
        super().bind_connector_meta(metadata)
        self._begin(metadata)

    @guarded(None)
    def _begin(self, plan: StepPlan | None) -> None:
        if self._side is not None:
            self._side.begin(plan)

    def start_load_kv(self, stream: Any) -> None:
        """Load what the plan says, before the forward pass. Raises MediumError if a promised chunk cannot be loaded."""
        self._stream = int(getattr(stream, "cuda_stream", 0))
        if self._side is not None:
            self._side.load()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing to do: all layers are loaded."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing to do: the layers of a chunk are stored together."""

    @guarded(None)
    def wait_for_save(self, stream: Any) -> None:
        """Begin the plan's stores, behind the work of `stream`; they go on beside the next steps."""
        self._stream = int(getattr(stream, "cuda_stream", 0))
        if self._side is not None:
            self._side.store()

    def get_finished(
        self, finished_gen_req_ids: Sequence[int], started_loading_req_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Finished requests whose blocks no store reads any more; loads are never asynchronous."""
        if self._side is None:
            return list(finished_gen_req_ids), []
        return self._side.finished(finished_gen_req_ids), []

    def _on_device(self, make_client: Any, view: BlocksOfTensor, device: Any) -> Any:
        """How to attach with blocks in the memory of a GPU. Raises ConfigError if they cannot be copied."""
        # Engines on the CPU must never load the driver.
        import torch

        from kvstrata.client.pinning import Pinner
        from kvstrata.client.warmup import PageWarmer
        from kvstrata.connectors.device import DeviceMover, choose_way, open_engine

        settings = self._setup.settings
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        engine, plan = open_engine(settings, view, device, ordinal)
        choose_way(engine, device, plan, view.record_blocks)

        def attach(group: bytes) -> Opened:
            pages = Pinner(engine, ordinal) if settings.gpu_pin else PageWarmer()
            client = make_client(group=group, engine=engine, pages=pages, registers_memory=True)
            sections = {str(layer): layer for layer in range(view.layers)}
            mover = DeviceMover(
                client, engine, plan, pages=pages, sections=sections, current_stream=lambda: self._stream
            )
            client.start()
            return mover, client.identity, client.close

        return attach
