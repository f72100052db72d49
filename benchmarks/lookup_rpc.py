"""`lookup_rpc_128k`: a lookup of 128k tokens (512 chunk keys, all in L1) through the real client and server.

The index holds a million chunks (with the smallest possible records, 8 KiB), and each call asks for another prompt, so
no processor cache holds anything from the call before.  The calls of the figure follow one another without a pause:
each begins as soon as the client has accepted the release of the call before.  The calls of `paced_p50_us` have a pause
between them.

Sketch: 512 SHA-256 of 64 bytes, 512 index probes that miss every cache (about 100 ns each), 16 KB to the server and
12 KB back.  The ratio compares with a bare ZMTP echo of the same frame.

`hops_p50_us` is the floor: the same bytes there and back between two processes that do nothing else, over one socket
in the server and a thread of the client.  For `hops_after_work_p50_us` the server computes for `WORK_S` before it
answers (not included in the figure), about as long as for a lookup: meanwhile the other core goes to sleep, and waking
it takes longer.

`server_cpu_per_128k_hit`: CPU time of the server process for one of these lookups without a pause, and its release.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    chain_of,
    compared,
    cpu_seconds,
    engine_client,
    median_spread,
    percentile,
    scratch,
    sized,
    store_ended,
    wait_until,
)
from benchmarks.echo import ThreadedAsker, echo_server
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.memory.segment_settings import available_bytes
from kvstrata.rpc import wire
from kvstrata.types import EXTENT, RequestIdentity
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess

TARGET_US = 300
TARGET_CPU_MS = 1.0
CHUNKS = 512
PROMPTS = sized(1954, 70)
"""Of 512 chunks each: 1,000,448 entries."""
L1_MB = sized(7900, 512)
ROUNDS = sized(7, 1)
CALLS = sized(130, 10)
"""Calls of a round; each round asks for prompts of its own."""
WORK_S = 100e-6
PAUSE_S = 0.002
"""Pause between two calls of the paced rounds, in which all processes and cores go to sleep."""


def fill(client: Any, identity: Any, prompts: Sequence[bytes], blocks: PagedBlocks) -> float:
    """Store the prompts, four at a time; return the seconds. Raises RuntimeError when a chunk could not be stored."""
    started = time.perf_counter()
    rows = [[0]] * CHUNKS

    jobs: list[tuple[Any, Callable[[], Any]]] = []
    for chain in prompts:
        store = partial(client.store, identity, b"", chain, blocks.plan, rows)
        jobs.append((store(), store))
        if len(jobs) == 4:
            store_ended(client, *jobs.pop(0))
    for job, store in jobs:
        store_ended(client, job, store)
    return time.perf_counter() - started


def lookup_seconds(client: Any, identity: Any, prompts: Sequence[bytes], pause_s: float) -> list[float]:
    """Return the seconds from each call to its result in the calling thread; release the leases."""
    seconds = []
    for chain in prompts:
        started = time.perf_counter()
        call = client.lookup(identity, chain, request_id="bench", deadline_ms=5000)
        call.wait(5)
        seconds.append(time.perf_counter() - started)
        if call.result.n_chunks != CHUNKS:
            raise RuntimeError(f"{call.result.n_chunks} of {CHUNKS} chunks found: {call.result.reason}")
        client.release([call.result.lease])
        if pause_s:
            time.sleep(pause_s)
    return seconds


def echo_seconds(socket: RpcClient, frame: bytes, calls: int, pause_s: float) -> list[float]:
    """Return the seconds of round trips of one frame."""
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        socket.send_bytes(frame)
        socket.receive_bytes()
        seconds.append(time.perf_counter() - started)
        if pause_s:
            time.sleep(pause_s)
    return seconds


def hops_us(folder: Path, frame: bytes, work_s: float) -> float:
    """The median µs of a request's frame to a bare process and an answer as long as a lookup's, without `work_s`."""
    path = folder / "hops.sock"
    with echo_server(path, CHUNKS * EXTENT.size, work_s):
        asker = ThreadedAsker(path)
        seconds = []
        for _ in range(ROUNDS * CALLS):
            started = time.perf_counter()
            asker.ask(frame)
            seconds.append(time.perf_counter() - started)
        asker.close()
    path.unlink(missing_ok=True)
    return (percentile(seconds, 0.5) - work_s) * 1e6


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    if available_bytes() < (L1_MB + 2000) << 20:
        raise RuntimeError(
            f"needs {(L1_MB + 2000) / 1024:.0f} GB of free memory for an index of a million chunks"
        )
    blocks = PagedBlocks(layers=1, num_blocks=1, block_bytes=64)
    environment = {**os.environ, "KVSTRATA_L1_ENTRIES": "1100000"}
    with (
        scratch("lookup") as folder,
        ServerProcess(folder, l1_mb=L1_MB, environment=environment) as server,
    ):
        server.start()
        client = engine_client(server.socket_dir, server.port, blocks)
        identity = client.identity(RequestIdentity())
        wait_until(lambda: identity.ready, "the identity is declared")
        prompts = [chain_of(identity.root, number, CHUNKS) for number in range(PROMPTS)]
        fill_s = fill(client, identity, prompts, blocks)
        entries = sum(server.get("/v1/status")["pool"]["entries"].values())
        keys = prompts[0]
        frame = wire.encode(wire.Lookup(1, 1000, 1, "bench", keys))
        echo_folder = server.socket_dir / "echo"
        echo_folder.mkdir()
        with echo_server(echo_folder / RPC_SOCKET):
            echo = RpcClient(echo_folder)
            echo.connect()
            paced: list[list[float]] = []
            packed: list[list[float]] = []
            bare: list[list[float]] = []
            bare_paced: list[list[float]] = []
            asked = iter(prompts)
            lookup_seconds(client, identity, [next(asked) for _ in range(50)], PAUSE_S)
            cpu_ms: list[float] = []
            for _ in range(ROUNDS):
                bare.append(echo_seconds(echo, frame, CALLS, 0.0))
                bare_paced.append(echo_seconds(echo, frame, CALLS, PAUSE_S))
                paced.append(lookup_seconds(client, identity, [next(asked) for _ in range(CALLS)], PAUSE_S))
                before = cpu_seconds(server.pid)
                packed.append(lookup_seconds(client, identity, [next(asked) for _ in range(CALLS)], 0.0))
                wait_until(lambda: client.stats()["requests_under_way"] == 0, "all leases are released")
                cpu_ms.append(1000 * (cpu_seconds(server.pid) - before) / CALLS)
            echo.close()
            hops = hops_us(server.socket_dir, frame, 0.0)
            hops_after_work = hops_us(server.socket_dir, frame, WORK_S)
        client.close()
    blocks.close()
    p50 = {
        name: [percentile(seconds, 0.5) * 1e6 for seconds in taken]
        for name, taken in (("packed", packed), ("paced", paced), ("bare", bare), ("bare paced", bare_paced))
    }
    paced_us, paced_spread = median_spread(p50["paced"])
    return [
        compared(
            "lookup_rpc_128k",
            p50["packed"],
            "µs",
            f"p50 of a bare ZMTP echo of the request's {len(frame)} bytes",
            p50["bare"],
            most_value=TARGET_US,
            p99_us=median_spread([percentile(seconds, 0.99) * 1e6 for seconds in packed])[0],
            paced_p50_us=paced_us,
            paced_spread=paced_spread,
            paced_echo_p50_us=median_spread(p50["bare paced"])[0],
            hops_p50_us=hops,
            hops_after_work_p50_us=hops_after_work,
            entries=entries,
            fill_s=fill_s,
        ),
        compared(
            "server_cpu_per_128k_hit", cpu_ms, "ms", "the target", TARGET_CPU_MS, most_value=TARGET_CPU_MS
        ),
    ]
