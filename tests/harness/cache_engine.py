"""One rank of an engine without a model: paged blocks and a CacheClient, in this process or in a child.

The KV of a prompt follows from its tokens: the blocks of a chunk hold bytes made from the chunk's key and the slice, so
any process can tell right bytes from wrong ones.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.client import CacheClient, Identity, LoadItem, LookupCall, LookupResult, StoreJob, StoreOutcome
from kvstrata.config.client_model import ClientSettings
from kvstrata.keys import ChunkHasher
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.types import (
    KEY_BYTES,
    SPAN_FACT,
    LayoutIdentity,
    LeaseName,
    MissReason,
    RequestIdentity,
    Role,
    facts_digest,
    shown_name,
    unpack_extents,
)
from tests.harness.child import serve

PATIENCE_S = 120.0
"""Longest wait for something that must happen; when it runs out, the test fails."""
SILENCE_S = 5.0
"""Longest time for which a busy machine may keep a healthy server from answering; a client gives up sooner."""
AGAIN_S = 0.05
CHUNK_TOKENS = 16
BLOCK_TOKENS = 8
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS


def eventually(what: str, holds: Callable[[], Any]) -> Any:
    """Wait until `holds()` is true and return its value. Raises AssertionError naming `what` after `PATIENCE_S`."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < ends_s, f"did not happen within {PATIENCE_S:g} s: {what}"
        time.sleep(0.002)


def prompt(n_chunks: int, seed: int = 0) -> list[int]:
    """Return the tokens of a prompt; prompts of different seeds share no chunk."""
    return [seed * 1_000_003 + i for i in range(n_chunks * CHUNK_TOKENS)]


def layout_identity(chunk_tokens: int = CHUNK_TOKENS, model: str = "test-model") -> LayoutIdentity:
    return LayoutIdentity(model=model, kv_dtype="bf16", chunk_tokens=chunk_tokens)


class CacheEngine:
    """One rank: blocks of its own and a client. `rank` decides its slice (its layers).

    With a `span` the slice belongs to group 1, and only its last `span` chunks of a hit are needed.
    """

    chunk_blocks = BLOCKS_PER_CHUNK

    def __init__(
        self,
        socket_dir: Path,
        *,
        rank: int = 0,
        ranks: int = 1,
        group: bytes = b"engine of a test",
        block_bytes: int = 4096,
        num_blocks: int = 512,
        layers: int = 2,
        model: str = "test-model",
        role: Role = Role.CLIENT,
        tenant: str = "",
        span: int = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.tenant, self.adapter = tenant, ""
        self.blocks = PagedBlocks(
            layers=layers, num_blocks=num_blocks, block_bytes=block_bytes, chunk_blocks=self.chunk_blocks
        )
        facts = {**self.blocks.facts, **({SPAN_FACT: span} if span else {})}
        self.part = msgspec.structs.replace(
            self.blocks.slice(first_layer=rank * layers), layout=facts_digest(facts), group=1 if span else 0
        )
        self.client = CacheClient(
            ClientSettings(socket_dir=str(socket_dir), chunk_size=CHUNK_TOKENS, **(settings or {})),
            role=role,
            layout=layout_identity(CHUNK_TOKENS, model),
            group=group,
            engine_slices=ranks,
            slice=None if role is Role.SCHEDULER else self.part,
            facts=None if role is Role.SCHEDULER else facts,
        )
        self._requests = itertools.count()
        self._begun_s = 0.0
        self.copied = 0.0, 0
        """Seconds that the last store or load of `stored` or `check_load` took, and its bytes."""

    def __enter__(self) -> CacheEngine:
        self.client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.blocks.close()

    def connect(self) -> CacheEngine:
        """Wait until the client is attached and the slices of all ranks are known."""
        eventually("the client connects", lambda: self.client.connected)
        identity = self.identity()
        eventually("the identity is ready", lambda: identity.ready)
        return self

    def identity(self, salt: str = "") -> Identity:
        return self.client.identity(RequestIdentity(adapter=self.adapter, tenant=self.tenant, salt=salt))

    def hasher(self, tokens: Sequence[int], salt: str = "") -> ChunkHasher:
        """Return a hasher that has been fed a prompt."""
        hasher = self.identity(salt).hasher()
        hasher.feed(tokens)
        return hasher

    def blocks_of(self, chunk: int, first_block: int = 0) -> list[int]:
        """Return the blocks of chunk number `chunk` of a prompt that begins at `first_block`."""
        begin = first_block + chunk * BLOCKS_PER_CHUNK
        return list(range(begin, begin + BLOCKS_PER_CHUNK))

    def compute(self, hasher: ChunkHasher, chunks: Sequence[int], first_block: int = 0) -> None:
        """Write the KV of these chunks into their blocks, as a model would."""
        for chunk in chunks:
            self.blocks.fill(self.blocks_of(chunk, first_block), self._seed(hasher.key(chunk)))

    def expected(self, key: bytes) -> bytes:
        """Return the bytes that this rank's blocks of chunk `key` must hold."""
        spare = self.blocks_of(0, self.blocks.num_blocks - BLOCKS_PER_CHUNK)
        self.blocks.fill(spare, self._seed(key))
        return self.blocks.read(spare)

    def _seed(self, key: bytes) -> tuple[str, tuple[int, int]]:
        return key.hex(), self.part.layers

    def store(
        self, tokens: Sequence[int], first: int = 0, salt: str = "", compute: bool = True, **more: Any
    ) -> StoreJob:
        """Compute the chunks from number `first` on and begin to store them."""
        hasher = self.hasher(tokens, salt)
        chunks = range(first, hasher.n_chunks)
        if compute:
            self.compute(hasher, chunks)
        self._begun_s = time.perf_counter()
        return self.client.store(
            self.identity(salt),
            hasher.key(first - 1) if first else b"",
            hasher.chain[first * KEY_BYTES :],
            self.blocks.plan,
            [self.blocks_of(chunk) for chunk in chunks],
            probe=hasher.probe,
            **more,
        )

    def stored(self, tokens: Sequence[int], first: int = 0, salt: str = "") -> list[str]:
        """Store, wait, and return the outcomes.  Chunks that a silent server did not take are stored again."""
        ours: set[int] = set()
        not_taken = {StoreOutcome.UNAVAILABLE, StoreOutcome.FAILED}
        ends_s = time.monotonic() + SILENCE_S
        while True:
            job = self.store(tokens, first, salt)
            assert job.done.wait(PATIENCE_S), "the store never ended"
            self.copied = time.perf_counter() - self._begun_s, job.bytes
            # The server may have taken a chunk whose store failed: the chunk is then present, or in flight for a while.
            ours |= {
                i for i, now in enumerate(job.outcomes) if now in (StoreOutcome.STORED, StoreOutcome.FAILED)
            }
            if not_taken.isdisjoint(job.outcomes) or time.monotonic() >= ends_s:
                return [
                    str(StoreOutcome.STORED if now is StoreOutcome.PRESENT and i in ours else now)
                    for i, now in enumerate(job.outcomes)
                ]
            not_taken.add(StoreOutcome.IN_FLIGHT)
            time.sleep(AGAIN_S)

    def lookup(
        self, tokens: Sequence[int], salt: str = "", deadline_ms: int = 10_000, **more: Any
    ) -> LookupCall:
        """Begin a lookup of a prompt. `more`: see `CacheClient.lookup`."""
        return self.client.lookup(
            self.identity(salt),
            self.hasher(tokens, salt),
            request_id=f"request-{next(self._requests)}",
            deadline_ms=deadline_ms,
            **more,
        )

    def looked_up(
        self, tokens: Sequence[int], salt: str = "", again_s: float = SILENCE_S, **more: Any
    ) -> LookupResult:
        """Look a prompt up and wait for the result. `more`: see `lookup`.

        For `again_s` the lookup is repeated while the client asks nothing because the server was silent.
        """
        ends_s = time.monotonic() + again_s
        while True:
            call = self.lookup(tokens, salt, **more)
            assert call.wait(PATIENCE_S), "the lookup never ended"
            silent = call.result.reason is MissReason.BREAKER_OPEN
            if call.result.lease or not silent or time.monotonic() >= ends_s:
                return call.result
            time.sleep(AGAIN_S)

    def items(
        self, tokens: Sequence[int], result: LookupResult, salt: str = "", first_block: int = 0
    ) -> list[LoadItem]:
        """Return the items that load a lookup's result into this rank's blocks, of the chunks that it needs."""
        hasher = self.hasher(tokens, salt)
        slices = self.client.slices
        mine = unpack_extents(result.extents)[slices.index(self.client.slice_digest) :: len(slices)]
        return [
            LoadItem(
                hasher.key(chunk),
                extent.offset_bytes,
                extent.length_bytes,
                self.blocks_of(chunk, first_block),
            )
            for chunk, extent in enumerate(mine)
            if extent.length_bytes
        ]

    def check_load(
        self, tokens: Sequence[int], result: LookupResult, *, sync: bool, salt: str = ""
    ) -> set[int]:
        """Load a lookup's result, assert that every loaded byte is right, return the numbers of the failed chunks."""
        assert result.lease is not None
        half = self.blocks.num_blocks // 2
        items = self.items(tokens, result, salt, first_block=half)
        for item in items:
            self.blocks.fill(item.block_ids, "not loaded")
        self._begun_s = time.perf_counter()
        job = self.client.load(self.identity(salt), result.lease, items, self.blocks.plan, sync=sync)
        assert job.wait(PATIENCE_S), "the load never ended"
        self.copied = time.perf_counter() - self._begun_s, job.bytes
        for index, item in enumerate(items):
            if index not in job.failed:
                assert self.blocks.read(item.block_ids) == self.expected(item.key), f"chunk {index} is wrong"
        return job.failed

    def hit(self, tokens: Sequence[int], *, sync: bool = True, salt: str = "", **more: Any) -> int:
        """Look a prompt up, load it and check it; return how many chunks were loaded. `more`: see `lookup`."""
        result = self.looked_up(tokens, salt, **more)
        if result.n_chunks == 0:
            return 0
        return result.n_chunks - len(self.check_load(tokens, result, sync=sync, salt=salt))


class _Child:
    """The operations of the child process that a test can ask for."""

    def __init__(self) -> None:
        self.engine: CacheEngine

    def start(self, socket_dir: str, group: str = "", **more: Any) -> None:
        if group:
            more["group"] = group.encode()
        self.engine = CacheEngine(Path(socket_dir), **more).__enter__()

    def connect(self) -> str:
        self.engine.connect()
        return shown_name(self.engine.client.session)

    def computes(self, tokens_s: float) -> None:
        self.engine.client.prompt_tokens_s = tokens_s

    def connected(self) -> bool:
        return self.engine.client.connected

    def store(self, n_chunks: int, seed: int = 0, first: int = 0) -> list[str]:
        return self.engine.stored(prompt(n_chunks, seed), first)

    def peek(self, n_chunks: int, seed: int = 0) -> int:
        return self.engine.client.peek(self.engine.identity(), self.engine.hasher(prompt(n_chunks, seed)))

    def lookup(self, n_chunks: int, seed: int = 0) -> dict[str, Any]:
        result = self.engine.looked_up(prompt(n_chunks, seed))
        lease = result.lease and [result.lease.session.hex(), result.lease.seq, result.lease.epoch]
        return {**result._asdict(), "lease": lease, "extents": result.extents.hex()}

    def load(self, result: dict[str, Any], n_chunks: int, seed: int = 0, sync: bool = True) -> list[int]:
        session, seq, epoch = result["lease"]
        lease = LeaseName(bytes.fromhex(session), seq, epoch)
        known = {**result, "lease": lease, "extents": bytes.fromhex(result["extents"])}
        return sorted(self.engine.check_load(prompt(n_chunks, seed), LookupResult(**known), sync=sync))

    def hit(self, n_chunks: int, seed: int = 0) -> int:
        return self.engine.hit(prompt(n_chunks, seed))

    def copied(self) -> dict[str, float]:
        return dict(zip(("seconds", "bytes"), self.engine.copied, strict=True))

    def stats(self) -> dict[str, Any]:
        return self.engine.client.stats()

    def close(self) -> None:
        self.engine.__exit__()


if __name__ == "__main__":
    child = _Child()
    serve({name: getattr(child, name) for name in dir(child) if name[0] != "_" and name != "engine"})
