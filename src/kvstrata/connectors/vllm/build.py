"""Builds the two sides of the connector from vLLM's configuration, each with a client of its own.

Unsupported settings, models and layouts raise ConfigError.  A missing server does not: clients attach in the
background, so vLLM starts with or without a server.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import torch
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.client import CacheClient
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.mover import Mover
from kvstrata.connectors.settings import load_settings
from kvstrata.connectors.vllm.compat.packing import arrangement_namer
from kvstrata.connectors.vllm.engine import (
    SYNC_LOAD_BYTES,
    BlockPins,
    Engine,
    check_steps,
    may_load_synchronously,
    media_are_counted,
    no_load_reason,
    no_reuse_reason,
)
from kvstrata.connectors.vllm.groups import CacheGroup, Rule, layer_specs, read_groups, whole_hits
from kvstrata.connectors.vllm.identity import engine_group, fidelity_of, layout_identity, weights_are_named
from kvstrata.connectors.vllm.kv_events import EventMaker, announced_group, extra_keys_of
from kvstrata.connectors.vllm.kv_view import (
    Heads,
    KvView,
    build_view,
    chunk_bytes,
    heads_of,
    layer_kinds,
    layers_of_groups,
)
from kvstrata.connectors.vllm.late import LateWhileSmall
from kvstrata.connectors.vllm.own_cache import EngineView, OwnCache
from kvstrata.connectors.vllm.scheduler import SchedulerSide
from kvstrata.connectors.vllm.weights import LoadedAdapters, WeightsVersion, find_runner, loaded_weights
from kvstrata.connectors.vllm.worker import GroupSide, WorkerSide
from kvstrata.errors import ConfigError
from kvstrata.memory.paths import RPC_SOCKET, socket_dirs
from kvstrata.types import LayoutIdentity, Role

logger = logging.getLogger("vllm.kvstrata")

USUAL_BATCHES = 10_000
"""vLLM's default number of kept event batches; it sets the pace of re-announcements if vLLM keeps none."""
READ_S = 0.5
"""Maximum time that an in-process engine waits, at a request's end, for copies from the request's blocks."""
OUR_PREFIXES = ("kvstrata.", "lmcache.")
_WORKERS: WeakValueDictionary[bytes, WorkerSide] = WeakValueDictionary()
"""The workers of this process, by engine."""


def log_like_vllm() -> None:
    """Send our library's log lines to vLLM's log handlers. If vLLM's logger has none, both use the root's."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvstrata")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False


class Setup(NamedTuple):
    """The part of vLLM's configuration that every process of an engine needs, checked."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    settings: ClientSettings
    layout: LayoutIdentity
    group: bytes
    """16 bytes that all processes of the engine share."""
    groups: list[CacheGroup]

    def heads(self, group: CacheGroup, tp_rank: int) -> Heads:
        """The layers and heads of one tensor-parallel rank of this pipeline stage, of one group. Raises ConfigError."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        states = group.rule is Rule.STATE_AT
        specs = layer_specs(self.kv_cache_config.kv_cache_groups[group.number]) if states else []
        return heads_of(
            # A state is split into a part for each rank, or each rank has all of it.
            total_kv_heads=parallel.tensor_parallel_size if states else model.get_total_num_kv_heads(),
            mla=all(spec.tp_replicated for spec in specs) if states else bool(model.use_mla),
            layers=tuple(model.get_layers_start_end_indices(parallel)),
            tp_rank=tp_rank,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
        )

    @property
    def engine_slices(self) -> int:
        """Number of distinct slices of the whole engine."""
        return sum(self.heads(group, tp_rank=0).engine_slices for group in self.groups)


def read_setup(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
    """Read and check the configuration that both roles need. Logs settings without effect. Raises ConfigError."""
    settings, notes = load_settings(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)
    for note in (*notes, *misplaced_notes(vllm_config)):
        logger.warning("%s", note)
    groups = read_groups(kv_cache_config.kv_cache_groups, settings.chunk_size, ClientSettings().chunk_size)
    if groups[0].chunk_tokens != settings.chunk_size:
        settings = msgspec.structs.replace(settings, chunk_size=groups[0].chunk_tokens)
        logger.info(
            "chunk_size is %d tokens, which suits the blocks of this model: %s tokens",
            settings.chunk_size,
            ", ".join(str(group.block_tokens) for group in groups),
        )
    check_grouped(groups, settings, vllm_config)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(
                f"{name}: {getattr(parallel, name)} is not supported so far, only 1", field=name
            )
    check_steps(vllm_config, settings.load_mode)
    layout = layout_identity(
        vllm_config,
        kv_dtype=kv_dtype_of(vllm_config),
        chunk_tokens=settings.chunk_size,
        fidelity=fidelity_of(settings),
    )
    return Setup(
        vllm_config,
        kv_cache_config,
        settings,
        layout,
        engine_group(vllm_config),
        groups,
    )


def outer_transfer(vllm_config: VllmConfig) -> Any:
    """The `KVTransferConfig` that vLLM itself reads. Call it only while the connector is made.

    `MultiConnector` gives each of its connectors a copy of vLLM's configuration with the connector's own
    `kv_transfer_config`, which lacks settings that vLLM reads from the outer one, such as `kv_load_failure_policy`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, MultiConnector):
            return owner._vllm_config.kv_transfer_config
        frame = frame.f_back
    return vllm_config.kv_transfer_config


def misplaced_notes(vllm_config: VllmConfig) -> list[str]:
    """Lines to log about settings of ours in the configuration of `MultiConnector`, where they have no effect.

    Call it only while the connector is made.
    """
    outer = outer_transfer(vllm_config)
    if outer is vllm_config.kv_transfer_config:
        return []
    return [
        f"kv_connector_extra_config of MultiConnector: {key} has no effect there: put it into the "
        "kv_connector_extra_config of the entry of this connector"
        for key in outer.kv_connector_extra_config
        if key.startswith(OUR_PREFIXES)
    ]


def scheduler_side(setup: Setup, prefix_cache: Callable[[], object], pins: BlockPins) -> SchedulerSide:
    """Make the scheduler's side and start its client. See `Engine` for `prefix_cache`."""
    config, settings = setup.vllm_config, setup.settings
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    policy = outer_transfer(config).kv_load_failure_policy
    if policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a request whose cached KV cannot be loaded will fail; set it to "
            '"recompute" in --kv-transfer-config to compute the KV instead',
            policy,
        )
    kv_bytes = own_kv_bytes(setup)
    client = CacheClient(
        settings,
        role=Role.SCHEDULER,
        layout=setup.layout,
        group=setup.group,
        engine_slices=setup.engine_slices,
        kv_bytes=kv_bytes,
    )
    client.start()
    unusable = no_reuse_reason(config)
    if unusable:
        logger.warning("the cache is off for this engine, which neither loads nor stores: %s", unusable)
    counted = media_are_counted(config)
    if counted:
        logger.warning(
            "requests with images or other media do not use the cache: with --mm-processor-cache-gb 0 "
            "and --no-enable-prefix-caching, vLLM numbers media instead of hashing them"
        )
    no_load = no_load_reason(config)
    if no_load:
        logger.warning("this engine loads nothing from the cache: %s", no_load)
    places = socket_dirs(settings.socket_dir, settings.port)
    events = config.kv_events_config
    wants_events = settings.enable_kv_events or bool(events and events.enable_kv_cache_events)
    make = _event_maker(setup)
    return SchedulerSide(
        Engine(
            client,
            settings,
            setup.groups,
            stored_chunk_bytes(setup),
            parallel.world_size,
            WeightsVersion(parallel.world_size, named=weights_are_named(config)),
            prefix_cache=prefix_cache,
            may_load=transfer.is_kv_consumer and not unusable and not no_load,
            may_store=transfer.is_kv_producer and not unusable,
            name=setup.group.hex(),
            media_are_counted=counted,
            lookahead_tokens=setup.layout.lookahead,
            sync_load_bytes=SYNC_LOAD_BYTES if may_load_synchronously(config) else 0,
            recomputes=policy == "recompute",
            events=make.stored if wants_events else None,
            removal=make.removed,
            server_seen=partial(_exists_one, [place / RPC_SOCKET for place in places]),
            pins=pins,
            store_late=store_late(setup, client),
            shares_l1=lambda: client.sizes()[1] > kv_bytes,
            step_tokens=config.scheduler_config.max_num_batched_tokens,
            read_here=partial(_read_here, setup),
        )
    )


def store_late(setup: Setup, client: CacheClient) -> Callable[[], bool] | None:
    """See `Engine`. Logs why `late` has no effect in this engine, if so."""
    wanted, config = setup.settings.store, setup.vllm_config
    reason = ""
    if whole_hits(setup.groups):
        reason = "the model has layers with windows or states"
    elif not config.cache_config.enable_prefix_caching:
        reason = "vLLM's prefix caching is off, so it keeps no KV of ended requests"
    if reason and wanted == "late":
        logger.warning("store: 'late' has no effect in this engine, chunks are stored at once: %s", reason)
    # An engine that only prefills computes for others, which cannot use its own cache.
    if reason or wanted == "commit" or (wanted == "auto" and not config.kv_transfer_config.is_kv_consumer):
        return None
    return LateWhileSmall(client.sizes) if wanted == "auto" else lambda: True


def own_kv_bytes(setup: Setup) -> int:
    """Bytes that the chunks in this engine's own cache would take in L1, with all windows and states."""
    if whole_hits(setup.groups):
        tensors = setup.kv_cache_config.kv_cache_tensors
        return int(sum(one.size for one in tensors) * setup.vllm_config.parallel_config.world_size)
    chunks = (setup.kv_cache_config.num_blocks - 1) // setup.groups[0].chunk_blocks
    return int(chunks * stored_chunk_bytes(setup) * setup.engine_slices)


def stored_chunk_bytes(setup: Setup) -> int:
    """Bytes of a chunk that one worker copies."""
    group = setup.kv_cache_config.kv_cache_groups[0]
    return chunk_bytes(group, setup.groups[0].record_blocks) // (2 if setup.settings.fidelity == "fp8" else 1)


def _read_here(setup: Setup, request_id: str) -> bool:
    """See `Engine`. False in an engine with a process of its own, which vLLM steps until all blocks are free."""
    worker = _WORKERS.get(setup.group)
    if (
        worker is None
        or envs.VLLM_ENABLE_V1_MULTIPROCESSING
        or setup.vllm_config.parallel_config.world_size > 1
    ):
        return False
    return worker.has_read(request_id, READ_S)


def own_cache(setup: Setup, block_pool: Callable[[], Any]) -> OwnCache | None:
    """The re-announcer of vLLM's own cache; None if vLLM publishes no events, or for no group. See BlockPins."""
    events = setup.vllm_config.kv_events_config
    number = announced_group(setup.groups)
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq" or number is None:
        return None
    size = next(group.block_tokens for group in setup.groups if group.number == number)

    def hashes_of(request: Any) -> Sequence[bytes]:
        pool = block_pool()
        return resolve_block_hashes(request.block_hashes, pool.hash_block_size, size) if pool else ()

    def is_cached(block_hash: bytes) -> bool:
        key = make_block_hash_with_group_id(block_hash, number)
        return block_pool().cached_block_hash_to_block.get_one_block(key) is not None

    engine = EngineView(
        hashes_of,
        is_cached,
        partial(extra_keys_of, chunk_tokens=size),
        partial(_event_maker(setup).again, block_tokens=size),
        setup.kv_cache_config.num_blocks,
    )
    kept = events.buffer_steps if events.replay_endpoint else 0
    return OwnCache(engine, block_tokens=size, kept_batches=kept or USUAL_BATCHES)


def _event_maker(setup: Setup) -> EventMaker:
    specs = [group.kv_cache_spec for group in setup.kv_cache_config.kv_cache_groups]
    return EventMaker(setup.groups, specs)


def check_grouped(groups: Sequence[CacheGroup], settings: ClientSettings, vllm_config: VllmConfig) -> None:
    """Raises ConfigError for settings that are not supported in an engine whose KV has windows or states."""
    if all(group.rule is Rule.PREFIX for group in groups):
        return
    if settings.fidelity == "fp8":
        raise ConfigError(
            "fidelity: 'fp8' rounds KV of full attention only, and this model has other layers; set it to 'lossless'",
            field="fidelity",
        )
    if vllm_config.speculative_config is not None and any(group.rule is Rule.STATE_AT for group in groups):
        raise ConfigError(
            "speculative_config: speculative decoding of a model with states is not supported so far; leave "
            "--speculative-config out, or run this model without this connector",
            field="speculative_config",
        )


def _exists_one(paths: Sequence[Path]) -> bool:
    return any(map(os.path.exists, paths))


def worker_side(setup: Setup, kv_caches: dict[str, torch.Tensor], tp_rank: int) -> tuple[WorkerSide, bool]:
    """Make the worker's side for these tensors and start its client; returns the side, and `layers_ask` of its layers.

    vLLM keeps owning the tensors, which must outlive the side.  Raises ConfigError if their layout or device is not
    supported.
    """
    settings = setup.settings
    devices = {tensor.device for tensor in kv_caches.values()}
    if len(devices) != 1:
        raise ConfigError(
            f"KV cache: layers lie on {', '.join(sorted(map(str, devices)))}; only one device per worker is "
            "supported",
            field="device",
        )
    [device] = devices
    if settings.fidelity == "fp8" and device.type != "cuda":
        raise ConfigError(
            f"fidelity: 'fp8' rounds KV on a GPU, but KV of this engine lies on {device}; set it to 'lossless'",
            field="fidelity",
        )
    modules = setup.vllm_config.compilation_config.static_forward_context
    of_vllm = setup.kv_cache_config.kv_cache_groups
    kinds = layer_kinds(of_vllm, modules, arrangement_namer(vllm.__version__))
    tensors = layers_of_groups(kv_caches, kinds)
    sides = []
    asks = True
    for group in setup.groups:
        names = [name for name in of_vllm[group.number].layer_names if name in tensors]
        view = build_view(
            {name: tensors[name] for name in names},
            num_blocks=setup.kv_cache_config.num_blocks,
            group=group,
            heads=setup.heads(group, tp_rank),
            dtype=setup.layout.kv_dtype,
            fidelity=settings.fidelity,
            head_size=setup.vllm_config.model_config.get_head_size(),
            kinds={name: kinds[name] for name in names},
        )
        asks = asks and layers_ask(modules[name] for name in view.layers)
        sides.append(_group_side(setup, view, kv_caches, device))
    runner = find_runner()
    side = WorkerSide(
        sides,
        by_request=whole_hits(setup.groups),
        weights=loaded_weights(runner, named=weights_are_named(setup.vllm_config)),
        adapters=LoadedAdapters(runner) if hasattr(runner, "lora_manager") else None,
    )
    _WORKERS[setup.group] = side
    return side, asks


def _group_side(
    setup: Setup, view: KvView, kv_caches: dict[str, torch.Tensor], device: torch.device
) -> GroupSide:
    """Make one group's side, and start its client. Raises ConfigError if the blocks cannot be copied."""
    settings = setup.settings
    make_client = partial(
        CacheClient,
        settings,
        role=Role.WORKER,
        layout=setup.layout,
        group=setup.group,
        engine_slices=setup.engine_slices,
        slice=view.slice,
        facts=view.facts,
    )
    if device.type == "cpu":
        client = make_client()
        mover = Mover(client, view.plan())
    elif device.type == "cuda":
        tensors = {name: kv_caches[name] for name in view.layers}
        client, mover = _on_device(settings, make_client, view, tensors, device)
    else:
        raise ConfigError(f"device: {device.type} is not supported, only cpu and cuda", field="device")
    client.start()
    group = view.group
    logger.info(
        "KV of %d layers, %d blocks of %d tokens, %.2f MiB for a chunk of %d tokens%s, slice %s",
        len(view.layers),
        view.num_blocks,
        group.block_tokens,
        view.payload_bytes / (1 << 20),
        settings.chunk_size,
        "" if group.rule is Rule.PREFIX else f" ({group.rule}, the last {group.span} chunks of a hit)",
        view.slice.digest().hex()[:12],
    )
    return GroupSide(client, mover, slice_digest=view.slice.digest(), record_blocks=group.record_blocks)


def _on_device(
    settings: ClientSettings,
    make_client: Callable[..., CacheClient],
    view: KvView,
    kv_caches: dict[str, torch.Tensor],
    device: torch.device,
) -> tuple[CacheClient, Mover]:
    """Make client and mover for blocks in the memory of a GPU. Raises ConfigError if they cannot be copied."""
    # Engines on the CPU must not load the driver.
    from kvstrata.client.pinning import Pinner
    from kvstrata.connectors.device import DeviceMover, open_engine

    ordinal = torch.cuda.current_device() if device.index is None else device.index
    engine, plan = open_engine(settings, view, device, ordinal)
    pages = Pinner(engine, ordinal)
    client = make_client(engine=engine, pages=pages, registers_memory=True)
    section_at = {layer.base: section for section, layer in enumerate(view.layers.values())}
    mover = DeviceMover(
        client,
        engine,
        plan,
        pages=pages,
        sections={name: section_at[tensor.data_ptr()] for name, tensor in kv_caches.items()},
        current_stream=lambda: int(torch.cuda.current_stream(device).cuda_stream),
    )
    return client, mover


def layers_ask(modules: Iterable[object]) -> bool:
    """Whether vLLM calls `wait_for_layer_load` before it reads the cache of each of these layers.

    vLLM's attention layers make this call.  Other caches, such as an indexer's, are read without it.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return all(isinstance(module, (Attention, MLAAttention)) for module in modules)


def kv_dtype_of(vllm_config: VllmConfig) -> str:
    """The KV cache's element type by name."""
    named = str(vllm_config.cache_config.cache_dtype)
    dtype = str(vllm_config.model_config.dtype) if named == "auto" else named
    return dtype.removeprefix("torch.")
