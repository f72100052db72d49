"""`LMCacheConnectorV1`: vLLM's KV connector interface, each call handed to the side that it belongs to.

Nothing is decided here.  The scheduler's instance has a `SchedulerSide`, a worker's a `WorkerSide`; both
have a client of their own that attaches in the background, so vLLM starts whether or not there is a server.

Each method that vLLM calls while it serves is guarded (`boundary.py`): beside it stands which method of its side keeps
blocks and leases in order after an error, and the answer if even that fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstrata.client import CacheClient, LoadItem
from kvstrata.connectors.vllm.boundary import errors, guarded
from kvstrata.connectors.vllm.identity import engine_group, fidelity_of, layout_identity
from kvstrata.connectors.vllm.kv_view import (
    Heads,
    KvView,
    build_view,
    check_chunk_size,
    check_groups,
    chunk_bytes,
    heads_of,
)
from kvstrata.connectors.vllm.layer_kinds import layer_kinds
from kvstrata.connectors.vllm.metadata import StepPlan, WorkerReport
from kvstrata.connectors.vllm.reuse import media_are_counted, no_reuse_reason
from kvstrata.connectors.vllm.scheduler import SYNC_LOAD_BYTES, SchedulerSide
from kvstrata.connectors.vllm.settings import load_settings
from kvstrata.connectors.vllm.sleep import follow_sleep
from kvstrata.connectors.vllm.statistics import KvstrataPromMetrics, KvstrataStats
from kvstrata.connectors.vllm.steps import check_steps, may_load_synchronously, no_load_reason
from kvstrata.connectors.vllm.weights import WeightsVersion, loaded_weights
from kvstrata.connectors.vllm.worker import HostMover, Mover, WorkerSide
from kvstrata.errors import ConfigError
from kvstrata.memory.paths import ATTACH_SOCKET, socket_dir
from kvstrata.types import Role

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvstrata")


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
        """Both workers' reports."""
        return WorkerMetadata(self.reports + other.reports)


class LMCacheConnectorV1(KVConnectorBase_V1):  # type: ignore[misc]
    """Keeps KV in a kvstrata server that shares memory with this engine.

    Raises ConfigError at start for settings, models and layouts that are not supported, never for a server
    that is not there.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_like_vllm()
        transfer = vllm_config.kv_transfer_config
        self._settings, notes = load_settings(transfer.kv_connector_extra_config, os.environ)
        for note in notes:
            logger.warning("%s", note)
        self._block_tokens = check_groups(kv_cache_config.kv_cache_groups)
        chunk_blocks = check_chunk_size(self._settings.chunk_size, self._block_tokens)
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                raise ConfigError(
                    f"{name}: {getattr(parallel, name)} is not supported so far, only 1", field=name
                )
        check_steps(vllm_config, self._settings.load_mode)
        self._layout = layout_identity(
            vllm_config,
            kv_dtype=_kv_dtype(vllm_config),
            chunk_tokens=self._settings.chunk_size,
            fidelity=fidelity_of(self._settings),
        )
        self._group = engine_group(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._layers_ask = False
        if role is KVConnectorRole.WORKER:
            return
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is %r: a request whose cached KV turns out bad will fail; set it to "
                '"recompute" in --kv-transfer-config to have it computed instead',
                transfer.kv_load_failure_policy,
            )
        client = CacheClient(
            self._settings,
            role=Role.SCHEDULER,
            layout=self._layout,
            group=self._group,
            engine_slices=self._heads(tp_rank=0).engine_slices,
        )
        client.start()
        events = vllm_config.kv_events_config
        unusable = no_reuse_reason(vllm_config)
        if unusable:
            logger.warning("the cache is off for this engine, nothing is loaded or stored: %s", unusable)
        counted = media_are_counted(vllm_config)
        if counted:
            logger.warning(
                "requests with images or other media are computed without the cache: with --mm-processor-cache-gb 0 "
                "and --no-enable-prefix-caching vLLM numbers media instead of hashing them"
            )
        no_load = no_load_reason(vllm_config)
        if no_load:
            logger.warning("nothing is loaded by this engine: %s", no_load)
        wants_events = self._settings.enable_kv_events or bool(events and events.enable_kv_cache_events)
        self._scheduler = SchedulerSide(
            client,
            self._settings,
            block_tokens=self._block_tokens,
            chunk_blocks=chunk_blocks,
            chunk_bytes=chunk_bytes(kv_cache_config.kv_cache_groups[0], chunk_blocks)
            // (2 if self._settings.gpu_fp8 else 1),
            world_size=parallel.world_size,
            weights=WeightsVersion(parallel.world_size),
            prefix_cache=self._prefix_cache,
            may_load=transfer.is_kv_consumer and not unusable and not no_load,
            may_store=transfer.is_kv_producer and not unusable,
            engine=self._group.hex(),
            media_are_counted=counted,
            sync_load_bytes=SYNC_LOAD_BYTES if may_load_synchronously(vllm_config) else 0,
            events=self._event if wants_events else None,
            removal=self._removal,
            server_seen=(socket_dir(self._settings.socket_dir, self._settings.port) / ATTACH_SOCKET).exists,
        )

    # -- worker side -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read the layout of the engine's blocks and attach. Raises ConfigError for a layout we cannot
        walk.
        """
        from vllm.distributed.parallel_state import get_tp_group

        devices = {tensor.device for tensor in kv_caches.values()}
        if len(devices) != 1:
            raise ConfigError(
                f"KV cache: layers lie on {', '.join(sorted(map(str, devices)))}; only one device per worker is "
                "supported",
                field="device",
            )
        [device] = devices
        if self._settings.gpu_fp8 and device.type != "cuda":
            raise ConfigError(
                f"gpu_fp8: KV of this engine lies on {device}, not on a GPU; set gpu_fp8 to false",
                field="gpu_fp8",
            )
        modules = self._vllm_config.compilation_config.static_forward_context
        view = build_view(
            kv_caches,
            num_blocks=self._kv_cache_config.num_blocks,
            block_tokens=self._block_tokens,
            chunk_tokens=self._settings.chunk_size,
            heads=self._heads(tp_rank=get_tp_group().rank_in_group),
            dtype=self._layout.kv_dtype,
            fidelity=self._settings.fidelity,
            head_size=self._vllm_config.model_config.get_head_size(),
            gpu_fp8=self._settings.gpu_fp8,
            kinds=layer_kinds(self._kv_cache_config.kv_cache_groups, modules, vllm.__version__),
        )
        self._layers_ask = layers_ask(modules[name] for name in view.layers)
        make_client = partial(
            CacheClient,
            self._settings,
            role=Role.WORKER,
            layout=self._layout,
            group=self._group,
            engine_slices=self._heads(tp_rank=0).engine_slices,
            slice=view.slice,
            facts=view.facts,
        )
        if device.type == "cpu":
            client = make_client()
            mover: Mover = HostMover(client, view.plan())
        elif device.type == "cuda":
            client, mover = self._on_device(make_client, view, kv_caches, device)
        else:
            raise ConfigError(f"device: {device.type} is not supported, only cpu and cuda", field="device")
        self._follow_sleep()
        client.start()
        self._worker = WorkerSide(
            client,
            mover,
            slice_digest=view.slice.digest(),
            chunk_blocks=view.chunk_blocks,
            make_item=LoadItem,
            weights=loaded_weights(),
        )
        logger.info(
            "KV of %d layers, %d blocks of %d tokens, %.2f MiB a chunk of %d tokens, slice %s",
            len(view.layers),
            view.num_blocks,
            view.block_tokens,
            view.payload_bytes / (1 << 20),
            self._settings.chunk_size,
            view.slice.digest().hex()[:12],
        )

    def _follow_sleep(self) -> None:
        """Where vLLM will not call the two methods below, have its sleep backend call them."""
        model = self._vllm_config.model_config
        if model.enable_sleep_mode and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

            follow_sleep(
                SleepModeBackendFactory._registry,
                model.sleep_mode_backend,
                self.unregister_kv_caches,
                self.restore_kv_caches,
            )

    def unregister_kv_caches(self) -> None:
        """Before vLLM sleeps: no copy touches KV memory any more. An exception stops the sleep, so it passes."""
        if self._worker is not None:
            self._worker.suspend()

    def restore_kv_caches(self) -> None:
        """After vLLM has woken: KV memory is back where it was."""
        if self._worker is not None:
            self._worker.resume()

    def _on_device(
        self,
        make_client: Callable[..., CacheClient],
        view: KvView,
        kv_caches: dict[str, torch.Tensor],
        device: torch.device,
    ) -> tuple[CacheClient, Mover]:
        """Client and mover for blocks in the memory of a GPU. Raises ConfigError where that cannot work."""
        # Engines on the CPU must never load the driver.
        from kvstrata.client.pinning import Pinner
        from kvstrata.client.warmup import PageWarmer
        from kvstrata.connectors.vllm.device import DeviceMover, choose_way, open_engine

        settings = self._settings
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        engine, plan = open_engine(settings, view, device, ordinal)
        choose_way(engine, device, plan, view.chunk_blocks)
        pages = Pinner(engine, ordinal) if settings.gpu_pin else PageWarmer()
        client = make_client(engine=engine, pages=pages, registers_memory=True)
        section_at = {layer.base: section for section, layer in enumerate(view.layers.values())}
        mover = DeviceMover(
            client,
            engine,
            plan,
            sections={name: section_at[tensor.data_ptr()] for name, tensor in kv_caches.items()},
            current_stream=lambda: int(torch.cuda.current_stream(device).cuda_stream),
        )
        return client, mover

    @guarded(None, lambda self, metadata: self._worker.step_failed(metadata.plan))
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First call of each step."""
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.plan)

    @guarded(None, lambda self, *_, **__: self._worker.loads_failed())
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads; the forward pass comes behind the synchronous ones, layer by layer where it can."""
        if self._worker is not None:
            # A whole captured graph is replayed without asking for its layers, and a draft model's layers are
            # asked for by a graph of its own: there everything comes first. Piecewise graphs ask.
            layerwise = (
                self._layers_ask
                and forward_context.attn_metadata is not None
                and forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL
                and self._vllm_config.speculative_config is None
            )
            self._worker.start_loads(layerwise=layerwise)

    @guarded(None, lambda self, layer_name: self._worker.loads_failed())
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Puts the layer behind its load."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing per layer: whole chunks are copied after the forward pass."""

    @guarded(None, lambda self: self._worker.stores_failed())
    def wait_for_save(self) -> None:
        """End synchronous loads and begin stores, which go on in the background."""
        if self._worker is not None:
            self._worker.start_stores()

    @guarded((None, None), lambda self, finished_req_ids: self._worker.finished_failed())
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may be freed, and requests whose asynchronous loads ended."""
        if self._worker is None:
            return None, None
        sent, received = self._worker.finished()
        return sent or None, received or None

    @guarded(frozenset(), lambda self: self._worker.take_bad_blocks())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute instead of loading."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    @guarded(None, lambda self: WorkerMetadata([self._worker.report_failed()]))
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler must know about this step."""
        report = self._worker.report() if self._worker is not None else None
        return WorkerMetadata([report]) if report is not None else None

    @guarded(None)
    def shutdown(self) -> None:
        """Finish what is on its way within two seconds, give everything back."""
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
        """A cache: a store that does not happen is a later miss."""
        return False

    @guarded(None, lambda self, request: self._scheduler.give_up(request))
    def on_new_request(self, request: Any) -> None:
        """Hash the prompt and look it up."""
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    @guarded((0, False), lambda self, request, _: (self._scheduler.give_up(request), (0, False))[1])
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, and whether that happens beside other work."""
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @guarded(
        None,
        lambda self, request, blocks, tokens: self._scheduler.allocated_failed(
            request, blocks.get_block_ids()[0], tokens
        ),
    )
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine took the hit, or did not."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded(
        StepMetadata(StepPlan(0)), lambda self, output: StepMetadata(self._scheduler.plan_failed(output))
    )
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's plan for the workers."""
        assert self._scheduler is not None
        return StepMetadata(self._scheduler.plan_step(scheduler_output))

    @guarded(
        None,
        lambda self, output: self._scheduler.heard_failed(_reports(output), output.finished_recving or ()),
    )
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers reported."""
        assert self._scheduler is not None
        self._scheduler.heard(
            _reports(connector_output),
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids,
        )

    @guarded((True, None), lambda self, request, _: (self._scheduler.finished_failed(request), None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must outlive it for a while."""
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids), None

    @guarded(())
    def take_events(self) -> Iterable[Any]:
        """KV events about chunks that were stored in L1 and that left it."""
        return self._scheduler.take_events() if self._scheduler is not None else ()

    @guarded(False, lambda self: (self._scheduler.turn_off(), True)[1])
    def reset_cache(self) -> bool:
        """Called when weights may have changed (pause, sleep): the workers are asked which they have."""
        if self._scheduler is not None:
            # vLLM has tried to empty its own cache just before, which it does only while no block is in use.
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
        """Statistics out of their serialised form."""
        return KvstrataStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvstrataPromMetrics:
        """Our counters on vLLM's /metrics."""
        return KvstrataPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _prefix_cache(self) -> object:
        """What vLLM puts another object in the place of when it empties its prefix cache; None when not known."""
        pool = getattr(self._kv_cache_manager, "block_pool", None)
        return getattr(pool, "cached_block_hash_to_block", None)

    def _heads(self, tp_rank: int) -> Heads:
        model, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        return heads_of(
            total_kv_heads=model.get_total_num_kv_heads(),
            mla=bool(model.use_mla),
            layers=tuple(model.get_layers_start_end_indices(parallel)),
            tp_rank=tp_rank,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
        )

    def _removal(self, keys: Sequence[bytes]) -> Any:
        return BlockRemoved(block_hashes=list(keys), medium=MEDIUM_CPU)

    def _event(self, tokens: Sequence[int], parent: bytes, keys: Sequence[bytes], lora: Any) -> Any:
        return BlockStored(
            block_hashes=list(keys),
            parent_block_hash=parent or None,
            token_ids=list(tokens),
            block_size=self._settings.chunk_size,
            lora_id=lora.lora_int_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.lora_name if lora is not None else None,
        )


def _reports(connector_output: Any) -> Sequence[WorkerReport]:
    """What the workers reported of one step."""
    meta = connector_output.kv_connector_worker_meta
    return meta.reports if meta is not None else ()


def layers_ask(modules: Iterable[object]) -> bool:
    """Whether vLLM calls `wait_for_layer_load` before it reads any of these layers' caches.

    It does so in what runs its attention layers.  A cache beside them, an indexer's, is read without asking.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return all(isinstance(module, (Attention, MLAAttention)) for module in modules)


def _kv_dtype(vllm_config: VllmConfig) -> str:
    """The KV cache's element type by name."""
    named = str(vllm_config.cache_config.cache_dtype)
    dtype = str(vllm_config.model_config.dtype) if named == "auto" else named
    return dtype.removeprefix("torch.")


def _log_like_vllm() -> None:
    """Let our library's log lines go where vLLM's go."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvstrata")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
