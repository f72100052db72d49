"""What the benchmarks of GPUs share: the GPU itself, a paged KV cache in its memory, and copies by the bare driver.

Device memory, streams and bare copies come straight from the driver (`tests.harness.cuda_driver.Gpu`); no package is
needed for them.
"""

from __future__ import annotations

import ctypes
import random
import time
from typing import Any, NamedTuple

from benchmarks.common import NotHere
from kvstrata.native.copying import CopyPlan
from kvstrata.native.cuda import CudaCopyPlan, CudaError, DeviceFacts, device_facts, driver_facts
from kvstrata.types import Slice, facts_digest
from tests.harness.cuda_driver import Gpu

CHUNK_TOKENS = 256
STORE, RETRIEVE = "store", "retrieve"


def require_gpu() -> DeviceFacts:
    """The first GPU. Raises NotHere where there is none whose figures mean anything."""
    try:
        driver_facts()
        facts = device_facts(0)
    except CudaError as error:
        raise NotHere(f"needs an NVIDIA GPU: {error}") from error
    if facts.name.startswith("Simulated"):
        raise NotHere(
            f"needs an NVIDIA GPU: {facts.name!r} is the driver of the tests, its speed says nothing"
        )
    return facts


def on_gpu(facts: DeviceFacts) -> dict[str, Any]:
    """For a figure: what it was measured on."""
    version = driver_facts().version
    return {"gpu": facts.name, "driver": f"CUDA {version // 1000}.{version % 1000 // 10}"}


class Shape(NamedTuple):
    """What one worker holds of a model."""

    layers: int
    token_bytes: int
    """Keys, or values, of one token in one layer."""


SHAPES = {
    "8b": Shape(32, 8 * 128 * 2),
    "70b_tp8": Shape(80, 1 * 128 * 2),
}
"""Llama 8B, and one of eight workers of Llama 70B; bf16, 8 and 1 kv heads of 128."""


class PagedGpu:
    """The KV of `n_chunks` chunks on the first device, each layer (2, blocks, block) as FlashAttention has it.

    The blocks of a chunk lie anywhere, as in a cache that has been in use for long.
    """

    def __init__(self, gpu: Gpu, shape: Shape, block_tokens: int, n_chunks: int) -> None:
        self._gpu = gpu
        per_chunk = CHUNK_TOKENS // block_tokens
        num_blocks = n_chunks * per_chunk
        run_bytes = block_tokens * shape.token_bytes
        self.length = shape.layers * 2 * num_blocks * run_bytes
        self.base = gpu.allocate(self.length)
        bases = [self.base + layer * 2 * num_blocks * run_bytes for layer in range(shape.layers)]
        host_plan = CopyPlan(
            bases, num_blocks, [run_bytes] * shape.layers, [(2, num_blocks * run_bytes)], run_bytes
        )
        self.plan = CudaCopyPlan(host_plan, 0)
        ids = list(range(num_blocks))
        random.Random(block_tokens).shuffle(ids)
        self.blocks = [ids[at * per_chunk : (at + 1) * per_chunk] for at in range(n_chunks)]
        self.payload_bytes = self.plan.payload_bytes(per_chunk)
        self.record_bytes = self.plan.record_bytes(per_chunk)
        self.layers = shape.layers
        self.facts = {"layers": shape.layers, "run_bytes": run_bytes}

    def slice(self) -> Slice:
        """The slice that these blocks hold."""
        return Slice(layers=(0, self.layers), kv_heads=(0, 1), layout=facts_digest(self.facts))

    def close(self) -> None:
        """Free the memory; no copy may run."""
        self._gpu.free(self.base)


class BareCopies:
    """One large copy in each direction between device memory and registered host memory, on a stream each."""

    def __init__(self, gpu: Gpu, device_address: int, host_address: int) -> None:
        """The memory stays the caller's. Both directions at once need twice the bytes of one."""
        self._gpu = gpu
        self._device = device_address
        self._host = host_address
        self._streams = {STORE: gpu.stream(), RETRIEVE: gpu.stream()}

    def seconds(self, length: int, *directions: str) -> float:
        """Time until `length` bytes have gone in each of these directions, at the same time."""
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
