"""`copy_store`, `copy_retrieve`: the client's whole path, compared with libc's memcpy of the same number of bytes.

Chunks have the shape of Llama 8B: 32 layers, 8 kv heads × 128, bf16, 256 tokens = 32 MiB, in blocks of 16 tokens.  A
call stores or retrieves 16 chunks, or one chunk for the figures `…_one_chunk`.  A store reserves extents, gathers the
blocks into the pool while it computes their checksum, and commits.  A retrieve looks up, scatters out of the pool while
it verifies, and releases.  Store, retrieve and memcpy take turns; memcpy copies 32 MiB a call between buffers of the
same size.  All buffers are faulted in, and each is larger than the processor's cache.

Sketch: every byte is read once and written once, as by memcpy; the checksum is computed while the copy waits for
memory.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    STORES,
    chains,
    compared,
    engine_client,
    median_spread,
    scratch,
    sized,
    start_faulted,
    wait_until,
)
from kvstrata.client import CacheClient, Identity, LoadItem
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.types import RequestIdentity, unpack_extents
from tests.harness.server_process import ServerProcess

LAYERS = 32
BLOCK_BYTES = 16 * 8 * 2 * 128 * 2
"""A block of one layer: 16 tokens, 8 kv heads, K and V, 128 numbers of 2 bytes."""
BLOCKS_PER_CHUNK = 16
CHUNKS = sized(16, 2)
CHUNK_BYTES = LAYERS * BLOCK_BYTES * BLOCKS_PER_CHUNK
BATCH_BYTES = CHUNKS * CHUNK_BYTES
L1_MB = sized(2560, 256)
REPEATS = sized(7, 1)
TARGET = 0.95
TARGET_TWO = 1.6


class Memcpy:
    """libc's memcpy between two buffers of a batch's size."""

    def __init__(self) -> None:
        self._maps = [mmap.mmap(-1, BATCH_BYTES) for _ in range(2)]
        self._anchors = [(ctypes.c_char * 1).from_buffer(part) for part in self._maps]
        self._from, self._to = (ctypes.addressof(anchor) for anchor in self._anchors)
        for address in (self._from, self._to):
            ctypes.memset(address, 1, BATCH_BYTES)
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

        self._pool = ThreadPoolExecutor(2)

    def seconds(self, n_chunks: int, threads: int) -> float:
        """Return the seconds of copying `n_chunks` chunks, in this thread or in two."""
        started = time.perf_counter()
        if threads == 1:
            self._copy(range(n_chunks))
        else:
            list(self._pool.map(self._copy, (range(0, n_chunks, 2), range(1, n_chunks, 2))))
        return time.perf_counter() - started

    def _copy(self, chunks: range) -> None:
        for i in chunks:
            self._memcpy(self._to + i * CHUNK_BYTES, self._from + i * CHUNK_BYTES, CHUNK_BYTES)

    def close(self) -> None:
        """Unmap the memory."""
        self._pool.shutdown()
        self._anchors.clear()
        for part in self._maps:
            part.close()


class Path8B:
    """One engine's client and blocks, for prompts of Llama 8B; the caller owns both."""

    def __init__(self, client: CacheClient, blocks: PagedBlocks, seed: int) -> None:
        self.client = client
        self.blocks = blocks
        self.identity: Identity = client.identity(RequestIdentity(salt=str(seed)))
        wait_until(lambda: self.identity.ready, "the identity is known")
        self._chains = iter(chains(self.identity.root, 256, CHUNKS))
        self._stored = b""

    def _blocks(self, n_chunks: int) -> list[list[int]]:
        return [list(range(i * BLOCKS_PER_CHUNK, (i + 1) * BLOCKS_PER_CHUNK)) for i in range(n_chunks)]

    def store(self, n_chunks: int) -> float:
        """Return the seconds of storing a new prompt of `n_chunks` chunks."""
        blocks = self._blocks(n_chunks)
        for _ in range(STORES):  # a server that is silent for a moment takes no chunks, which is no figure
            self._stored = next(self._chains)[: n_chunks * 32]
            started = time.perf_counter()
            job = self.client.store(self.identity, b"", self._stored, self.blocks.plan, blocks)
            if job.done.wait(60) and set(job.outcomes) == {"stored"}:
                return time.perf_counter() - started
            wait_until(lambda: self.client.connected, "the server answers again")
        raise RuntimeError(f"not stored: {sorted(set(job.outcomes))}")

    def retrieve(self, n_chunks: int) -> float:
        """Return the seconds of looking up and loading the prompt that was stored last."""
        chain, blocks = self._stored, self._blocks(n_chunks)
        started = time.perf_counter()
        call = self.client.lookup(self.identity, chain, request_id="bench", deadline_ms=10_000)
        if not call.wait(60) or call.result.n_chunks != n_chunks:
            raise RuntimeError(f"a lookup found {call.done and call.result} of {n_chunks} chunks")
        extents = unpack_extents(call.result.extents)
        items = [
            LoadItem(chain[i * 32 : i * 32 + 32], extents[i].offset_bytes, extents[i].length_bytes, blocks[i])
            for i in range(n_chunks)
        ]
        job = self.client.load(self.identity, call.result.lease, items, self.blocks.plan)
        if not job.wait(60) or job.failed:
            raise RuntimeError(f"chunks {sorted(job.failed)} were not loaded")
        return time.perf_counter() - started


def measure(path: Path8B, memcpy: Memcpy, n_chunks: int, threads: int) -> dict[str, list[float]]:
    """Return the seconds of store, retrieve and memcpy, which take turns."""
    taken: dict[str, list[float]] = {"memcpy": [], "store": [], "retrieve": []}
    for repeat in range(REPEATS + 1):
        for name, call in (
            ("memcpy", partial(memcpy.seconds, threads=threads)),
            ("store", path.store),
            ("retrieve", path.retrieve),
        ):
            seconds = call(n_chunks)
            if repeat:
                taken[name].append(seconds)
    return taken


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    memcpy = Memcpy()
    num_blocks = CHUNKS * BLOCKS_PER_CHUNK
    blocks = PagedBlocks(
        layers=LAYERS, num_blocks=num_blocks, block_bytes=BLOCK_BYTES, chunk_blocks=BLOCKS_PER_CHUNK
    )
    blocks.touch()
    with scratch("copy") as folder, ServerProcess(Path(folder), l1_mb=L1_MB) as server:
        start_faulted(server)
        taken = {}
        for threads, n_chunks in ((1, CHUNKS), (2, CHUNKS), (1, 1)):
            client = engine_client(server.socket_dir, server.port, blocks, threads=threads)
            try:
                wait_until(
                    lambda client=client: client.stats()["mapped_ahead_bytes"] >= L1_MB << 20,
                    "the client has mapped the pool's pages",
                )
                taken[threads, n_chunks] = measure(
                    Path8B(client, blocks, 10 * threads + n_chunks), memcpy, n_chunks, threads
                )
            finally:
                client.close()
    memcpy.close()
    blocks.close()
    figures = []
    for what in ("store", "retrieve"):
        rates = {
            case: {name: [BATCH_BYTES / s / 1e9 for s in taken[case][name]] for name in (what, "memcpy")}
            for case in taken
        }
        one, two = rates[1, CHUNKS], rates[2, CHUNKS]
        alone = median_spread(one[what])[0]
        of_limit = median_spread([ours / bare for ours, bare in zip(two[what], two["memcpy"], strict=True)])[
            0
        ]
        figures += [
            compared(
                f"copy_{what}", one[what], "GB/s", "memcpy beside it, one thread", one["memcpy"], least=TARGET
            ),
            compared(
                f"copy_{what}_two_threads",
                two[what],
                "GB/s",
                "one thread",
                alone,
                least=TARGET_TWO
                if of_limit < TARGET
                else None,  # memcpy on two threads is the memory's limit
                ratio_to_limit=of_limit,
                limit=f"memcpy on two threads beside it, {median_spread(two['memcpy'])[0]:.1f} GB/s",
            ),
            compared(
                f"copy_{what}_one_chunk",
                [1e3 * s for s in taken[1, 1][what]],
                "ms",
                "memcpy of 32 MiB beside it",
                [1e3 * s for s in taken[1, 1]["memcpy"]],
                inverse=True,
            ),
        ]
    return figures
