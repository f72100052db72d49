"""The scheduler side's view of an engine: what it may load and store, and which loads are safe.

Which loads are safe depends on the order of vLLM's steps, which follows from its configuration.  vLLM's objects are
read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvstrata.client import CacheClient
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.vllm.groups import CacheGroup, whole_hits
from kvstrata.connectors.vllm.weights import WeightsVersion
from kvstrata.errors import ConfigError

SYNC_LOAD_BYTES = 256 << 20
"""Maximum size of hits that mode `auto` loads before the forward pass; a host copies that in some 30 ms."""
MakeEvent = Callable[[Sequence[int], bytes, Sequence[bytes], Any, int], Any]
"""(tokens, parent key, keys, request, index of the first token) → vLLM's event that chunks were stored."""
MakeRemoval = Callable[[Sequence[bytes]], Any]
"""Keys → vLLM's event that these chunks were removed."""


class BlockPins:
    """Pins the blocks that stores read, so that vLLM does not free them. Belongs to the scheduler's thread."""

    def __init__(self, block_pool: Callable[[], Any] = lambda: None) -> None:
        """`block_pool()` is vLLM's BlockPool; None in an engine whose stores pin nothing."""
        self.block_pool = block_pool
        self._pinned: dict[int, tuple[Sequence[int], int]] = {}
        """Store → its blocks, and how many workers may still read them."""

    def cached_tokens(self, request: Any, group: int) -> int:
        """The number of leading tokens of a request in vLLM's own cache, estimated by bisection over its blocks.

        vLLM evicts the blocks of a prompt from the last one on, so a cached block seldom follows an absent one.
        """
        pool = self.block_pool()
        if pool is None:
            return 0
        absent = bisect_left(
            request.block_hashes, True, key=lambda block_hash: not pool.get_cached_block(block_hash, [group])
        )
        return int(absent * pool.hash_block_size)

    def pin(self, store_id: int, blocks: Sequence[int], n_workers: int) -> None:
        """Keep these blocks allocated, even if their request frees them, until no worker reads them."""
        pool = self.block_pool()
        pool.touch([pool.blocks[block] for block in blocks])
        self._pinned[store_id] = blocks, n_workers

    def read(self, store_id: int) -> None:
        """One more worker has finished reading the store's blocks; after the last one, vLLM may free them."""
        blocks, left = self._pinned.pop(store_id, ((), 0))
        if left > 1:
            self._pinned[store_id] = blocks, left - 1
        else:
            self._unpin(blocks)

    def never_sent(self, store_id: int) -> None:
        """Unpin the blocks of a store that was sent to no worker."""
        blocks, _ = self._pinned.pop(store_id, ((), 0))
        self._unpin(blocks)

    def _unpin(self, blocks: Sequence[int]) -> None:
        if blocks:
            pool = self.block_pool()
            pool.free_blocks([pool.blocks[block] for block in blocks])


class Engine(msgspec.Struct, eq=False):
    """The facts about the engine that the scheduler's side needs. Belongs to the scheduler's thread."""

    client: CacheClient
    """The caller starts it; `SchedulerSide.close` closes it."""
    settings: ClientSettings
    groups: Sequence[CacheGroup]
    chunk_bytes: int
    """Bytes that one worker copies per chunk."""
    world_size: int
    """Number of workers that report."""
    weights: WeightsVersion
    prefix_cache: Callable[[], object] = lambda: None
    """Returns an object that vLLM replaces when it empties its own cache."""
    may_load: bool = True
    may_store: bool = True
    """Whether vLLM's kv_role allows it; `may_load` and `may_store` are false once a worker has stopped copying."""
    name: str = ""
    """Unique name of this run of the engine."""
    media_are_counted: bool = False
    """Whether vLLM's identifiers of media are numbers, not hashes of their content."""
    lookahead_tokens: int = 0
    """`lookahead_tokens` of the layout."""
    sync_load_bytes: int = SYNC_LOAD_BYTES
    recomputes: bool = False
    """Whether vLLM computes blocks that a load did not fill (`kv_load_failure_policy`), or else fails the request."""
    events: MakeEvent | None = None
    removal: MakeRemoval | None = None
    server_seen: Callable[[], bool] = lambda: False
    """Whether a server seems to run."""
    pins: BlockPins = msgspec.field(default_factory=BlockPins)
    store_late: Callable[[], bool] | None = None
    """Whether chunks that are complete now are stored only when vLLM is about to reuse their blocks. None: never, as in
    an engine with windows or states."""
    shares_l1: Callable[[], bool] = lambda: False
    """Whether other engines are known to use the same server."""
    step_tokens: int = 0
    """Maximum number of tokens that a step computes."""
    read_here: Callable[[str], bool] = lambda request_id: False
    """Waits a moment for the worker, in the same process, to finish reading a request's blocks for stores; returns
    whether it has finished."""
    now: Callable[[], float] = time.monotonic

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk of every group."""
        return self.groups[0].chunk_tokens

    @property
    def exact(self) -> bool:
        """Whether a hit must end with a chunk and is loaded as a whole, asynchronously."""
        return whole_hits(self.groups)


def no_reuse_reason(vllm_config: Any) -> str:
    """Why this engine must not load KV that was computed earlier; "" if it may.

    Pooling over all tokens (MEAN, CLS, STEP) needs the hidden states of the whole prompt.  With such pooling, vLLM
    turns its own prefix cache off, and its pooler raises an exception if tokens were not computed.
    """
    model = vllm_config.model_config
    if getattr(model, "is_prefix_caching_supported", True):
        return ""
    pooler = getattr(model, "pooler_config", None)
    kinds = [getattr(pooler, name, None) for name in ("seq_pooling_type", "tok_pooling_type")]
    named = "/".join(str(kind) for kind in kinds if kind)
    return f"vLLM supports no prefix caching for this model{f' with {named} pooling' if named else ''}"


def media_are_counted(vllm_config: Any) -> bool:
    """Whether vLLM numbers images and the like instead of hashing their content.

    vLLM does so when both its processor cache and its prefix cache are off.  The numbers begin anew with each process.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return (
        multimodal is not None
        and getattr(multimodal, "mm_processor_cache_gb", None) == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


def check_steps(vllm_config: Any, load_mode: str) -> None:
    """Raises ConfigError for an engine whose steps this connector cannot follow, or whose `load_mode` is not safe."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and vllm_config.speculative_config is not None and not vllm_config.use_v2_model_runner:
        # In all stages but the last, that runner does not call wait_for_save in steps that compute: no chunk would be
        # stored, and the blocks of finished requests would stay allocated forever.
        raise ConfigError(
            f"speculative_config: speculative decoding with pipeline_parallel_size {stages} on vLLM's V1 model runner "
            "is not supported; set pipeline_parallel_size to 1, turn speculative decoding off, or use the V2 model "
            "runner (VLLM_USE_V2_MODEL_RUNNER=1)",
            field="speculative_config",
        )
    if load_mode == "sync" and not may_load_synchronously(vllm_config):
        why = f"pipeline_parallel_size {stages}" if stages > 1 else "asynchronous scheduling"
        what = "set pipeline_parallel_size to 1" if stages > 1 else "start vLLM with --no-async-scheduling"
        raise ConfigError(
            f"load_mode: 'sync' is not safe in this engine: with {why} vLLM plans a step before it knows whether the "
            "loads of the previous step have failed, and would emit tokens computed on bad KV; set load_mode to 'auto' "
            f"or 'async', or {what}",
            field="load_mode",
        )


def may_load_synchronously(vllm_config: Any) -> bool:
    """Whether vLLM knows the outcome of each step's loads before it plans the next step.

    vLLM does not know it when several steps are under way at once, by asynchronous scheduling or pipeline parallelism.
    An asynchronous load always ends before vLLM plans a step that uses its blocks.
    """
    return bool(vllm_config.max_concurrent_batches == 1)


def no_load_reason(vllm_config: Any) -> str:
    """Why this engine must not load, though it may store; "" if it may load.

    Routed experts are returned for each token of the prompt; only the engine that computed a token knows its experts.
    """
    if _returns_routed_experts(vllm_config):
        return "it returns the routed experts of all tokens (--enable-return-routed-experts), which are not stored"
    return ""


def _returns_routed_experts(vllm_config: Any) -> bool:
    """Whether --enable-return-routed-experts is on: vLLM 0.31 moved the option to `aux_output_config`."""
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is not None:
        return bool(outputs.enabled)
    return bool(getattr(vllm_config.model_config, "enable_return_routed_experts", False))
