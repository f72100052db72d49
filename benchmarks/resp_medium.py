"""`resp_put`, `resp_load` and `exists_1024_resp`: the `resp` adapter against another client of the same server.

The other client is redis-py with hiredis, which pipelines the same commands on one connection; its loads give `bytes`
objects, which are neither verified nor copied into extents.

Sketch: one thread of the server copies each byte once between its memory and a socket, and the kernel copies the byte
once for the client: with server and client on one machine, 64 MiB take 30 to 60 ms.  1,024 STRLEN are about 110 KB and
as many look-ups.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import redis

from benchmarks import raw_io
from benchmarks.common import compared, scratch, sized
from kvstrata.tiers.config import make_adapter
from tests.harness.redis_server import RedisServer

MB = 1 << 20
RECORDS = sized(64, 4)
REPEATS = sized(9, 1)
KEYS = 1024
EXISTS_REPEATS = sized(100, 3)
PUT_TARGET = LOAD_TARGET = 0.8
EXISTS_TARGET = 1.2


def _raw_put_s(client: redis.Redis, values: dict[str, bytes]) -> float:
    pipeline = client.pipeline(transaction=False)
    started = time.perf_counter()
    for name, value in values.items():
        pipeline.set(name, value, nx=True)
    stored = pipeline.execute()
    took_s = time.perf_counter() - started
    if not all(stored):
        raise RuntimeError("a raw SET was refused")
    return took_s


def _raw_load_s(client: redis.Redis, values: dict[str, bytes]) -> float:
    pipeline = client.pipeline(transaction=False)
    started = time.perf_counter()
    for name in values:
        pipeline.get(name)
    loaded = pipeline.execute()
    took_s = time.perf_counter() - started
    if any(value is None or len(value) != MB for value in loaded):
        raise RuntimeError("a raw GET missed")
    return took_s


def _raw_exists_s(client: redis.Redis, names: list[str]) -> float:
    pipeline = client.pipeline(transaction=False)
    started = time.perf_counter()
    for name in names:
        pipeline.strlen(name)
    pipeline.execute()
    return time.perf_counter() - started


async def _rounds(server: RedisServer, client: redis.Redis) -> dict[str, list[float]]:
    """Return the seconds of each repeat; the adapter and redis-py take turns."""
    extents = raw_io.Records(MB, RECORDS)
    adapter = await raw_io.opened(make_adapter(server.entry(), 0))
    times: dict[str, list[float]] = {
        name: [] for name in ("put", "raw put", "load", "raw load", "exists", "raw exists")
    }
    try:
        for repeat in range(REPEATS + 1):
            extents.renew()
            values = {f"raw:{key.hex()}": bytes(extents.bytes(i)) for i, key in enumerate(extents.keys)}
            took = {
                "raw put": _raw_put_s(client, values),
                "raw load": _raw_load_s(client, values),
            }
            client.flushall()
            took["put"] = await raw_io.put_s(adapter, extents, RECORDS)
            took["load"] = await raw_io.load_s(adapter, extents, RECORDS)
            client.flushall()
            if repeat:  # the first one warms up
                for name, took_s in took.items():
                    times[name].append(took_s)
        keys = [hashlib.sha256(b"%d" % n).digest() for n in range(KEYS)]
        names = [f"kvstrata:{key.hex()}" for key in keys]
        client.mset(dict.fromkeys(names[::2], b"a record"))
        for _ in range(EXISTS_REPEATS):
            times["raw exists"].append(_raw_exists_s(client, names))
            times["exists"] += await raw_io.exists_s(adapter, keys, 1)
    finally:
        await adapter.close()
    return times


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    with scratch("resp") as folder, RedisServer(folder) as server, server.client() as client:
        times = asyncio.run(_rounds(server, client))
    gb = RECORDS * MB / 1e9
    rates = {name: [gb / took_s for took_s in took] for name, took in times.items()}
    words = f"of redis-py with hiredis, pipelined, {RECORDS} × 1 MiB"
    return [
        compared("resp_put", rates["put"], "GB/s", f"SET NX {words}", rates["raw put"], least=PUT_TARGET),
        compared("resp_load", rates["load"], "GB/s", f"GET {words}", rates["raw load"], least=LOAD_TARGET),
        compared(
            "exists_1024_resp",
            [s * 1e6 for s in times["exists"]],
            "µs",
            f"{KEYS:,} STRLEN of redis-py with hiredis, pipelined",
            [s * 1e6 for s in times["raw exists"]],
            most=EXISTS_TARGET,
        ),
    ]
