"""Identities and chunk keys of requests, made only while the weights of their KV are known.

After a reset of vLLM's caches the weights may have changed (see `weights`).  No key is made until the workers have
reported which weights they have.  If vLLM still held blocks at the reset, KV that is computed from them is *stale*: it
depends on the earlier weights and must not be stored under the identity of the current weights, unless both turn out to
be the same.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from typing import Any

from kvstrata.client import Identity
from kvstrata.connectors.vllm.engine import Engine
from kvstrata.connectors.vllm.lookup_table import LookupTable, RequestTenants, Tracked
from kvstrata.connectors.vllm.weights import Adapters, AdapterUnreadable
from kvstrata.keys import MediaItem
from kvstrata.types import RequestIdentity, canonical_json

logger = logging.getLogger("vllm.kvstrata")

HASH_TOKENS_PER_CALL = 65_536
"""Maximum number of tokens hashed in one call, which takes about one millisecond."""
REMEMBERED_IDENTITIES = 4096
CONTENT_HASH = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""Pattern of vLLM's hash of a medium's content, which the name of a LoRA adapter may precede."""


class RequestKeys:
    """Keys of all requests of one engine. Belongs to the scheduler's thread."""

    def __init__(self, engine: Engine, lookups: LookupTable, tenants: RequestTenants) -> None:
        self._client, self._weights = engine.client, engine.weights
        self._lookups = lookups
        self._engine = engine.name
        self._chunk_tokens = engine.chunk_tokens
        self.adapters = Adapters(engine.world_size, engine.now)
        self._identities: OrderedDict[RequestIdentity, Identity] = OrderedDict()
        self._mark = ""
        """The mark (`WeightsVersion.mark`) of the weights for which identities were last made."""
        self._weights_changed = False
        """Whether this engine has had other weights than now."""
        self._prefix_cache = engine.prefix_cache
        self._prefix_cache_seen = engine.prefix_cache()
        self.generation = 0
        """Changes when vLLM's KV may no longer match keys that were made before."""
        self.engine_stale = False
        """Whether vLLM's own cache may have KV from before the last reset, or from a load with unknown outcome."""
        self._stale_before: bool | None = None
        """`engine_stale` before the first reset since the weights were last known."""
        # Identities are declared now, so that the engine's slices are known before the first request.
        for tenant in tenants.first:
            self.identity(RequestIdentity(tenant=tenant))

    def prepare(self, tracked: Tracked) -> bool:
        """Update a request's identity and keys. Returns whether all its keys are made."""
        request = tracked.request
        if tracked.identity is None:
            if not self.weights_settled():
                return False
            try:
                adapter = self.adapters.name(request.lora_request)
            except AdapterUnreadable as error:
                logger.debug("request %s is computed without the cache: %s", request.request_id, error)
                self._lookups.skip(tracked, "unreadable_adapter")
                return False
            if adapter is None:
                return False
            wanted = RequestIdentity(
                # A list of three, so it cannot equal the name of an adapter, which is a list of two.
                adapter=canonical_json(["weights", self._mark, adapter]).decode() if self._mark else adapter,
                tenant=tracked.tenant,
                salt=tracked.salt,
            )
            tracked.identity = self.identity(wanted)
            tracked.adapter = self.adapters.number(request.lora_request)
            tracked.hasher = tracked.identity.hasher(media_items(request.mm_features, self._engine))
        if tracked.identity.forbidden:
            self._lookups.skip(tracked, "tenant_refused")
            return False
        assert tracked.hasher is not None
        start, ahead = tracked.hasher.n_chunks * self._chunk_tokens, tracked.hasher.lookahead_tokens
        if request.num_tokens - start >= self._chunk_tokens + ahead:
            end = start + max(HASH_TOKENS_PER_CALL, self._chunk_tokens) + ahead
            tracked.hasher.feed(request.all_token_ids[start:end], start)
        return bool((request.num_tokens - ahead) // self._chunk_tokens <= tracked.hasher.n_chunks)

    def identity(self, wanted: RequestIdentity) -> Identity:
        """The client's identity for requests like `wanted`; the last REMEMBERED_IDENTITIES are kept."""
        identity = self._identities.get(wanted)
        if identity is None:
            identity = self._identities[wanted] = self._client.identity(wanted)
            while len(self._identities) > REMEMBERED_IDENTITIES:
                self._identities.popitem(last=False)
        else:
            self._identities.move_to_end(wanted)
        return identity

    def know_weights(self) -> bool:
        """Whether the weights are known; if not, ask the workers.

        Call it only for a request that vLLM wants to begin now: requests also arrive while the engine pauses for new
        weights, and an answer given at that time would be too early.
        """
        return self.weights_settled() or (self._weights.wanted() and self.weights_settled())

    def weights_settled(self) -> bool:
        """Whether the weights are known, without asking; identities are then made for these weights.

        vLLM empties its prefix cache after new weights were loaded.  It does not tell its connector, but it puts a new
        object in the cache's place.
        """
        if self._prefix_cache() is not self._prefix_cache_seen:
            self.reset(engine_empty=True)  # vLLM empties its cache only while no block is in use
        if not self._weights.known:
            return False
        if self._weights.mark != self._mark:
            # Without named weights, the first mark is that of the initial weights.
            self._weights_changed |= bool(self._mark) or self._weights.named
            self._mark = self._weights.mark
            self._identities.clear()
        elif self._stale_before is False:
            # The weights are the same as when vLLM's cache had no stale KV.
            self.engine_stale = False
            for tracked in self._lookups.tracked.values():
                tracked.stale = False
        self._stale_before = None
        return True

    def reset(self, *, engine_empty: bool) -> None:
        """See `SchedulerSide.reset`."""
        if not engine_empty:
            logger.warning(
                "the cache was reset while requests held blocks: KV computed from these blocks is not stored until "
                "the cache is reset with no request running, or the weights prove to be the same"
            )
        self.generation += 1
        self._weights.may_have_changed()
        self._prefix_cache_seen = self._prefix_cache()
        if self._stale_before is None:
            self._stale_before = self.engine_stale
        self.engine_stale = not engine_empty
        if engine_empty:
            self._stale_before = False
            self.adapters.replaced.clear()
        for tracked in self._lookups.tracked.values():
            self._drop_keys(tracked)
            tracked.stale = not engine_empty

    def distrust_engine(self) -> None:
        """Stop storing KV computed from vLLM's current blocks: some may be bad without vLLM knowing it."""
        self.generation += 1
        self.engine_stale = True
        if self._stale_before is not None:
            self._stale_before = True
        for tracked in self._lookups.tracked.values():
            tracked.stale = True

    def heard_adapter(self, number: int, digest: str) -> None:
        """Apply a worker's answer about a LoRA adapter; if it was replaced, its running requests mix two adapters."""
        replaced = self.adapters.heard(number, digest)
        self.generation += bool(replaced)
        for tracked in self._lookups.tracked.values() if replaced else ():
            lora = tracked.request.lora_request
            if lora is not None and lora.lora_int_id == replaced:
                self._drop_keys(tracked)
                tracked.stale = True

    def is_stale(self, request: Any) -> bool:
        """Whether vLLM's own cache may have KV for this request from weights other than the current ones."""
        lora = request.lora_request
        return self.engine_stale or (lora is not None and lora.lora_int_id in self.adapters.replaced)

    @property
    def others_trusted(self) -> bool:
        """Whether KV from another connector is of the current weights, not possibly of earlier ones."""
        return not (self.engine_stale or self._weights_changed)

    def _drop_keys(self, tracked: Tracked) -> None:
        """Discard the request's identity and keys, and store its chunks again."""
        self._lookups.forget(tracked)
        tracked.identity = tracked.hasher = None
        tracked.next_store = tracked.tail_end = 0
        tracked.tail_keys = -1, []
        tracked.tails_after = -1
        tracked.deferred = False


def media_items(features: Any, engine: str) -> list[MediaItem]:
    """The media that a request's placeholder tokens stand for, from vLLM's `Request.mm_features`.

    A name that the requester gave (`uuid`) is not a hash of content.  Like vLLM we trust such a name while this engine
    runs, so its content id is valid only for this start of the engine, which `engine` names.
    """
    return [
        MediaItem(
            feature.mm_position.offset,
            feature.mm_position.length,
            feature.identifier
            if CONTENT_HASH.fullmatch(feature.identifier)
            else f"{feature.identifier}\nnamed for {engine}",
        )
        for feature in features
    ]
