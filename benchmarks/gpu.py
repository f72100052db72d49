"""Code that the benchmarks of GPUs share: the GPU, a paged KV cache in its memory, and copies by the bare driver.

Device memory, streams and bare copies come straight from the driver (`tests.harness.cuda_driver.Gpu`); no package is
needed for them.
"""

from __future__ import annotations

import ctypes
import random
import time
from typing import Any, Literal

from benchmarks.common import NotHere
from kvstrata.connectors.device import DMA_RUN_BYTES
from kvstrata.native.cuda import CudaCopyPlan, CudaError, DeviceFacts, device_facts, driver_facts
from tests.harness.cuda_driver import Gpu
from tests.harness.gpu_kv import PagedKv, Shape

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
            layout="L2BNHD",
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
