"""The scheduler's side: looks prompts up, promises their tokens, and plans loads and stores.

TensorRT-LLM asks once for each new request, and waits for the answer: the lookup may take `LOOKUP_WAIT_S`.  What was
promised must be there, because the interface has no way to say later that a block is bad; so every chunk that is
promised is leased first, and a worker whose load fails ends the engine rather than let it compute with wrong KV.

A request is looked up under its salt.  Requests with LoRA adapters or media are left out: the interface names them by
numbers only, which say nothing about their content.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstrata.client import CacheClient, Identity
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.tensorrt_llm.plan import SKIP_BLOCK, Load, StepPlan, Store
from kvstrata.connectors.tensorrt_llm.setup import Setup
from kvstrata.errors import InternalError
from kvstrata.keys import ChunkHasher, batch
from kvstrata.patience import patience
from kvstrata.types import LeaseName, RequestIdentity, Role

LOOKUP_WAIT_S = 0.05
CONTENT_BY_NUMBER = ("lora_task_id", "multimodal_hashes", "multimodal_embedding", "prompt_embedding_table")
"""Attributes of a request that, when set, decide its KV beside its tokens."""


class _Hit(NamedTuple):
    lease: LeaseName
    extents: bytes
    n_chunks: int
    computed_tokens: int
    """Tokens that the engine has itself."""
    end_tokens: int
    """Tokens that the engine was promised, counted from the start of the prompt."""


class _Request:
    """One request that is in the engine."""

    __slots__ = ("blocks", "hasher", "hit", "identity", "planned", "prompt_tokens", "stores", "tokens")

    def __init__(self, identity: Identity, hasher: ChunkHasher, prompt_tokens: int) -> None:
        self.identity = identity
        self.hasher = hasher
        self.prompt_tokens = prompt_tokens
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self.hit: _Hit | None = None
        """A promise whose load is not planned yet."""
        self.planned = 0
        """Leading chunks that the cache has, or that are planned to be stored."""
        self.stores = False
        """Whether any store was planned."""


class SchedulerSide:
    """All requests of an engine, in the thread that TensorRT-LLM schedules in."""

    def __init__(self, setup: Setup, client: CacheClient, group: bytes) -> None:
        """`client` has the role of a scheduler and is started; it belongs to this object."""
        self._setup = setup
        self._client = client
        self._group = group
        self._requests: dict[int, _Request] = {}
        self._wait_s = min(patience(LOOKUP_WAIT_S), setup.settings.lookup_timeout_ms / 1000)

    def matched_tokens(self, request: Any, computed_tokens: int) -> int:
        """How many tokens behind the first `computed_tokens` the cache has; they are leased until they are loaded."""
        self.forget(request.request_id)
        if any(_is_set(getattr(request, name, None)) for name in CONTENT_BY_NUMBER):
            return 0
        salt = getattr(request, "cache_salt", None) or getattr(request, "cache_salt_id", None) or ""
        tenant = self._settings.tenant
        identity = self._client.identity(RequestIdentity(tenant=tenant, salt=str(salt)))
        tokens = list(request.get_tokens(0))
        known = _Request(identity, identity.hasher(), len(tokens))
        known.hasher.feed(tokens)
        self._requests[request.request_id] = known
        known.hit = self._look_up(known, request.request_id, computed_tokens)
        if known.hit is None:
            return 0
        known.planned = known.hit.n_chunks
        return known.hit.end_tokens - computed_tokens

    def cancelled(self, request_id: int, start_tokens: int) -> None:
        """The engine does not use what it was promised from token `start_tokens` on."""
        known = self._requests.get(request_id)
        if known is None or known.hit is None:
            return
        known.planned = min(known.planned, start_tokens // self._settings.chunk_size)
        if start_tokens <= known.hit.computed_tokens:
            self._client.release([known.hit.lease], group=True)
            known.hit = None
        else:
            known.hit = known.hit._replace(end_tokens=min(start_tokens, known.hit.end_tokens))

    def plan_loads(self, new_requests: Sequence[Any]) -> list[Load]:
        """Loads of requests that are scheduled for the first time. Raises InternalError if their blocks are missing."""
        loads = []
        for data in new_requests:
            known = self._requests.get(data.request_id)
            if known is not None and known.hit is not None:
                loads.append(self._load(known, known.hit, data.new_block_ids))
        return loads

    def plan_stores(
        self, new_requests: Sequence[Any], running: Sequence[Any], promised: dict[int, int]
    ) -> list[Store]:
        """Stores of chunks that this step completes. `promised`: tokens that this step loads, by request."""
        stores = []
        for data in (*new_requests, *running):
            known = self._requests.get(data.request_id)
            if known is None:
                continue
            known.blocks.extend(data.new_block_ids)
            known.tokens.extend(data.new_tokens)
            # TensorRT-LLM leaves loaded tokens out of the position of a new request.
            valid = data.computed_position + promised.get(data.request_id, 0) + data.num_scheduled_tokens
            store = self._store(data.request_id, known, min(valid, len(known.tokens)))
            if store is not None:
                stores.append(store)
        return stores

    def plan(self, output: Any) -> tuple[StepPlan, dict[int, int]]:
        """A plan with the loads of this step, and the tokens that it loads, by request."""
        promised = {
            data.request_id: known.hit.end_tokens - known.hit.computed_tokens
            for data in output.new_requests
            if (known := self._requests.get(data.request_id)) is not None and known.hit is not None
        }
        return StepPlan(self._group, self.plan_loads(output.new_requests)), promised

    def forget(self, request_id: int) -> bool:
        """The engine is done with a request, or begins it anew. Returns whether a store may still read its blocks."""
        known = self._requests.pop(request_id, None)
        if known is None:
            return False
        if known.hit is not None:
            self._client.release([known.hit.lease], group=True)
        return known.stores

    def close(self) -> None:
        """End the client."""
        self._client.close()

    # Inside.

    @property
    def _settings(self) -> ClientSettings:
        return self._setup.settings

    def _look_up(self, known: _Request, request_id: int, computed_tokens: int) -> _Hit | None:
        size = self._settings.chunk_size
        # The engine must compute the last token of a prompt itself.
        usable = (known.prompt_tokens - 1) // size
        if computed_tokens % self._setup.block_tokens or usable * size <= computed_tokens:
            return None
        chain = batch.part(known.hasher.chain, 0, usable)
        if not self._client.connected or not (
            self._client.peek(known.identity, chain) or self._client.has_l2
        ):
            return None
        call = self._client.lookup(
            known.identity,
            chain,
            request_id=str(request_id),
            probe=known.hasher.probe,
            deadline_ms=round(1000 * self._wait_s),
        )
        if not call.wait(self._wait_s):
            call.cancel()
            return None
        found = call.result
        gained = found.n_chunks * size - computed_tokens
        if found.lease is None or gained < max(1, self._settings.min_retrieve_tokens) or not call.claim():
            call.cancel()
            return None
        return _Hit(found.lease, found.extents, found.n_chunks, computed_tokens, found.n_chunks * size)

    def _load(self, known: _Request, hit: _Hit, blocks: Sequence[int]) -> Load:
        size, per_chunk = self._settings.chunk_size, self._setup.chunk_blocks
        block_tokens = self._setup.block_tokens
        first, end = hit.computed_tokens // size, -(-hit.end_tokens // size)
        wanted = range(hit.computed_tokens // block_tokens, hit.end_tokens // block_tokens)
        if len(blocks) < wanted.stop or any(blocks[i] < 0 for i in wanted):
            raise InternalError(
                f"request: TensorRT-LLM took {hit.end_tokens} tokens of a prompt from the cache, but gave it only "
                f"{len(blocks)} blocks of {block_tokens} tokens"
            )
        n_slices = len(self._client.slices)
        self._client.release([hit.lease])  # this process's share; each worker has one of its own
        known.hit = None
        row = len(hit.extents) // hit.n_chunks
        assert n_slices, "a lookup found chunks before all workers had attached"
        return Load(
            hit.lease,
            known.identity.request,
            batch.part(known.hasher.chain, first, end),
            hit.extents[first * row : end * row],
            self._client.slices,
            [
                [
                    blocks[i] if i in wanted else SKIP_BLOCK
                    for i in range(chunk * per_chunk, (chunk + 1) * per_chunk)
                ]
                for chunk in range(first, end)
            ],
        )

    def _store(self, request_id: int, known: _Request, valid_tokens: int) -> Store | None:
        per_chunk = self._setup.chunk_blocks
        if not self._settings.save_decode_cache:
            valid_tokens = min(valid_tokens, known.prompt_tokens)
        first, end = known.planned, valid_tokens // self._settings.chunk_size
        blocks = [known.blocks[chunk * per_chunk : (chunk + 1) * per_chunk] for chunk in range(first, end)]
        if not blocks or any(len(ids) < per_chunk or min(ids) < 0 for ids in blocks):
            return None
        known.hasher.feed(known.tokens)
        known.planned, known.stores = end, True
        chain = known.hasher.chain
        return Store(
            request_id,
            known.identity.request,
            batch.before(chain, first),
            batch.part(chain, first, end),
            known.hasher.probe,
            blocks,
        )


def open_scheduler(setup: Setup) -> SchedulerSide:
    """Make the scheduler's side and start its client."""
    group = secrets.token_bytes(16)
    client = CacheClient(
        setup.settings, role=Role.SCHEDULER, layout=setup.layout, group=group, engine_slices=setup.ranks
    )
    client.start()
    return SchedulerSide(setup, client, group)


def _is_set(value: Any) -> bool:
    """Whether an attribute holds anything; a tensor does, whatever it holds."""
    return value is not None and not (isinstance(value, list | tuple) and not value)
