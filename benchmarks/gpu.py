"""`gpu_*`: copies of a paged KV cache in a GPU's memory, against copies by the bare driver.

Device memory, streams and bare copies come straight from the driver (`tests.harness.cuda_driver.Gpu`); no package is
needed for them.

`gpu_store_*`, `gpu_retrieve_*`, `gpu_both_*`: copies of chunks between paged KV on a GPU and pinned records.

As in a worker, the copy engine measures its ways of copying and takes the fastest; records are sealed and verified.
The copies take turns with one pinned copy by the bare driver, which moves as many bytes as the cache of 64 chunks has.
Copies in both directions take turns with two pinned copies at the same time, each of half as many bytes.  Each figure
also tells how fast the checksum threads read the records with nothing else going on: no verified copy is faster.

`gpu_gemm_slowdown_*` is the time that matrix products on a stream of their own lose while copies run in both
directions.  `gpu_load_hidden` is the share of a load that does not lengthen the forward pass, which waits for the load
layer by layer.

Sketch: every byte crosses the link to the GPU once; the host computes checksums while the copies run.

`gpu_attach`, `gpu_pin_pool`, `gpu_one_chunk`, `gpu_pool_*`: a worker with its KV on a GPU and a real server.

The pool has 64 GB, or half of the free memory if that is less.  The worker attaches, and registers the pool with the
driver in the background; both are timed.  When the whole pool is registered, prompts of 16 chunks and of one chunk
(Llama 8B, blocks of 16 tokens) are stored and loaded through the server.  These stores and loads take turns with pinned
copies of as many bytes, one in each direction.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.common import NotHere, compared, figure, median_spread, scratch, start_faulted, wait_until
from benchmarks.copy_path import Path8B
from kvstrata.client import CacheClient
from kvstrata.client.pinning import Pinner
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.device import CHECKSUM_THREADS, DMA_RUN_BYTES, MAX_SMS
from kvstrata.native.core import CopyOutcome, RecordSpec, buffer_address, crc32c_at
from kvstrata.native.cuda import (
    CudaCopyEngine,
    CudaCopyPlan,
    CudaError,
    DeviceFacts,
    HostRegion,
    device_facts,
    driver_facts,
)
from kvstrata.types import LayoutIdentity, Role
from tests.harness.cuda_driver import Gpu
from tests.harness.gpu_kv import SHAPES, PagedKv, Shape
from tests.harness.server_process import ServerProcess

CHUNK_TOKENS = 256
STORE, RETRIEVE = "store", "retrieve"


def require_gpu() -> DeviceFacts:
    """Return the first GPU. Raises NotHere without a GPU, and for the simulated one, whose speed means nothing."""
    try:
        driver_facts()
        facts = device_facts(0)
    except CudaError as error:
        raise NotHere(f"needs an NVIDIA GPU: {error}") from error
    if facts.name.startswith("Simulated"):
        raise NotHere(
            f"needs an NVIDIA GPU: {facts.name!r} is the driver of the tests, whose speed says nothing"
        )
    return facts


def require_cupy() -> None:
    """Raise NotHere unless CuPy and the libraries that it computes with are installed."""
    try:
        # CuPy loads its libraries only when these modules are imported.
        from cupy.cuda import cublas, curand  # noqa: F401
    except ImportError as error:
        raise NotHere(
            f"needs CuPy, which computes beside the copies: pip install '.[gpu]' ({error})"
        ) from error


def way_of(plan: CudaCopyPlan) -> Literal["dma", "kernel"]:
    """The way that `open_engine` takes."""
    return "dma" if plan.run_bytes >= DMA_RUN_BYTES else "kernel"


def random_matrix(rows: int, columns: int) -> Any:
    """Make a CuPy matrix of random float16 numbers."""
    import cupy

    return cupy.random.rand(rows, columns, dtype=cupy.float32).astype(cupy.float16)


class LayerProducts:
    """The matrix products of one layer of a model, on the caller's stream, without attention itself."""

    def __init__(self, shape: Shape, most_tokens: int, stream: int) -> None:
        import cupy

        self._matmul = cupy.matmul
        self._stream = cupy.cuda.ExternalStream(stream)
        self._products = [
            (
                random_matrix(most_tokens, rows),
                random_matrix(rows, columns),
                cupy.empty((most_tokens, columns), dtype=cupy.float16),
            )
            for rows, columns in shape.products
        ]
        cupy.cuda.Device(0).synchronize()

    def __call__(self, tokens: int) -> None:
        """Queue the products for `tokens` tokens."""
        with self._stream:
            for first, second, out in self._products:
                self._matmul(first[:tokens], second, out=out[:tokens])


def on_gpu(facts: DeviceFacts) -> dict[str, Any]:
    """Return a figure's fields that name the GPU and the driver."""
    version = driver_facts().version
    return {"gpu": facts.name, "driver": f"CUDA {version // 1000}.{version % 1000 // 10}"}


class PagedGpu(PagedKv):
    """The KV of `n_chunks` chunks on the first device, each layer (2, blocks, tokens, heads, dim).

    The blocks of a chunk are scattered, as in a cache that has been in use for a long time.
    """

    def __init__(self, gpu: Gpu, shape: Shape, block_tokens: int, n_chunks: int) -> None:
        per_chunk = CHUNK_TOKENS // block_tokens
        num_blocks = n_chunks * per_chunk
        self._gpu = gpu
        self.length = self.memory_bytes(shape, block_tokens, num_blocks)
        super().__init__(
            gpu.allocate(self.length),
            shape,
            layout="LHBNC",
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            chunk_tokens=CHUNK_TOKENS,
        )
        self.plan = CudaCopyPlan(self.host_plan, 0)
        ids = list(range(num_blocks))
        random.Random(block_tokens).shuffle(ids)
        self.blocks = [ids[at * per_chunk : (at + 1) * per_chunk] for at in range(n_chunks)]
        self.payload_bytes = self.plan.payload_bytes(per_chunk)
        self.record_bytes = self.plan.record_bytes(per_chunk)

    def close(self) -> None:
        """Free the memory; no copy may run."""
        self._gpu.free(self.base)


class BareCopies:
    """One large copy in each direction between device memory and registered host memory, on a stream each."""

    def __init__(self, gpu: Gpu, device_address: int, host_address: int) -> None:
        """The caller owns the memory at both addresses; `seconds` says how much it uses."""
        self._gpu = gpu
        self._device = device_address
        self._host = host_address
        self._streams = {STORE: gpu.stream(), RETRIEVE: gpu.stream()}

    def seconds(self, length: int, *directions: str) -> float:
        """Return the seconds of copying `length` bytes in each of these directions at the same time.

        Direction number i uses bytes [i * length, (i + 1) * length) on both sides.
        """
        started = time.perf_counter()
        for at, direction in enumerate(directions):
            device = ctypes.c_uint64(self._device + at * length)
            host = ctypes.c_void_p(self._host + at * length)
            stream = ctypes.c_void_p(self._streams[direction])
            if direction == STORE:
                self._gpu.call("cuMemcpyDtoHAsync_v2", host, device, ctypes.c_size_t(length), stream)
            else:
                self._gpu.call("cuMemcpyHtoDAsync_v2", device, host, ctypes.c_size_t(length), stream)
        for direction in directions:
            self._gpu.synchronize(self._streams[direction])
        return time.perf_counter() - started


COPY_BLOCKS = (16, 64, 128)
COPY_CHUNKS = (1, 8, 64)
REPEATS = 7
WAIT_S = 60.0
COPY_TARGET = 0.9
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
        left, outcomes = set(jobs), set()
        while left:
            if not select.select([self.engine.event_fd], [], [], WAIT_S)[0]:
                raise RuntimeError(f"a copy did not end within {WAIT_S:.0f} s")
            for job, found in self.engine.completions():
                left.remove(job)
                outcomes.update(found)
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


def measure_copies(
    gpu: Gpu,
    name: str,
    shape: Shape,
    block_tokens: int,
    /,
    *,
    chunks: Sequence[int] = COPY_CHUNKS,
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
        target = TARGET_BOTH if direction == "both" else COPY_TARGET
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
    return compared(
        "gpu_load_hidden",
        [100 * share for share in shares],
        "%",
        "the load alone",
        100.0,
        least=TARGET_HIDDEN,
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
    return compared(
        f"gpu_gemm_slowdown_{engine}",
        [100 * slowdown for slowdown in slowdowns],
        "%",
        f"the same {GEMMS} products of {GEMM_WIDTH}² float16 alone, before each",
        100.0,
        most=GEMM_TARGETS[engine],
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


def run_gpu_copies() -> list[dict[str, Any]]:
    """Measure the figures."""
    facts = require_gpu()
    require_cupy()
    gpu = Gpu()
    more = on_gpu(facts)
    figures = []
    for name, shape in SHAPES.items():
        for block_tokens in COPY_BLOCKS:
            figures += measure_copies(gpu, name, shape, block_tokens, **more)
    shape, stream = SHAPES["8b"], gpu.stream()
    products = LayerProducts(shape, HIDDEN_TOKENS, stream)
    figures.append(load_hidden(gpu, shape, partial(products, HIDDEN_TOKENS), stream, **more))
    squares = square_products()
    return figures + [gemm_slowdown(gpu, shape, engine, squares, **more) for engine in GEMM_TARGETS]


POOL_MB = 64 << 10
POOL_BLOCK_TOKENS = 16
POOL_CHUNKS = 16
PIN_S = 600.0
ATTACH_TARGET_MS = 50.0
ONE_CHUNK_TARGET = 1.5


class GpuPath(Path8B):
    """The stores and loads of `Path8B`, with blocks that are scattered over a device."""

    def _blocks(self, n_chunks: int) -> list[list[int]]:
        assert isinstance(self.blocks, PagedGpu)
        return self.blocks.blocks[:n_chunks]


def measure_pool(
    gpu: Gpu,
    shape: Shape,
    /,
    *,
    pool_mb: int,
    n_chunks: int = POOL_CHUNKS,
    repeats: int = REPEATS,
    **more: Any,
) -> list[dict[str, Any]]:
    """Measure the figures of a pool of this size; `more` goes into each."""
    paged = PagedGpu(gpu, shape, POOL_BLOCK_TOKENS, n_chunks)
    length = n_chunks * paged.payload_bytes
    memory = mmap.mmap(-1, length, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    region = HostRegion(0, buffer_address(memory), length)
    bare = BareCopies(gpu, paged.base, buffer_address(memory))
    seconds: dict[tuple[str, int], list[float]] = {}
    with scratch("gpu") as folder, ServerProcess(Path(folder), l1_mb=pool_mb) as server:
        start_faulted(server)
        pool_bytes = server.get("/v1/status")["pool"]["extents_bytes"]
        settings = ClientSettings(socket_dir=str(server.socket_dir), port=server.port)
        engine = CudaCopyEngine(0, engine=way_of(paged.plan), threads=CHECKSUM_THREADS)
        client = CacheClient(
            settings,
            role=Role.CLIENT,
            layout=LayoutIdentity(model="bench", kv_dtype="bf16", chunk_tokens=settings.chunk_size),
            group=secrets.token_bytes(16),
            engine_slices=1,
            slice=paged.view.slice,
            facts=paged.view.facts,
            engine=engine,
            pages=Pinner(engine, 0),
            registers_memory=True,
        )
        try:
            begun_s = time.perf_counter()
            client.start()
            wait_until(lambda: client.connected, "the client attaches")
            attach_ms = 1e3 * (time.perf_counter() - begun_s)
            pinned_then = client.stats()["pinned_bytes"]
            wait_until(
                lambda: bool(client.stats()["pin_refusal"]) or client.stats()["pinned_bytes"] >= pool_bytes,
                "the pool is pinned",
                PIN_S,
            )
            if refusal := client.stats()["pin_refusal"]:
                raise RuntimeError(f"the pool could not be pinned: {refusal}")
            pin_s = float(client.stats()["pin_s"])
            path = GpuPath(client, paged, 1)  # type: ignore[arg-type]
            for repeat in range(repeats + 1):
                for n in {1, n_chunks}:
                    size = n * paged.payload_bytes
                    taken = {
                        "bare store": bare.seconds(size, STORE),
                        "bare retrieve": bare.seconds(size, RETRIEVE),
                        STORE: path.store(n),
                        RETRIEVE: path.retrieve(n),
                    }
                    for what, took_s in taken.items():
                        if repeat:
                            seconds.setdefault((what, n), []).append(took_s)
        finally:
            client.close()
    region.unregister()
    memory.close()
    paged.close()
    more = {**more, "engine": engine.engine, "reason": engine.reason}
    both = [sum(pair) for pair in zip(seconds[STORE, 1], seconds[RETRIEVE, 1], strict=True)]
    floor = [sum(pair) for pair in zip(seconds["bare store", 1], seconds["bare retrieve", 1], strict=True)]
    return [
        compared(
            "gpu_attach",
            attach_ms,
            "ms",
            "the time to pin the pool, which goes on after the attach",
            1e3 * pin_s,
            most_value=ATTACH_TARGET_MS,
            pinned_mb_then=pinned_then >> 20,
            **more,
        ),
        compared(
            "gpu_pin_pool",
            pin_s,
            "s",
            "GB of the pool",
            pool_bytes / 1e9,
            inverse=True,
            pool_mb=pool_bytes >> 20,
            **more,
        ),
        *(
            compared(
                f"gpu_pool_{what}",
                [length / s / 1e9 for s in seconds[what, n_chunks]],
                "GB/s",
                "one pinned copy beside it",
                [length / s / 1e9 for s in seconds[f"bare {what}", n_chunks]],
                **more,
            )
            for what in (STORE, RETRIEVE)
        ),
        compared(
            "gpu_one_chunk",
            [1e3 * s for s in both],
            "ms",
            "pinned copies of a chunk's bytes, one in each direction",
            [1e3 * s for s in floor],
            most=ONE_CHUNK_TARGET,
            **more,
        ),
    ]


def run_gpu_pool() -> list[dict[str, Any]]:
    """Measure the figures."""
    facts = require_gpu()
    free_mb = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    return measure_pool(Gpu(), SHAPES["8b"], pool_mb=min(POOL_MB, free_mb // 2), **on_gpu(facts))
