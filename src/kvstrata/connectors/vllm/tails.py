"""Tails: the unfinished last chunk of a prompt, up to its last whole block, as a record of its own (`keys.chunking`).

A prompt may hit any tail whose tokens it shares, so a lookup searches the longest tail that follows the last chunk
found: in L1 directly, through shared memory, before any request is sent; in L2 by naming the tails to the server.  A
chunk that is stored replaces the tails of its tokens, as a longer tail replaces the shorter ones.

Only engines whose KV is a single group with full attention have tails: with other groups a hit ends where a window or a
state was stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.client import LookupResult
from kvstrata.connectors.vllm.engine import Engine
from kvstrata.connectors.vllm.lookup_table import Tracked
from kvstrata.keys.chunking import Tail
from kvstrata.rpc.wire import MAX_TAILS, TailSet


class PromptTails:
    """The tails of one engine's requests. Belongs to the scheduler's thread."""

    def __init__(self, engine: Engine) -> None:
        group = engine.groups[0]
        self._client = engine.client
        self._block_tokens, self._chunk_tokens = group.block_tokens, group.chunk_tokens
        self.enabled = engine.settings.save_unfull_chunk and not engine.exact and group.chunk_blocks > 1

    @property
    def step_tokens(self) -> int:
        """Hits end at a multiple of this number of tokens."""
        return self._block_tokens if self.enabled else self._chunk_tokens

    def of(self, tracked: Tracked, tokens: int) -> Tail | None:
        """The tail with which the first `tokens` tokens of a request end; None if they end with a chunk."""
        chunk, rest = divmod(tokens, self._chunk_tokens)
        blocks = rest // self._block_tokens
        assert tracked.hasher is not None
        if not self.enabled or not blocks or tracked.hasher.n_chunks < chunk:
            return None
        keys = self._keys(tracked, chunk)
        if len(keys) < blocks:
            return None
        return Tail(chunk, blocks * self._block_tokens, keys[blocks - 1])

    def of_hit(self, tracked: Tracked, hit: LookupResult) -> Tail:
        """The tail of a hit with a tail."""
        tail = self.of(tracked, hit.n_chunks * self._chunk_tokens + hit.tail_tokens)
        assert tail is not None, "a hit beyond its chunks has a tail"
        return tail

    def in_l1(self, tracked: Tracked, tail: Tail) -> bool:
        """Whether L1 has the tail now."""
        return bool(self._present(tracked, [tail.key])[0])

    def to_ask(self, tracked: Tracked) -> list[TailSet]:
        """The tails that a lookup of the request names."""
        hasher, identity = tracked.hasher, tracked.identity
        assert hasher is not None and identity is not None
        if not self.enabled or not identity.slices or tracked.load_tokens:
            return []
        n_chunks = hasher.n_chunks
        if 0 <= tracked.tails_after <= n_chunks:
            return self._named(tracked, tracked.tails_after)
        in_l1 = self._client.peek(identity, hasher) if n_chunks else 0
        keys = self._keys(tracked, in_l1)
        found = [i for i, there in enumerate(self._present(tracked, keys)) if there]
        asked = [TailSet(in_l1, [(i + 1) * self._block_tokens], keys[i]) for i in found[-1:]]
        if in_l1 < n_chunks and self._client.has_l2:
            asked += self._named(tracked, n_chunks)
        return asked

    def replaced_by(self, tracked: Tracked, first: int, last: int) -> bytes:
        """The keys of the tails in L1 that the chunks [first, last) replace.

        Only the first chunk that L1 lacks can have tails there: a tail is never without the chunk before it.
        """
        if not self.enabled:
            return b""
        assert tracked.identity is not None and tracked.hasher is not None
        absent = self._client.peek(tracked.identity, tracked.hasher)
        if not first <= absent < last:
            return b""
        return self._of_these_in_l1(tracked, self._keys(tracked, absent))

    def replaced_by_tail(self, tracked: Tracked, tail: Tail) -> bytes:
        """The keys of the tails in L1 that a longer one of the same chunk replaces."""
        return self._of_these_in_l1(
            tracked, self._keys(tracked, tail.chunk)[: tail.tokens // self._block_tokens - 1]
        )

    def _named(self, tracked: Tracked, chunk: int) -> list[TailSet]:
        """All tails of a chunk, the longest first, for L2 as well."""
        keys = self._keys(tracked, chunk)
        numbers = range(len(keys) - 1, max(-1, len(keys) - 1 - MAX_TAILS), -1)
        if not keys:
            return []
        tokens = [(i + 1) * self._block_tokens for i in numbers]
        return [TailSet(chunk, tokens, b"".join(keys[i] for i in numbers), in_l2=True)]

    def _keys(self, tracked: Tracked, chunk: int) -> list[bytes]:
        """The keys of all tails of a chunk whose tokens are known, the shortest first."""
        request, hasher = tracked.request, tracked.hasher
        assert hasher is not None
        start, ahead = chunk * self._chunk_tokens, hasher.lookahead_tokens
        known = min(request.num_tokens - ahead - start, self._chunk_tokens - self._block_tokens)
        made, keys = tracked.tail_keys
        if made == chunk and len(keys) >= known // self._block_tokens:
            return keys
        keys = hasher.tail_keys(
            chunk, request.all_token_ids[start : start + known + ahead], self._block_tokens
        )
        tracked.tail_keys = chunk, keys
        return keys

    def _present(self, tracked: Tracked, keys: Sequence[bytes]) -> list[bool]:
        assert tracked.identity is not None
        root = tracked.identity.root
        there = self._client.pool.present([(root, key) for key in keys]) if keys else []
        return [False] * len(keys) if there is None else there

    def _of_these_in_l1(self, tracked: Tracked, keys: Sequence[bytes]) -> bytes:
        there = self._present(tracked, keys[-MAX_TAILS:])
        return b"".join(key for key, is_there in zip(keys[-MAX_TAILS:], there, strict=True) if is_there)
