"""`gpu_store_*`, `gpu_retrieve_*`, `gpu_both_*`: copies of chunks between paged KV on a GPU and pinned records.

As in a worker, the copy engine measures its ways of copying and takes the fastest; records are sealed and verified.
The copies take turns with one pinned copy by the bare driver, which moves as many bytes as the cache of 64 chunks has.
Copies in both directions take turns with two pinned copies at the same time, each of half as many bytes.  Each figure
also tells how fast the checksum threads read the records with nothing else going on: no verified copy is faster.

`gpu_gemm_slowdown_*` is the time that matrix products on a stream of their own lose while copies run in both
directions.  `gpu_load_hidden` is the share of a load that does not lengthen the forward pass, which waits for the load
layer by layer.

Sketch: every byte crosses the link to the GPU once; the host computes checksums while the copies run.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.common import NotHere, figure, median_spread
from benchmarks.gpu import (
    CHUNK_TOKENS,
    RETRIEVE,
    STORE,
    BareCopies,
    LayerProducts,
    PagedGpu,
    on_gpu,
    random_matrix,
    require_cupy,
    require_gpu,
    way_of,
)
from kvstrata.connectors.device import CHECKSUM_THREADS, MAX_SMS
from kvstrata.native.core import CopyOutcome, RecordSpec, buffer_address, crc32c_at
from kvstrata.native.cuda import CudaCopyEngine, CudaCopyPlan, HostRegion
from tests.harness.cuda_driver import Gpu
from tests.harness.gpu_kv import SHAPES, Shape

BLOCK_TOKENS = (16, 64, 128)
CHUNKS = (1, 8, 64)
REPEATS = 7
WAIT_S = 60.0
TARGET = 0.9
TARGET_BOTH = 0.85
MANY_CHUNKS = 8
"""The target applies to this many chunks or more."""

HIDDEN_CHUNKS = 24
"""Chunks (6,144 tokens) that are loaded while `HIDDEN_TOKENS` more tokens go through the layers."""
HIDDEN_TOKENS = 2048
TARGET_HIDDEN = 0.8
GEMM_WIDTH = 8192
GEMMS = 200
GEMM_TARGETS = {"dma": 0.03, "kernel": 0.08}


class Copies:
    """A cache on the device, as many records in pinned host memory, and a copy engine between them."""

    def __init__(self, gpu: Gpu, shape: Shape, block_tokens: int, n_chunks: int, engine: str = "") -> None:
        self.paged = PagedGpu(gpu, shape, block_tokens, n_chunks)
        page = mmap.PAGESIZE
        self._step = (self.paged.record_bytes + page - 1) // page * page
        length = max(n_chunks * self._step, self.paged.length)
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = mmap.mmap(-1, length, flags=flags)
        self._host = buffer_address(self._memory)
        self._region = HostRegion(0, self._host, length)
        self.engine = CudaCopyEngine(
            0,
            engine=engine or way_of(self.paged.plan),  # type: ignore[arg-type]
            threads=CHECKSUM_THREADS,
            max_sms=MAX_SMS,
        )
        self.engine.pin(self._region)
        self.bare = BareCopies(gpu, self.paged.base, self._host)
        self._job = 0

    def submit(self, direction: str, chunks: range, plan: CudaCopyPlan) -> int:
        """Begin to store or retrieve these chunks; return the number of the job."""
        self._job += 1
        kind = "gather" if direction == STORE else "scatter"
        items: list[Any] = []
        for at in chunks:
            key = at.to_bytes(32, "little")
            spec = (
                RecordSpec(key, bytes(32), bytes(32), b"", CHUNK_TOKENS)
                if direction == STORE
                else (key, bytes(32))
            )
            where = self._host + at * self._step
            items.append((self.paged.blocks[at], where, self.paged.record_bytes, spec))
        if not self.engine.submit(self._job, kind, plan, items):  # type: ignore[arg-type]
            raise RuntimeError("the copy engine's queue is full")
        return self._job

    def finish(self, *jobs: int) -> None:
        """Wait for these jobs. Raises RuntimeError unless every record is good."""
        for job in jobs:
            if not self.engine.wait(job, WAIT_S):
                raise RuntimeError(f"a copy did not end within {WAIT_S:.0f} s")
        outcomes = {outcome for _, found in self.engine.completions() for outcome in found}
        if outcomes != {CopyOutcome.OK}:
            raise RuntimeError(f"copies ended as {sorted(outcomes)}: {self.engine.failed}")

    def seconds(self, *jobs: tuple[str, range]) -> float:
        """Return the seconds of storing and retrieving these chunks, all jobs at the same time."""
        started = time.perf_counter()
        submitted = [self.submit(direction, chunks, self.paged.plan) for direction, chunks in jobs]
        self.finish(*submitted)
        return time.perf_counter() - started

    def checksums(self) -> float:
        """Return the GB/s of the records' checksums alone, by as many threads as the copy engine has."""
        threads, length = self.engine.threads, self.paged.length
        part = length // threads
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda at: crc32c_at(self._host + at * part, part), range(threads)))
        return threads * part / (time.perf_counter() - started) / 1e9

    def close(self) -> None:
        """Close the copy engine and free the memory."""
        self.engine.close()
        self._region.unregister()
        self._memory.close()
        self.paged.close()


def measure(
    gpu: Gpu,
    name: str,
    shape: Shape,
    block_tokens: int,
    /,
    *,
    chunks: Sequence[int] = CHUNKS,
    repeats: int = REPEATS,
    **more: Any,
) -> list[dict[str, Any]]:
    """Measure the three figures of one shape and block size; `more` goes into each. `chunks` must ascend."""
    most = chunks[-1]
    copies = Copies(gpu, shape, block_tokens, most)
    ratios: dict[tuple[str, int], list[float]] = {}
    rates: dict[tuple[str, int], list[float]] = {}
    floors: dict[str, list[float]] = {}
    checksums: list[float] = []
    try:
        whole = copies.paged.length
        for repeat in range(repeats + 1):
            # The bare copies overwrite the records, so they come first.
            bare = {
                STORE: whole / copies.bare.seconds(whole, STORE),
                RETRIEVE: whole / copies.bare.seconds(whole, RETRIEVE),
                "both": whole / copies.bare.seconds(whole // 2, STORE, RETRIEVE),
            }
            ours = {}
            for n in chunks:
                for direction in (STORE, RETRIEVE):
                    seconds = copies.seconds((direction, range(n)))
                    ours[direction, n] = n * copies.paged.payload_bytes / seconds
            checksums.append(copies.checksums())
            half = most // 2
            seconds = copies.seconds((STORE, range(half)), (RETRIEVE, range(half, 2 * half)))
            ours["both", most] = 2 * half * copies.paged.payload_bytes / seconds
            if repeat == 0:
                continue  # the first one warms up
            for direction, rate in bare.items():
                floors.setdefault(direction, []).append(rate / 1e9)
            for key, rate in ours.items():
                rates.setdefault(key, []).append(rate / 1e9)
                ratios.setdefault(key, []).append(rate / bare[key[0]])
        engine = copies.engine.engine
    finally:
        copies.close()
    figures = []
    for direction in (STORE, RETRIEVE, "both"):
        by_chunks = {n: median_spread(found)[0] for (which, n), found in ratios.items() if which == direction}
        counted = {n: ratio for n, ratio in by_chunks.items() if n >= min(MANY_CHUNKS, most)}
        target = TARGET_BOTH if direction == "both" else TARGET
        value, spread = median_spread(rates[direction, most])
        figures.append(
            figure(
                f"gpu_{direction}_{name}_b{block_tokens}",
                value=value,
                unit="GB/s",
                ratio=min(counted.values()),
                target=f"≥ {target} × bare copies, for {MANY_CHUNKS} chunks or more",
                ok=min(counted.values()) >= target,
                spread=spread,
                ratio_to=f"one pinned copy{' each way' if direction == 'both' else ''} beside it, "
                f"{median_spread(floors[direction])[0]:.1f} GB/s",
                ratio_by_chunks=by_chunks,
                checksums_gb_per_s=median_spread(checksums)[0],
                engine=engine,
                **more,
            )
        )
    return figures


def hidden(
    copies: Copies,
    stream: int,
    layer: Callable[[], None],
    finish: Callable[[], None],
    n_chunks: int,
    repeats: int,
) -> tuple[list[float], dict[str, float]]:
    """Return the share of a load that hides behind a forward pass, and the medians of its parts in ms.

    `layer` queues one layer of the pass on `stream`, `finish` waits for the stream.  As in a worker, the load begins
    after the work that the stream has queued, and before each layer the stream waits for that layer's section.
    """
    chunks, layers = range(n_chunks), copies.paged.shape.layers
    copies.seconds((STORE, chunks))

    def begin() -> int:
        plan = copies.paged.plan.layerwise().behind(copies.engine.moment(stream))
        return copies.submit(RETRIEVE, chunks, plan)

    taken: dict[str, list[float]] = {"load": [], "forward": [], "both": []}
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        copies.finish(begin())
        load_s = time.perf_counter() - started
        started = time.perf_counter()
        for _ in range(layers):
            layer()
        finish()
        forward_s = time.perf_counter() - started
        started = time.perf_counter()
        job = begin()
        for section in range(layers):
            if not copies.engine.await_section(job, section, stream, WAIT_S):
                raise RuntimeError(f"section {section} was not queued: {copies.engine.failed}")
            layer()
        finish()
        both_s = time.perf_counter() - started
        copies.finish(job)
        if repeat:
            for what, seconds in (("load", load_s), ("forward", forward_s), ("both", both_s)):
                taken[what].append(seconds)
    shares = [
        1 - (both - forward) / load
        for load, forward, both in zip(taken["load"], taken["forward"], taken["both"], strict=True)
    ]
    return shares, {f"{what}_ms": 1e3 * median_spread(found)[0] for what, found in taken.items()}


def load_hidden(
    gpu: Gpu,
    shape: Shape,
    layer: Callable[[], None],
    stream: int,
    /,
    *,
    n_chunks: int = HIDDEN_CHUNKS,
    repeats: int = REPEATS,
    **more: Any,
) -> dict[str, Any]:
    """Measure `hidden` for a prompt whose first chunks are loaded while `layer` queues the rest; return the figure."""
    copies = Copies(gpu, shape, 16, n_chunks)
    try:
        shares, parts = hidden(copies, stream, layer, lambda: gpu.synchronize(stream), n_chunks, repeats)
    finally:
        copies.close()
    value, spread = median_spread(shares)
    return figure(
        "gpu_load_hidden",
        value=100 * value,
        unit="%",
        ratio=value,
        target=f"≥ {100 * TARGET_HIDDEN:.0f} %",
        ok=value >= TARGET_HIDDEN,
        spread=[100 * end for end in spread],
        ratio_to="the load alone",
        **parts,
        engine=copies.engine.engine,
        **more,
    )


def gemm_slowdown(
    gpu: Gpu,
    shape: Shape,
    engine: str,
    products_ms: Callable[[], float],
    /,
    *,
    n_chunks: int = 16,
    repeats: int = REPEATS,
    **more: Any,
) -> dict[str, Any]:
    """Measure the time that matrix products lose while copies by `engine` keep moving `n_chunks` each way.

    `products_ms()` runs the products and returns how long the device took.
    """
    copies = Copies(gpu, shape, 16, 2 * n_chunks, engine)
    stop, going = threading.Event(), threading.Event()
    failures: list[RuntimeError] = []
    copied = [0]

    def keep_copying() -> None:
        try:
            while not stop.is_set():
                copies.seconds((STORE, range(n_chunks)), (RETRIEVE, range(n_chunks, 2 * n_chunks)))
                copied[0] += 2 * n_chunks * copies.paged.payload_bytes
                going.set()
        except RuntimeError as error:
            failures.append(error)
            going.set()

    try:
        copies.seconds((STORE, range(2 * n_chunks)))
        products_ms()
        slowdowns, gb_per_s = [], []
        for _ in range(repeats):
            alone_ms = products_ms()
            stop.clear()
            going.clear()
            thread = threading.Thread(target=keep_copying, name="copies")
            thread.start()
            going.wait()
            before, begun_s = copied[0], time.perf_counter()
            beside_ms = products_ms()
            gb_per_s.append((copied[0] - before) / (time.perf_counter() - begun_s) / 1e9)
            stop.set()
            thread.join()
            if failures:
                raise failures[0]
            slowdowns.append(beside_ms / alone_ms - 1)
        used = copies.engine.engine
        if used != engine:
            raise NotHere(f"needs copies by {engine!r}: {copies.engine.reason}")
    finally:
        copies.close()
    value, spread = median_spread(slowdowns)
    target = GEMM_TARGETS[engine]
    return figure(
        f"gpu_gemm_slowdown_{engine}",
        value=100 * value,
        unit="%",
        ratio=1 + value,
        target=f"≤ {100 * target:.0f} %",
        ok=value <= target,
        spread=[100 * end for end in spread],
        ratio_to=f"the same {GEMMS} products of {GEMM_WIDTH}² float16 alone, before each",
        copies_gb_per_s=median_spread(gb_per_s)[0],
        **more,
    )


def square_products() -> Callable[[], float]:
    """Make the products of `gpu_gemm_slowdown_*`; return a function that runs them and returns the device's ms."""
    import cupy

    first, second = (random_matrix(GEMM_WIDTH, GEMM_WIDTH) for _ in range(2))
    out = cupy.empty_like(first)
    stream = cupy.cuda.Stream(non_blocking=True)

    def products_ms() -> float:
        begun, ended = cupy.cuda.Event(), cupy.cuda.Event()
        with stream:
            begun.record(stream)
            for _ in range(GEMMS):
                cupy.matmul(first, second, out=out)
            ended.record(stream)
        ended.synchronize()
        return float(cupy.cuda.get_elapsed_time(begun, ended))

    cupy.cuda.Device(0).synchronize()
    return products_ms


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    facts = require_gpu()
    require_cupy()
    gpu = Gpu()
    more = on_gpu(facts)
    figures = []
    for name, shape in SHAPES.items():
        for block_tokens in BLOCK_TOKENS:
            figures += measure(gpu, name, shape, block_tokens, **more)
    shape, stream = SHAPES["8b"], gpu.stream()
    products = LayerProducts(shape, HIDDEN_TOKENS, stream)
    figures.append(load_hidden(gpu, shape, partial(products, HIDDEN_TOKENS), stream, **more))
    squares = square_products()
    return figures + [gemm_slowdown(gpu, shape, engine, squares, **more) for engine in GEMM_TARGETS]
