"""A process of an engine without a model: paged blocks and a CacheClient, in this process or as a child.

What a prompt's KV would be follows from its tokens: block `b` of chunk key `c` holds bytes made from (c, slice), so
any process can tell right bytes from wrong ones.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstrata.client import (
    CacheClient,
    Identity,
    LoadItem,
    LookupCall,
    LookupResult,
    StoreJob,
    StoreOutcome,
)
from kvstrata.config.model import ClientSettings
from kvstrata.keys import ChunkHasher
from kvstrata.types import KEY_BYTES, LeaseName, MissReason, RequestIdentity, Role, unpack_extents
from tests.harness.blocks import PagedBlocks, layout_identity
from tests.harness.child import serve

PATIENCE_S = 30.0
"""For things that must come to pass; no test waits for this to run out."""
SILENCE_S = 5.0
"""For which a crowded machine may keep a server that is well from answering: longer than a client has patience."""
AGAIN_S = 0.05
CHUNK_TOKENS = 16
BLOCK_TOKENS = 8
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS


def eventually(what: str, holds: Callable[[], Any]) -> Any:
    """Wait until `holds()` is true and return it; AssertionError naming `what` after `PATIENCE_S`."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < ends_s, f"never came to pass: {what}"
        time.sleep(0.002)


def prompt(n_chunks: int, seed: int = 0) -> list[int]:
    """Tokens of a prompt; two with other seeds share no chunk."""
    return [seed * 1_000_003 + i for i in range(n_chunks * CHUNK_TOKENS)]


class CacheEngine:
    """One rank: blocks of its own and a client. `rank` decides its slice (its layers)."""

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
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.tenant = tenant
        self.blocks = PagedBlocks(layers=layers, num_blocks=num_blocks, block_bytes=block_bytes)
        self.part = self.blocks.slice(first_layer=rank * layers)
        self.client = CacheClient(
            ClientSettings(socket_dir=str(socket_dir), chunk_size=CHUNK_TOKENS, **(settings or {})),
            role=role,
            layout=layout_identity(CHUNK_TOKENS, model),
            group=group,
            engine_slices=ranks,
            slice=None if role is Role.SCHEDULER else self.part,
            facts=None if role is Role.SCHEDULER else {"layers": layers, "block_bytes": block_bytes},
        )
        self._requests = itertools.count()

    def __enter__(self) -> CacheEngine:
        self.client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.blocks.close()

    def connect(self) -> CacheEngine:
        """Wait until the cache is in use, slices of all ranks included."""
        eventually("the client connects", lambda: self.client.connected)
        identity = self.identity()
        eventually("the identity is ready", lambda: identity.ready)
        return self

    def identity(self, salt: str = "") -> Identity:
        """The identity of requests with this salt."""
        return self.client.identity(RequestIdentity(tenant=self.tenant, salt=salt))

    def hasher(self, tokens: Sequence[int], salt: str = "") -> ChunkHasher:
        """Keys of a prompt."""
        hasher = self.identity(salt).hasher()
        hasher.feed(tokens)
        return hasher

    def blocks_of(self, chunk: int, first_block: int = 0) -> list[int]:
        """Where chunk number `chunk` of a prompt lies when the prompt begins at `first_block`."""
        begin = first_block + chunk * BLOCKS_PER_CHUNK
        return list(range(begin, begin + BLOCKS_PER_CHUNK))

    def compute(self, hasher: ChunkHasher, chunks: Sequence[int], first_block: int = 0) -> None:
        """What the model would do: write the KV of these chunks into blocks."""
        for chunk in chunks:
            self.blocks.fill(self.blocks_of(chunk, first_block), self._seed(hasher.key(chunk)))

    def expected(self, key: bytes) -> bytes:
        """The bytes that chunk `key` has in this rank's blocks."""
        spare = self.blocks_of(0, self.blocks.num_blocks - BLOCKS_PER_CHUNK)
        self.blocks.fill(spare, self._seed(key))
        return self.blocks.read(spare)

    def _seed(self, key: bytes) -> tuple[str, tuple[int, int]]:
        return key.hex(), self.part.layers

    def store(
        self, tokens: Sequence[int], first: int = 0, salt: str = "", compute: bool = True, **more: Any
    ) -> StoreJob:
        """Compute chunks from `first` on and store them."""
        hasher = self.hasher(tokens, salt)
        chunks = range(first, hasher.n_chunks)
        if compute:
            self.compute(hasher, chunks)
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
        """Store and wait; the outcomes.  Asks again for what a server that was silent did not take."""
        ours: set[int] = set()
        not_taken = {StoreOutcome.UNAVAILABLE, StoreOutcome.FAILED}
        ends_s = time.monotonic() + SILENCE_S
        while True:
            job = self.store(tokens, first, salt)
            assert job.done.wait(PATIENCE_S), "the store never ended"
            # A store that failed may have been taken after all, and is then present, or in flight for a while.
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

    def lookup(self, tokens: Sequence[int], salt: str = "", deadline_ms: int = 10_000) -> LookupCall:
        """Ask for a prompt."""
        return self.client.lookup(
            self.identity(salt),
            self.hasher(tokens, salt),
            request_id=f"request-{next(self._requests)}",
            deadline_ms=deadline_ms,
        )

    def looked_up(self, tokens: Sequence[int], salt: str = "", again_s: float = SILENCE_S) -> LookupResult:
        """Ask and wait.  Asks again, for `again_s`, when the client did not ask since the server was silent."""
        ends_s = time.monotonic() + again_s
        while True:
            call = self.lookup(tokens, salt)
            assert call.wait(PATIENCE_S), "the lookup never ended"
            silent = call.result.reason is MissReason.BREAKER_OPEN
            if call.result.lease or not silent or time.monotonic() >= ends_s:
                return call.result
            time.sleep(AGAIN_S)

    def items(
        self, tokens: Sequence[int], result: LookupResult, salt: str = "", first_block: int = 0
    ) -> list[LoadItem]:
        """What this rank loads of a lookup's result."""
        hasher = self.hasher(tokens, salt)
        slices = self.client.slices
        extents = unpack_extents(result.extents)
        mine = slices.index(self.client.slice_digest)
        return [
            LoadItem(
                hasher.key(chunk),
                extents[chunk * len(slices) + mine].offset_bytes,
                extents[chunk * len(slices) + mine].length_bytes,
                self.blocks_of(chunk, first_block),
            )
            for chunk in range(result.n_chunks)
        ]

    def check_load(
        self, tokens: Sequence[int], result: LookupResult, *, sync: bool, salt: str = ""
    ) -> set[int]:
        """Load a lookup's result; asserts that what did not fail is right byte for byte. The failed chunks."""
        assert result.lease is not None
        half = self.blocks.num_blocks // 2
        items = self.items(tokens, result, salt, first_block=half)
        for item in items:
            self.blocks.fill(item.block_ids, "not loaded")
        job = self.client.load(result.lease, items, self.blocks.plan, sync=sync)
        assert job.wait(PATIENCE_S), "the load never ended"
        for index, item in enumerate(items):
            if index not in job.failed:
                assert self.blocks.read(item.block_ids) == self.expected(item.key), f"chunk {index} is wrong"
        return job.failed

    def hit(self, tokens: Sequence[int], *, sync: bool = True, salt: str = "") -> int:
        """Look up, load and check; the chunks that came out right."""
        result = self.looked_up(tokens, salt)
        if result.n_chunks == 0:
            return 0
        return result.n_chunks - len(self.check_load(tokens, result, sync=sync, salt=salt))


class _Child:
    """Handlers of the child process."""

    def __init__(self) -> None:
        self.engine: CacheEngine
        self.queue: dict[int, LookupCall] = {}

    def start(self, socket_dir: str, group: str = "", **more: Any) -> None:
        if group:
            more["group"] = group.encode()
        self.engine = CacheEngine(Path(socket_dir), **more).__enter__()

    def connect(self) -> str:
        self.engine.connect()
        return self.engine.client.session.hex()

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

    def wait_in_queue(self, n_chunks: int, seed: int, claim: bool = False) -> int:
        """Look a prompt up and keep its lease, as a request does that waits; the chunks found."""
        call = self.queue[seed] = self.engine.lookup(prompt(n_chunks, seed))
        assert call.wait(PATIENCE_S), "the lookup never ended"
        assert not claim or call.claim()
        return call.result.n_chunks

    def revoked(self) -> list[int]:
        """Seeds of the prompts whose leases went back."""
        return [seed for seed, call in self.queue.items() if call.revoked]

    def load_queued(self, n_chunks: int, seed: int) -> list[int]:
        """What failed of the load of a prompt that waited."""
        result = self.queue[seed].result
        return sorted(self.engine.check_load(prompt(n_chunks, seed), result, sync=False))

    def load(self, result: dict[str, Any], n_chunks: int, seed: int = 0, sync: bool = True) -> list[int]:
        session, seq, epoch = result["lease"]
        lease = LeaseName(bytes.fromhex(session), seq, epoch)
        known = {**result, "lease": lease, "extents": bytes.fromhex(result["extents"])}
        return sorted(self.engine.check_load(prompt(n_chunks, seed), LookupResult(**known), sync=sync))

    def hit(self, n_chunks: int, seed: int = 0) -> int:
        return self.engine.hit(prompt(n_chunks, seed))

    def stats(self) -> dict[str, Any]:
        return self.engine.client.stats()

    def close(self) -> None:
        self.engine.__exit__()


if __name__ == "__main__":
    child = _Child()
    serve(
        {
            name: getattr(child, name)
            for name in dir(child)
            if name[0] != "_" and name not in ("engine", "queue")
        }
    )
