"""A client process with chunks as large as Llama 8B's, 32 MiB: it times stores and loads and compares every byte."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from kvstrata.client import StoreOutcome
from tests.harness.cache_engine import AGAIN_S, BLOCKS_PER_CHUNK, PATIENCE_S, CacheEngine, prompt
from tests.harness.child import serve

LAYERS = 32
CHUNK_BYTES = 32 << 20
NOT_NOW = {StoreOutcome.UNAVAILABLE, StoreOutcome.FAILED, StoreOutcome.IN_FLIGHT}
"""Outcomes of a store when the server was silent for 0.3 s, as on a busy machine: an engine gives up, we try again."""


class Engine(CacheEngine):
    """One attached process with blocks for `chunks` chunks; no other engine has its `number`."""

    def __init__(self, socket_dir: str, chunks: int, number: int) -> None:
        super().__init__(
            Path(socket_dir),
            group=number.to_bytes(16, "little"),
            layers=LAYERS,
            block_bytes=CHUNK_BYTES // LAYERS // BLOCKS_PER_CHUNK,
            num_blocks=(chunks + 1) * BLOCKS_PER_CHUNK,
            model="llama-8b-shape",
        )

    def connected(self) -> bool:
        """Return whether this process is attached and the server knows its identity."""
        return self.client.connected and self.identity().ready

    def timed_store(self, seed: int, chunks: int) -> dict[str, Any]:
        """Compute a prompt's KV and store it; `seconds` counts the last attempt alone."""
        tokens = prompt(chunks, seed)
        self.compute(self.hasher(tokens), range(chunks))
        ours: set[int] = set()
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            begun_s = time.perf_counter()
            job = self.store(tokens, compute=False)
            job.done.wait(PATIENCE_S)
            seconds = time.perf_counter() - begun_s
            ours.update(i for i, outcome in enumerate(job.outcomes) if outcome is StoreOutcome.STORED)
            if NOT_NOW.isdisjoint(job.outcomes) or time.monotonic() >= give_up_s:
                break
            time.sleep(AGAIN_S)
        outcomes = ["stored" if i in ours else str(outcome) for i, outcome in enumerate(job.outcomes)]
        return {"seconds": seconds, "bytes": job.bytes, "outcomes": outcomes}

    def timed_load(self, seed: int, chunks: int) -> dict[str, Any]:
        """Look a prompt up and load it over wiped blocks; then compare every byte."""
        tokens = prompt(chunks, seed)
        result = self.looked_up(tokens, again_s=PATIENCE_S)
        if result.lease is None:
            return {"chunks": 0, "reason": result.reason, "equal": False, "seconds": 0.0, "bytes": 0}
        items = self.items(tokens, result)
        for item in items:
            self.blocks.fill(item.block_ids, "not loaded")
        begun_s = time.perf_counter()
        job = self.client.load(self.identity(), result.lease, items, self.blocks.plan, sync=True)
        seconds = time.perf_counter() - begun_s
        equal = not job.failed and all(
            self.blocks.read(item.block_ids) == self.expected(item.key) for item in items
        )
        return {"chunks": result.n_chunks, "equal": equal, "seconds": seconds, "bytes": job.bytes}


if __name__ == "__main__":
    with Engine(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) as engine:
        serve({"connected": engine.connected, "store": engine.timed_store, "retrieve": engine.timed_load})
