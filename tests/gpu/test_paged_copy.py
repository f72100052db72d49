"""The CUDA gather and scatter of paged blocks, called through its C interface.

The tests marked `gpu` use the driver itself (libcuda) for memory and streams, so they need no Python package
for CUDA. The others need only the built library.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "src" / "kvstrata" / "native" / "libkvstrata_cuda.so"
INVALID_VALUE = 1
THREAD_BLOCKS = 4


class PagedView(ctypes.Structure):
    """KvstrataPagedView of ext/cuda/paged_copy.h."""

    _fields_ = [
        ("sections", ctypes.POINTER(ctypes.c_uint64)),
        ("section_count", ctypes.c_uint32),
        ("engine_block_count", ctypes.c_uint32),
        ("block_stride_bytes", ctypes.c_uint64),
        ("run_bytes", ctypes.c_uint64),
    ]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        toolkit = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
        if toolkit and os.environ.get("KVSTRATA_CUDA") != "off":
            pytest.fail(f"nvcc is there but {LIBRARY.name} is not: run `make cuda`")
        pytest.skip("the CUDA kernels are not built: install the CUDA toolkit (nvcc), then run `make cuda`")
    loaded = ctypes.CDLL(str(LIBRARY))
    arguments = [ctypes.POINTER(PagedView), ctypes.POINTER(ctypes.c_int32), ctypes.c_uint32, ctypes.c_uint64]
    arguments += [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p]
    loaded.kvstrata_cuda_gather.argtypes = arguments
    loaded.kvstrata_cuda_scatter.argtypes = arguments
    loaded.kvstrata_cuda_error_string.restype = ctypes.c_char_p
    return loaded


def make_view(sections: list[int], engine_blocks: int, stride: int, run: int) -> PagedView:
    return PagedView((ctypes.c_uint64 * len(sections))(*sections), len(sections), engine_blocks, stride, run)


def block_array(ids: list[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(ids))(*ids)


def test_library_has_the_interface_that_its_header_promises(library: ctypes.CDLL) -> None:
    assert library.kvstrata_cuda_abi_version() == 1
    assert b"invalid argument" in library.kvstrata_cuda_error_string(INVALID_VALUE)


def test_bad_arguments_are_refused_before_any_gpu_is_touched(library: ctypes.CDLL) -> None:
    view = make_view([1 << 20], engine_blocks=8, stride=64, run=64)
    for call in (library.kvstrata_cuda_gather, library.kvstrata_cuda_scatter):
        assert call(view, block_array([8]), 1, 1 << 30, 64, 1, None) == INVALID_VALUE
        assert call(view, block_array([-1]), 1, 1 << 30, 64, 1, None) == INVALID_VALUE
        assert call(view, block_array([0]), 1, (1 << 30) + 8, 64, 1, None) == INVALID_VALUE
        assert call(view, block_array([0]), 1, 1 << 30, 48, 1, None) == INVALID_VALUE
        assert call(view, block_array([0]), 1, 1 << 30, 64, 0, None) == INVALID_VALUE
        assert call(None, block_array([0]), 1, 1 << 30, 64, 1, None) == INVALID_VALUE


def test_a_copy_of_nothing_succeeds(library: ctypes.CDLL) -> None:
    view = make_view([1 << 20], engine_blocks=8, stride=64, run=64)
    assert library.kvstrata_cuda_gather(view, block_array([]), 0, 1 << 30, 64, 1, None) == 0


class Gpu:
    """Memory and one stream on the first GPU, by the driver's own interface; close() gives all of it back."""

    def __init__(self) -> None:
        reason = "needs an NVIDIA GPU and its driver; on Debian or Ubuntu: sudo apt-get install nvidia-driver"
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            pytest.skip(f"{reason} ({error})")
        if self._driver.cuInit(0) != 0:
            pytest.skip(f"{reason} (the driver finds no GPU)")
        self._device, self._stream = ctypes.c_int(), ctypes.c_void_p()
        context = ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), 1)
        self._allocated: list[ctypes.c_uint64] = []
        self._pinned: list[ctypes.c_void_p] = []

    @property
    def stream(self) -> ctypes.c_void_p:
        return self._stream

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._driver, name)(*arguments)
        assert error == 0, f"{name}: CUDA driver error {error}"

    def upload(self, content: bytes) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(content)))
        self._allocated.append(address)
        self._call("cuMemcpyHtoD_v2", address, content, ctypes.c_size_t(len(content)))
        return address.value

    def download(self, address: int, length: int) -> bytes:
        self.wait()
        target = ctypes.create_string_buffer(length)
        self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(length))
        return target.raw

    def pin(self, content: bytes) -> int:
        """Host memory that kernels can address, filled with `content`."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(len(content)), 0)
        assert address.value is not None
        self._pinned.append(address)
        ctypes.memmove(address.value, content, len(content))
        return address.value

    def read_pinned(self, address: int, length: int) -> bytes:
        self.wait()
        return ctypes.string_at(address, length)

    def wait(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        self.wait()
        for address in self._allocated:
            self._call("cuMemFree_v2", address)
        for pinned in self._pinned:
            self._call("cuMemFreeHost", pinned)
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    device = Gpu()
    yield device
    device.close()


SHAPES = [
    # sections, engine blocks, blocks copied, run bytes, gap after a run
    pytest.param(2, 9, 4, 16, 0, id="smallest-run"),
    pytest.param(3, 40, 17, 4_096, 4_096, id="strided"),
    pytest.param(8, 64, 16, 65_536, 0, id="llama-8b-like"),
    pytest.param(1, 5, 5, 3 * 32_768 + 48, 16, id="odd-tail"),
    pytest.param(300, 12, 3, 64, 0, id="more-sections-than-one-launch"),
    pytest.param(2, 1_000, 900, 64, 64, id="more-blocks-than-one-launch"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sections", "engine_blocks", "blocks", "run", "gap"), SHAPES)
@pytest.mark.parametrize("memory", ["device", "pinned"])
def test_gather_then_scatter_moves_exactly_the_named_blocks(
    library: ctypes.CDLL,
    gpu: Gpu,
    sections: int,
    engine_blocks: int,
    blocks: int,
    run: int,
    gap: int,
    memory: str,
) -> None:
    randomness = random.Random(f"{sections} {engine_blocks} {run}")
    stride = run + gap
    section_bytes = engine_blocks * stride
    stored = [randomness.randbytes(section_bytes) for _ in range(sections)]
    overwritten = [randomness.randbytes(section_bytes) for _ in range(sections)]
    sources = randomness.sample(range(engine_blocks), blocks)
    targets = randomness.sample(range(engine_blocks), blocks)
    section_stride = blocks * run + 48
    blank = b"\xa5" * (sections * section_stride)

    place: Callable[[bytes], int] = gpu.upload if memory == "device" else gpu.pin
    fetch = gpu.download if memory == "device" else gpu.read_pinned
    buffer = place(blank)
    view = make_view([gpu.upload(content) for content in stored], engine_blocks, stride, run)
    gathered = library.kvstrata_cuda_gather(
        view, block_array(sources), blocks, buffer, section_stride, THREAD_BLOCKS, gpu.stream
    )
    assert gathered == 0, library.kvstrata_cuda_error_string(gathered)

    expected = bytearray(blank)
    for section, content in enumerate(stored):
        for index, block in enumerate(sources):
            start = section * section_stride + index * run
            expected[start : start + run] = content[block * stride : block * stride + run]
    assert fetch(buffer, len(blank)) == bytes(expected)

    addresses = [gpu.upload(content) for content in overwritten]
    scattered = library.kvstrata_cuda_scatter(
        make_view(addresses, engine_blocks, stride, run),
        block_array(targets),
        blocks,
        buffer,
        section_stride,
        THREAD_BLOCKS,
        gpu.stream,
    )
    assert scattered == 0, library.kvstrata_cuda_error_string(scattered)
    for section, address in enumerate(addresses):
        content = bytearray(overwritten[section])
        for source, target in zip(sources, targets, strict=True):
            content[target * stride : target * stride + run] = stored[section][
                source * stride : source * stride + run
            ]
        assert gpu.download(address, section_bytes) == bytes(content), f"section {section}"
