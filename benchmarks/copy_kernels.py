"""`kernel_*`: the native copies without server and client, compared with libc's memcpy in the same run.

One thread copies 16 chunks of 32 MiB (32 sections of 1 MiB each) between buffers that are faulted in and larger than
the cache: a gather with checksums into records, and a verified scatter out of them.  Blocks have 512 KiB (vLLM's CPU
layout) or 64 KiB (16 tokens), in shuffled order.  The benchmark also measures two threads against one.

Sketch: a byte is read once and written once; memcpy through the cache reads the destination's lines too, so streaming
stores can beat it by a factor of up to 1.5.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common import compared, median_spread, sized
from kvstrata.native import core
from kvstrata.native.core import CopyEngine, CopyPlan, RecordSpec

SECTIONS = 32
SECTION_BYTES = 1 << 20
CHUNK_BYTES = SECTIONS * SECTION_BYTES
CHUNKS = sized(16, 2)
BATCH_BYTES = CHUNKS * CHUNK_BYTES
REPEATS = sized(7, 1)
TARGET = 0.95


class Buffers:
    """An engine's memory, extents for all chunks, and a target for memcpy; all are faulted in."""

    def __init__(self) -> None:
        self.extent_bytes = core.record_bytes(SECTIONS, CHUNK_BYTES)
        sizes = {"engine": BATCH_BYTES, "extents": CHUNKS * self.extent_bytes, "to": BATCH_BYTES}
        self._maps = {name: mmap.mmap(-1, size) for name, size in sizes.items()}
        noise = os.urandom(1 << 20)
        for buffer in self._maps.values():
            for at in range(0, len(buffer), len(noise)):
                buffer[at : at + len(noise)] = noise[: len(buffer) - at]
        self.engine, self.extents, self.to = (
            core.buffer_address(buffer, writable=True) for buffer in self._maps.values()
        )

    def close(self) -> None:
        """Unmap the memory."""
        for buffer in self._maps.values():
            buffer.close()

    def memcpy(self) -> None:
        """Copy the engine's memory by memcpy, one chunk in each call."""
        for at in range(0, BATCH_BYTES, CHUNK_BYTES):
            core.libc_copy_at(self.to + at, self.engine + at, CHUNK_BYTES)


class Work:
    """Gather and scatter of all chunks with blocks of one size, in shuffled order."""

    def __init__(self, buffers: Buffers, block_bytes: int) -> None:
        per_layer = BATCH_BYTES // SECTIONS
        blocks = per_layer // block_bytes
        bases = [buffers.engine + layer * per_layer for layer in range(SECTIONS)]
        self.plan = CopyPlan(bases, blocks, [block_bytes] * SECTIONS, [], block_bytes)
        order = list(range(blocks))
        random.Random(1).shuffle(order)
        each = blocks // CHUNKS
        self.gathers, self.scatters = [], []
        for chunk in range(CHUNKS):
            ids = order[chunk * each : (chunk + 1) * each]
            key = chunk.to_bytes(32, "little")
            address = buffers.extents + chunk * buffers.extent_bytes
            spec = RecordSpec(key, bytes(32), bytes(32), b"", 256)
            self.gathers.append((ids, address, buffers.extent_bytes, spec))
            self.scatters.append((ids, address, buffers.extent_bytes, (key, bytes(32))))

    def gather(self, engine: CopyEngine) -> None:
        """Store all chunks."""
        if any(engine.run("gather", self.plan, self.gathers)):
            raise RuntimeError("a gather failed")

    def scatter(self, engine: CopyEngine) -> None:
        """Retrieve all chunks."""
        if any(engine.run("scatter", self.plan, self.scatters)):
            raise RuntimeError("a scatter failed")


def in_turn(calls: dict[str, Callable[[], None]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Return the rates of each call in GB/s; the calls take turns, so that a noisy moment slows all of them."""
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repeat:
                rates[name].append(BATCH_BYTES / (time.perf_counter() - started) / 1e9)
    return rates


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    buffers = Buffers()
    alone, two = CopyEngine(threads=0), CopyEngine(threads=1)  # the caller is the other thread
    figures = []
    try:
        for block_bytes in (512 << 10, 64 << 10):
            work = Work(buffers, block_bytes)
            rates = in_turn(
                {
                    "memcpy": buffers.memcpy,
                    "gather": partial(work.gather, alone),
                    "scatter": partial(work.scatter, alone),
                    "gather_two": partial(work.gather, two),
                    "scatter_two": partial(work.scatter, two),
                }
            )
            for what in ("gather", "scatter"):
                both = [a / b for a, b in zip(rates[f"{what}_two"], rates[what], strict=True)]
                figures.append(
                    compared(
                        f"kernel_{what}_{block_bytes >> 10}k",
                        rates[what],
                        "GB/s",
                        "memcpy in turn, one thread",
                        rates["memcpy"],
                        least=TARGET,
                        two_threads_over_one=median_spread(both)[0],
                    )
                )
    finally:
        alone.close()
        two.close()
        buffers.close()
    return figures
