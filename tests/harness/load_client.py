"""A client process that acts as one engine: a paged KV cache of Llama 8B's shape in plain memory, no torch, no model.

It takes requests as JSON lines (`tests.harness.child`).  A prompt's KV follows from the prompt's seed alone, so any
process can check retrieved KV byte by byte.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
import time
from typing import Any

from kvstrata.client import CacheClient, LoadItem
from kvstrata.client.handles import LookupResult, StoreOutcome
from kvstrata.config.client_model import ClientSettings
from kvstrata.native.copying import CopyPlan
from kvstrata.types import (
    KEY_BYTES,
    LayoutIdentity,
    MissReason,
    RequestIdentity,
    Role,
    Slice,
    facts_digest,
    unpack_extents,
)
from tests.harness.child import serve

LAYERS, KV_HEADS, HEAD, ELEMENT_BYTES = 32, 8, 128, 2
BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
BLOCK_BYTES = 2 * KV_HEADS * HEAD * ELEMENT_BYTES * BLOCK_TOKENS
CHUNK_BYTES = LAYERS * CHUNK_BLOCKS * BLOCK_BYTES
"""32 MiB."""
WAIT_S = 120.0
"""Longest wait for an outcome; shorter than the parent's wait for our answer, so that the parent learns the outcome."""
AGAIN_S = 0.1
NOT_NOW = {StoreOutcome.UNAVAILABLE, StoreOutcome.FAILED, StoreOutcome.IN_FLIGHT}
"""Outcomes of a store when the server was silent for 0.3 s, as on a busy machine: an engine gives up, we try again."""
NO_ANSWER = {MissReason.BREAKER_OPEN, MissReason.DEADLINE, MissReason.IN_FLIGHT}
"""Reasons of a lookup when the server was silent: we look up again."""


class Engine:
    """One attached process with blocks for `chunks` chunks."""

    def __init__(self, socket_dir: str, chunks: int, group: int) -> None:
        self.chunks = chunks
        self.n_blocks = chunks * CHUNK_BLOCKS
        self.layer_bytes = self.n_blocks * BLOCK_BYTES
        self.memory = mmap.mmap(-1, LAYERS * self.layer_bytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.plan = CopyPlan(
            [base + layer * self.layer_bytes for layer in range(LAYERS)],
            self.n_blocks,
            [BLOCK_BYTES] * LAYERS,
            [],
            BLOCK_BYTES,
        )
        facts: dict[str, Any] = {
            "block_tokens": BLOCK_TOKENS,
            "payload_bytes": CHUNK_BYTES,
            "sections": LAYERS,
            "section_bytes": CHUNK_BLOCKS * BLOCK_BYTES,
        }
        self.client = CacheClient(
            ClientSettings(socket_dir=socket_dir, chunk_size=CHUNK_TOKENS),
            role=Role.CLIENT,
            layout=LayoutIdentity(model="llama-8b-shape", kv_dtype="bfloat16", chunk_tokens=CHUNK_TOKENS),
            group=group.to_bytes(16, "little"),
            engine_slices=1,
            slice=Slice(layers=(0, LAYERS), kv_heads=(0, KV_HEADS), layout=facts_digest(facts)),
            facts=facts,
        )
        self.client.start()
        self.identity = self.client.identity(RequestIdentity())
        # A fragmented block table, as engines have.
        self.table = list(range(self.n_blocks))
        random.Random(group).shuffle(self.table)

    def connected(self) -> bool:
        """Return whether this process is attached and the server knows its identity."""
        return self.client.connected and self.identity.ready

    def store(self, seed: int, chunks: int) -> dict[str, Any]:
        """Write a prompt's KV into blocks and store it; `seconds` counts the last attempt alone."""
        self._fill(seed, chunks)
        hasher = self._keys(seed, chunks)
        blocks = [self.table[i * CHUNK_BLOCKS : (i + 1) * CHUNK_BLOCKS] for i in range(chunks)]
        stored: set[int] = set()
        give_up_s = time.perf_counter() + WAIT_S
        while True:
            begun = time.perf_counter()
            job = self.client.store(self.identity, b"", hasher.chain, self.plan, blocks, probe=hasher.probe)
            job.done.wait(give_up_s - begun)
            seconds = time.perf_counter() - begun
            stored.update(i for i, outcome in enumerate(job.outcomes) if outcome is StoreOutcome.STORED)
            if NOT_NOW.isdisjoint(job.outcomes) or time.perf_counter() >= give_up_s:
                break
            time.sleep(AGAIN_S)
        return {
            "seconds": seconds,
            "bytes": job.bytes,
            "outcomes": ["stored" if i in stored else str(outcome) for i, outcome in enumerate(job.outcomes)],
        }

    def retrieve(self, seed: int, chunks: int) -> dict[str, Any]:
        """Look a prompt up and load it over wiped blocks; then compare every byte."""
        self.memory[:] = bytes(len(self.memory))
        hasher = self._keys(seed, chunks)
        result, lookup_s = self._look_up(hasher, seed)
        if result.lease is None:
            return {"chunks": 0, "reason": result.reason, "equal": False, "seconds": 0.0, "bytes": 0}
        items = [
            LoadItem(
                hasher.key(i), extent.offset_bytes, extent.length_bytes,
                self.table[i * CHUNK_BLOCKS : (i + 1) * CHUNK_BLOCKS],
            )
            for i, extent in enumerate(unpack_extents(result.extents))
        ]  # fmt: skip
        begun = time.perf_counter()
        job = self.client.load(self.identity, result.lease, items, self.plan, sync=True)
        seconds = time.perf_counter() - begun
        return {
            "chunks": result.n_chunks,
            "reason": result.reason,
            "failed": sorted(job.failed),
            "equal": not job.failed and self._holds(seed, result.n_chunks),
            "lookup_s": lookup_s,
            "seconds": seconds,
            "bytes": job.bytes,
        }

    def _look_up(self, hasher: Any, seed: int) -> tuple[LookupResult, float]:
        """Look a prompt up until the server answers; return the result and the seconds of that lookup alone."""
        give_up_s = time.perf_counter() + WAIT_S
        while True:
            begun = time.perf_counter()
            call = self.client.lookup(self.identity, hasher, request_id=f"prompt-{seed}")
            call.wait(give_up_s - begun)
            seconds = time.perf_counter() - begun
            if call.result.lease or call.result.reason not in NO_ANSWER or time.perf_counter() >= give_up_s:
                return call.result, seconds
            time.sleep(AGAIN_S)

    def _keys(self, seed: int, chunks: int) -> Any:
        hasher = self.identity.hasher()
        draw = random.Random(seed)
        hasher.feed([draw.randrange(128_256) for _ in range(chunks * CHUNK_TOKENS)])
        assert len(hasher.chain) == chunks * KEY_BYTES
        return hasher

    def _fill(self, seed: int, chunks: int) -> None:
        for place, expected in self._expected(seed, chunks):
            self.memory[place : place + BLOCK_BYTES] = expected

    def _holds(self, seed: int, chunks: int) -> bool:
        view = memoryview(self.memory)
        return all(view[at : at + BLOCK_BYTES] == expected for at, expected in self._expected(seed, chunks))

    def _expected(self, seed: int, chunks: int) -> Any:
        """Yield (place in memory, bytes) of every block of every layer of a prompt."""
        for layer in range(LAYERS):
            draw = random.Random(seed * LAYERS + layer)
            for block in self.table[: chunks * CHUNK_BLOCKS]:
                yield layer * self.layer_bytes + block * BLOCK_BYTES, draw.randbytes(BLOCK_BYTES)


def main() -> None:
    """Serve an engine; arguments: socket directory, chunks of KV cache, a number that no other engine has."""
    engine = Engine(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    serve(
        {
            "connected": engine.connected,
            "store": engine.store,
            "retrieve": engine.retrieve,
            "stats": engine.client.stats,
        }
    )
    engine.client.close()


if __name__ == "__main__":
    main()
