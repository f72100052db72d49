"""`gpu_attach`, `gpu_pin_pool`, `gpu_one_chunk`, `gpu_pool_*`: a worker with its KV on a GPU and a real server.

The pool has 64 GB, or half of the free memory if that is less.  The worker attaches, and registers the pool with the
driver in the background; both are timed.  When the whole pool is registered, prompts of 16 chunks and of one chunk
(Llama 8B, blocks of 16 tokens) are stored and loaded through the server.  These stores and loads take turns with pinned
copies of as many bytes, one in each direction.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from pathlib import Path
from typing import Any

from benchmarks.common import figure, median_spread, scratch, wait_until
from benchmarks.copy_path import Path8B
from benchmarks.gpu import RETRIEVE, STORE, BareCopies, PagedGpu, on_gpu, require_gpu, way_of
from benchmarks.raw_session import start_faulted, status
from kvstrata.client import CacheClient
from kvstrata.client.pinning import Pinner
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.device import CHECKSUM_THREADS
from kvstrata.native.core import buffer_address
from kvstrata.native.cuda import CudaCopyEngine, HostRegion
from kvstrata.types import LayoutIdentity, Role
from tests.harness.cuda_driver import Gpu
from tests.harness.gpu_kv import SHAPES, Shape
from tests.harness.server_process import ServerProcess

POOL_MB = 64 << 10
BLOCK_TOKENS = 16
CHUNKS = 16
REPEATS = 7
PIN_S = 600.0
ATTACH_TARGET_MS = 50.0
ONE_CHUNK_TARGET = 1.5


class GpuPath(Path8B):
    """The stores and loads of `Path8B`, with blocks that are scattered over a device."""

    def _blocks(self, n_chunks: int) -> list[list[int]]:
        assert isinstance(self.blocks, PagedGpu)
        return self.blocks.blocks[:n_chunks]


def measure(
    gpu: Gpu, shape: Shape, /, *, pool_mb: int, n_chunks: int = CHUNKS, repeats: int = REPEATS, **more: Any
) -> list[dict[str, Any]]:
    """Measure the figures of a pool of this size; `more` goes into each."""
    paged = PagedGpu(gpu, shape, BLOCK_TOKENS, n_chunks)
    length = n_chunks * paged.payload_bytes
    memory = mmap.mmap(-1, length, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    region = HostRegion(0, buffer_address(memory), length)
    bare = BareCopies(gpu, paged.base, buffer_address(memory))
    seconds: dict[tuple[str, int], list[float]] = {}
    with scratch("gpu") as folder, ServerProcess(Path(folder), l1_mb=pool_mb) as server:
        start_faulted(server)
        pool_bytes = status(server)["pool"]["extents_bytes"]
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
    figures = [
        figure(
            "gpu_attach",
            value=attach_ms,
            unit="ms",
            ratio=attach_ms / (1e3 * pin_s) if pin_s else 0.0,
            target=f"≤ {ATTACH_TARGET_MS:.0f} ms",
            ok=attach_ms <= ATTACH_TARGET_MS,
            ratio_to="the time to pin the pool, which goes on after the attach",
            pinned_mb_then=pinned_then >> 20,
            **more,
        ),
        figure(
            "gpu_pin_pool",
            value=pin_s,
            unit="s",
            ratio=pool_bytes / pin_s / 1e9 if pin_s else 0.0,
            target="reported",
            ok=True,
            ratio_to="GB/s",
            pool_mb=pool_bytes >> 20,
            **more,
        ),
    ]
    for what in (STORE, RETRIEVE):
        found, floor = seconds[what, n_chunks], seconds[f"bare {what}", n_chunks]
        value, spread = median_spread([length / s / 1e9 for s in found])
        figures.append(
            figure(
                f"gpu_pool_{what}",
                value=value,
                unit="GB/s",
                ratio=median_spread([f / s for f, s in zip(floor, found, strict=True)])[0],
                target="reported",
                ok=True,
                spread=spread,
                ratio_to=f"one pinned copy beside it, {length / median_spread(floor)[0] / 1e9:.1f} GB/s",
                **more,
            )
        )
    both = [sum(pair) for pair in zip(seconds[STORE, 1], seconds[RETRIEVE, 1], strict=True)]
    floor = [sum(pair) for pair in zip(seconds["bare store", 1], seconds["bare retrieve", 1], strict=True)]
    value, spread = median_spread([1e3 * s for s in both])
    ratio = median_spread([s / f for s, f in zip(both, floor, strict=True)])[0]
    figures.append(
        figure(
            "gpu_one_chunk",
            value=value,
            unit="ms",
            ratio=ratio,
            target=f"≤ {ONE_CHUNK_TARGET} × the two bare copies",
            ok=ratio <= ONE_CHUNK_TARGET,
            spread=spread,
            ratio_to="pinned copies of a chunk's bytes, one in each direction",
            **more,
        )
    )
    return figures


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    facts = require_gpu()
    free_mb = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    return measure(Gpu(), SHAPES["8b"], pool_mb=min(POOL_MB, free_mb // 2), **on_gpu(facts))
