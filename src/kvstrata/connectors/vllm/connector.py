"""`LMCacheConnectorV1`: vLLM's KV connector interface; each call is passed on to the scheduler's or the worker's side.

The class implements vLLM's interface (`KVConnectorBase_V1`), hence its many methods.  It decides nothing: in the
scheduler it passes calls to a `SchedulerSide`, in a worker to a `WorkerSide`; `build` makes both.

Each method that vLLM calls while it serves is guarded (`boundary.py`).  An error of ours about a single request, before
it has blocks, means that this request is computed without the cache.  Any other error turns this process's side *off*
until the engine is started again: `SchedulerOff` or `WorkerOff` takes its place and answers this call too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import vllm
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.connectors.boundary import errors, guarded
from kvstrata.connectors.vllm.build import log_like_vllm, own_cache, read_setup, scheduler_side, worker_side
from kvstrata.connectors.vllm.compat.contract import check_vllm, missing_names
from kvstrata.connectors.vllm.compat.sleep_calls import follow_sleep
from kvstrata.connectors.vllm.engine import BlockPins
from kvstrata.connectors.vllm.metadata import StepPlan, WorkerReport
from kvstrata.connectors.vllm.own_cache import OwnCache
from kvstrata.connectors.vllm.scheduler import SchedulerOff, SchedulerSide
from kvstrata.connectors.vllm.statistics import KvstrataPromMetrics, KvstrataStats
from kvstrata.connectors.vllm.worker import WorkerOff, WorkerSide

logger = logging.getLogger("vllm.kvstrata")

T = TypeVar("T")

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    HOST: Any = None
    """The tier under which vLLM counts the hits that we serve; versions before 0.32 do not ask for it."""
else:
    HOST = CacheHitSource.HOST


def _or_off(neutral: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Guards a method: an error turns the connector off, then the method is called again. `neutral`: see `guarded`."""

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        def again(self: LMCacheConnectorV1, *args: Any, **kwargs: Any) -> T:
            self._turn_off()
            return method(self, *args, **kwargs)

        return guarded(neutral, again)(method)

    return decorate


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries one `StepPlan` from the scheduler to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Carries the workers' reports of one step to the scheduler."""

    def __init__(self, reports: list[WorkerReport]) -> None:
        self.reports = reports

    @guarded(None, lambda self, other: self)
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The reports of both objects."""
        return WorkerMetadata(self.reports + other.reports)


class LMCacheConnectorV1(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps KV in a kvstrata server that shares memory with this engine.

    At the start, settings, models and layouts that are not supported raise ConfigError; a missing server does not.
    """

    _cache_hit_source = HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        log_like_vllm()
        scheduler = role is KVConnectorRole.SCHEDULER
        usable = check_vllm(vllm.__version__) if scheduler else not missing_names()
        self._setup = read_setup(vllm_config, kv_cache_config) if usable else None
        """None: the cache is off, because this vLLM lacks what the connector needs."""
        self._worker: WorkerSide | WorkerOff | None = None
        self._layers_ask = False
        """Whether vLLM calls `wait_for_layer_load` before it reads a layer's cache, see `layers_ask`."""
        self._scheduler: SchedulerSide | SchedulerOff | None = None
        self._own_cache: OwnCache | None = None
        if scheduler and self._setup is not None:
            self._scheduler = scheduler_side(self._setup, self._prefix_cache, BlockPins(self._block_pool))
            self._own_cache = own_cache(self._setup, self._block_pool)

    # -- worker side -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read the layout of the engine's blocks and attach. Raises ConfigError for a layout that is not supported."""
        from vllm.distributed.parallel_state import get_tp_group

        if self._setup is None:
            return
        follow_sleep(self, self._vllm_config.model_config)
        tp_rank = get_tp_group().rank_in_group
        self._worker, self._layers_ask = worker_side(self._setup, kv_caches, tp_rank)

    def unregister_kv_caches(self) -> None:
        """Called before vLLM sleeps: end all copies. An exception is passed to vLLM, because it prevents the sleep."""
        if self._worker is not None:
            self._worker.suspend()

    def restore_kv_caches(self) -> None:
        """Called after vLLM has woken: the KV memory is back at its addresses."""
        if self._worker is not None:
            self._worker.resume()

    @_or_off(None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The first call of each step: stop copies of preempted requests' blocks."""
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.plan)

    @_or_off(None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads, and make the forward pass wait for the synchronous ones, layer by layer if possible."""
        if self._worker is not None:
            # A fully captured graph is replayed without calls for its layers, and the calls for a draft model's layers
            # come from a graph of its own: in both cases all loads end first. Piecewise graphs make the calls.
            layerwise = (
                self._layers_ask
                and forward_context.attn_metadata is not None
                and forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL
                and self._vllm_config.speculative_config is None
            )
            self._worker.start_loads(layerwise=layerwise)

    @_or_off(None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Make the layer wait for its load."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: whole chunks are copied after the forward pass."""

    @_or_off(None)
    def wait_for_save(self) -> None:
        """End synchronous loads and begin stores, which continue in the background."""
        if self._worker is not None:
            self._worker.start_stores()

    @_or_off((None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose blocks may be freed, requests whose asynchronous loads have ended)"""
        if self._worker is None:
            return None, None
        sent, received = self._worker.finished()
        return sent or None, received or None

    @_or_off(KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Like `get_finished`, with those of the requests of which a load failed."""
        if self._worker is None:
            return KVConnectorTransferResults()
        return _results(self._worker, *self._worker.finished())

    @_or_off(frozenset())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute instead of loading."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    @_or_off(None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This worker's report for the scheduler."""
        report = self._worker.report() if self._worker is not None else None
        return WorkerMetadata([report]) if report is not None else None

    @guarded(None)
    def shutdown(self) -> None:
        """Finish copies and messages within two seconds, and release leases."""
        worker, self._worker = self._worker, None
        scheduler, self._scheduler = self._scheduler, None
        try:
            if worker is not None:
                worker.close()
        finally:
            if scheduler is not None:
                scheduler.close()

    # -- scheduler side --------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, so a store that fails only causes a later miss."""
        return False

    @guarded(None, lambda self, request: self._scheduler.give_up(request))
    def on_new_request(self, request: Any) -> None:
        """Hash the prompt and look it up."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @guarded((0, False), lambda self, request, _: (self._scheduler.give_up(request), (0, False))[1])
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded, None if unknown yet; whether they load asynchronously)"""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @_or_off(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has allocated blocks, and has accepted the hit or not."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @_or_off(StepMetadata(StepPlan(0)))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's plan for the workers."""
        if self._scheduler is None:
            return StepMetadata(StepPlan(0))
        return StepMetadata(self._scheduler.plan_step(scheduler_output))

    @_or_off(None)
    def update_connector_output(self, connector_output: Any) -> None:
        """Apply the workers' reports."""
        if self._scheduler is not None:
            self._scheduler.heard(
                _reports(connector_output),
                connector_output.finished_recving or (),
                connector_output.invalid_block_ids,
                connector_output.failed_recving,
            )

    @_or_off((True, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks of the finished request must be kept for now."""
        return self._finished(request, (block_ids,)), None

    @_or_off((True, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks of the finished request, of all groups, must be kept for now."""
        return self._finished(request, block_ids), None

    @_or_off(())
    def take_events(self) -> Iterable[Any]:
        """KV events about chunks that were stored in L1 or have left it, and blocks that are announced again."""
        events = self._scheduler.take_events() if self._scheduler is not None else []
        return [*events, *(self._own_cache.take_events() if self._own_cache is not None else ())]

    @_or_off(False)
    def has_pending_push_work(self) -> bool:
        """Whether vLLM must continue stepping to get the outcomes of stores, which unpin blocks and cause KV events."""
        return self._scheduler is not None and self._scheduler.awaits_news

    @_or_off(False)
    def reset_cache(self) -> bool:
        """Called when weights may have changed (pause, sleep): ask the workers which weights they have."""
        if self._scheduler is not None:
            # Just before, vLLM has tried to empty its own cache, which succeeds only while no block is in use.
            engine = self._kv_cache_manager
            self._scheduler.reset(engine_empty=engine is not None and engine.usage == 0)
        return True

    # -- both ------------------------------------------------------------------------------------------------

    @guarded(None)
    def get_kv_connector_stats(self) -> KvstrataStats | None:
        """Counts since the last call."""
        side = self._scheduler or self._worker
        counts = dict(side.take_counts()) if side is not None else {}
        caught = errors.take_count()
        if caught:
            counts["errors"] = caught
        return KvstrataStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvstrataStats:
        """Statistics from their serialised form."""
        return KvstrataStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvstrataPromMetrics:
        """The object that shows our counters on vLLM's /metrics."""
        return KvstrataPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _turn_off(self) -> None:
        """After an error of ours: stop loading and storing, and only finish the operations that vLLM waits for."""
        if isinstance(self._worker, WorkerSide):
            self._worker = self._worker.turn_off()
        elif isinstance(self._scheduler, SchedulerSide):
            self._scheduler, self._own_cache = self._scheduler.turn_off(), None
        else:
            return
        logger.error(
            "the cache is off for this engine until it is started again, because of an error in its connector"
        )

    def _finished(self, request: Any, tables: tuple[list[int], ...]) -> bool:
        if self._scheduler is None:
            return False
        if self._own_cache is not None:
            self._own_cache.finished(request)
        return self._scheduler.finished(request, tables)

    def _prefix_cache(self) -> object:
        """The object that vLLM replaces when it empties its prefix cache; None if it cannot be found."""
        return getattr(self._block_pool(), "cached_block_hash_to_block", None)

    def _block_pool(self) -> Any:
        """vLLM's pool of blocks; None if it cannot be found."""
        return getattr(self._kv_cache_manager, "block_pool", None)


def _results(
    worker: WorkerSide | WorkerOff, sent: set[str], received: set[str]
) -> KVConnectorTransferResults:
    return KVConnectorTransferResults(
        finished_sending=sent, finished_recving=received, failed_recving=worker.take_bad_requests(received)
    )


def _reports(connector_output: Any) -> Sequence[WorkerReport]:
    """The workers' reports of one step."""
    meta = connector_output.kv_connector_worker_meta
    return meta.reports if meta is not None else ()
