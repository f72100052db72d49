"""`sglang_set_…`, `sglang_get_…`: SGLang's storage interface stores and loads 64 pages of 2 MiB, against memcpy.

SGLang itself is a double (tests/harness/sglang_double.py); the host pool is plain memory, with the runs of SGLang's
layouts `page_first` (two a page) and `layer_first` (one for K and one for V in each of 32 layers).  SGLang's threads
make such a call for 4,096 tokens in pages of 64.

Sketch: 128 MiB are moved once, with checksums in the same pass, by two threads; memcpy of as many bytes by one thread
is the comparison.  A lookup, or a reserve and a commit, come on top.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import figure, median_spread, scratch, sized, wait_until
from tests.harness.server_process import ServerProcess
from tests.harness.sglang_double import Arguments, HostPool, StorageConfig, modules

PAGES = sized(64, 4)
LAYERS = 32
HEADS = sized(512, 8)
"""512 make a run of 32 KiB in each layer, as 64 tokens of a model with 8 KV heads of 128 do on two ranks' quarter."""
REPEATS = sized(7, 1)
L1_MB = sized(2400, 64)
TARGET = 0.7


def gb_per_s(call: Callable[[], object], length: int) -> float:
    """The speed of one call that moves `length` bytes."""
    began = time.perf_counter()
    call()
    return length / (time.perf_counter() - began) / 1e9


def run() -> list[dict[str, Any]]:
    """Measure both directions in both layouts."""
    speeds: dict[str, list[float]] = {}
    double = modules(Arguments())
    make = next(double)
    with (
        scratch("sglang") as folder,
        ServerProcess(folder, l1_mb=L1_MB, environment=dict(os.environ)) as server,
    ):
        server.start()
        for layout in ("page_first", "layer_first"):
            measure(make, server, layout, speeds)
    double.close()
    rows = []
    for layout in ("page_first", "layer_first"):
        for way in ("set", "get"):
            value, spread = median_spread(speeds[f"{way} {layout}"])
            memcpy = median_spread(speeds[f"memcpy {layout}"])[0]
            rows.append(
                figure(
                    f"sglang_{way}_{layout}",
                    value=value,
                    unit="GB/s",
                    ratio=value / memcpy,
                    ratio_to=f"memcpy by one thread, {memcpy:.1f} GB/s",
                    target=f"≥ {TARGET} × memcpy",
                    ok=value >= TARGET * memcpy,
                    spread=spread,
                )
            )
    return rows


def measure(make: Any, server: ServerProcess, layout: str, speeds: dict[str, list[float]]) -> None:
    """Store, load and memcpy pages in turn; the first round warms up."""
    pool = HostPool(layout, layers=LAYERS, pages=2 * PAGES, heads=HEADS)
    storage = make(StorageConfig(extra_config={"kvstrata.socket_dir": str(server.socket_dir)}), {})
    storage.register_mem_pool_host(pool)
    wait_until(lambda: all(storage.batch_set_v1([f"{layout} first"], pool.slots(0))), "the storage attaches")
    data = [pool.fill(page, f"page {page}") for page in range(PAGES)]
    length, target = PAGES * pool.page_bytes, ctypes.create_string_buffer(PAGES * pool.page_bytes)
    source = ctypes.create_string_buffer(length)
    try:
        for repeat in range(REPEATS + 1):
            names = [f"{layout} {repeat} {page}" for page in range(PAGES)]
            calls: dict[str, Callable[[], object]] = {
                "memcpy": lambda: ctypes.memmove(target, source, length),
                "set": lambda names=names: done(storage.batch_set_v1(names, pool.slots(0, PAGES))),
                "get": lambda names=names: done(storage.batch_get_v1(names, pool.slots(PAGES, PAGES))),
            }
            for way, call in calls.items():
                speed = gb_per_s(call, length)
                if repeat:
                    speeds.setdefault(f"{way} {layout}", []).append(speed)
        if [pool.read(PAGES + page) for page in range(PAGES)] != data:
            raise RuntimeError("pages did not come back as they were")
    finally:
        storage.close()


def done(results: list[bool]) -> None:
    """Raises RuntimeError unless all pages were moved."""
    if not all(results):
        raise RuntimeError(f"{results.count(False)} of {len(results)} pages were not moved")
