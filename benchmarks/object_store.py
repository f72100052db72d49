"""`object_store_put`, `_load` and `_exists`: the `object_store` adapter against bare obstore in the same store.

Bare obstore is called from as many threads as the adapter's lanes have, with the same calls and the same work for a
record: a `put` from the extent that creates the object; a `get` whose bytes are copied into the extent; a `head`.
The adapter also verifies loaded records; `verified_ratio` compares with bare obstore that does so too.  The store is
moto's server, a Python process on this machine, which does not have the costs of S3 over a network.

Sketch: moto takes milliseconds a request, in one process whose threads take turns, for both sides.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import obstore

from benchmarks import raw_io
from benchmarks.common import compared, median_spread, scratch, sized
from kvstrata.native.core import CopyOutcome, buffer_address, verify_stored_record
from kvstrata.tiers.config import make_adapter
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.object_store.adapter import DEFAULT_WORKERS, ObjectStoreAdapter, path_of
from tests.harness.s3_server import S3Server

MB = 1 << 20
RECORDS = sized(64, 4)
REPEATS = sized(9, 1)
KEYS = sized(256, 16)
PUT_TARGET = LOAD_TARGET = 0.8
EXISTS_TARGET = 1.2


def _put(store: Any, path: str, extent: memoryview) -> None:
    obstore.put(store, path, extent, mode="create", use_multipart=False)


def _get(store: Any, path: str, extent: memoryview) -> None:
    extent[:] = obstore.get(store, path).bytes()


def _get_verified(store: Any, path: str, extent: memoryview, key: bytes) -> None:
    _get(store, path, extent)
    assert verify_stored_record(buffer_address(extent), len(extent), key) == CopyOutcome.OK


def _head(store: Any, path: str) -> bool:
    try:
        obstore.head(store, path)
    except FileNotFoundError:
        return False
    return True


class _Raw:
    """Makes the library's calls on `store` with as many threads as the adapter's lanes have."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._threads = {
            lane: concurrent.futures.ThreadPoolExecutor(count) for lane, count in DEFAULT_WORKERS.items()
        }

    def seconds(self, lane: Lane, call: Callable[..., Any], each: Sequence[tuple[Any, ...]]) -> float:
        """Make the call once for each of these arguments, spread over the threads; return the seconds."""
        count = DEFAULT_WORKERS[lane]

        def share(number: int) -> None:
            for arguments in each[number::count]:
                call(self.store, *arguments)

        started = time.perf_counter()
        list(self._threads[lane].map(share, range(count)))
        return time.perf_counter() - started

    def close(self) -> None:
        """End the threads."""
        for threads in self._threads.values():
            threads.shutdown()


async def _rounds(entry: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of each repeat; the adapter and bare obstore take turns."""
    adapter = make_adapter(entry, 0)
    assert isinstance(adapter, ObjectStoreAdapter)
    await raw_io.opened(adapter)
    raw = _Raw(adapter.settings.connect())
    extents = raw_io.Records(MB, RECORDS)
    times: dict[str, list[float]] = {}
    try:
        for repeat in range(REPEATS + 1):
            extents.renew()
            bare = [(f"raw/{path_of(key)}", extents.bytes(i)) for i, key in enumerate(extents.keys)]
            took = {
                "raw put": raw.seconds(Lane.PUT, _put, bare),
                "put": await raw_io.put_s(adapter, extents, RECORDS),
                "raw load": raw.seconds(Lane.LOAD, _get, bare),
                "load": await raw_io.load_s(adapter, extents, RECORDS),
                "verified load": raw.seconds(
                    Lane.LOAD,
                    _get_verified,
                    [(*each, key) for each, key in zip(bare, extents.keys, strict=True)],
                ),
            }
            keys = [hashlib.sha256(b"%d" % n).digest() for n in range(KEYS - RECORDS)] + extents.keys
            paths = [(path_of(key),) for key in keys]
            took["raw exists"] = raw.seconds(Lane.LOOKUP, _head, paths)
            took["exists"] = (await raw_io.exists_s(adapter, keys, 1))[0]
            obstore.delete(raw.store, [path for path, _ in bare])
            await adapter.clear()
            if repeat:  # the first one warms up
                for name, took_s in took.items():
                    times.setdefault(name, []).append(took_s)
    finally:
        raw.close()
        await adapter.close()
    return times


def _figures(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    gb = RECORDS * MB / 1e9
    rates = {name: [gb / took_s for took_s in took] for name, took in times.items()}
    put_words = f"obstore.put from {DEFAULT_WORKERS[Lane.PUT]} threads, {RECORDS} × 1 MiB"
    load_words = f"obstore.get from {DEFAULT_WORKERS[Lane.LOAD]} threads, not verified, {RECORDS} × 1 MiB"
    verified = [a / b for a, b in zip(rates["load"], rates["verified load"], strict=True)]
    return [
        compared("object_store_put", rates["put"], "GB/s", put_words, rates["raw put"], least=PUT_TARGET),
        compared(
            "object_store_load",
            rates["load"],
            "GB/s",
            load_words,
            rates["raw load"],
            least=LOAD_TARGET,
            verified_ratio=median_spread(verified)[0],
        ),
        compared(
            "object_store_exists",
            [s * 1e3 for s in times["exists"]],
            "ms",
            f"{KEYS} × obstore.head from {DEFAULT_WORKERS[Lane.LOOKUP]} threads",
            [s * 1e3 for s in times["raw exists"]],
            most=EXISTS_TARGET,
        ),
    ]


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    with scratch("object-store") as folder, S3Server(folder) as server:
        return _figures(asyncio.run(_rounds(server.entry())))
