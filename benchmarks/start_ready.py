"""`start_ready`, `idle_rss`, `import_server`, `import_client`: how soon a server with 4 GB of L1 serves, how much
memory it has when idle, and how long the imports take.

`start_ready` is compared with an interpreter that imports uvloop, pyzmq, msgspec and prometheus-client; making the
pool's sparse file takes no time.  Afterwards two threads fault in the 4 GB of the pool.  Idle memory is the private and
file-backed memory of the server process; the pool's pages count as shared memory and are reported separately.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import (
    chain_of,
    compared,
    engine_client,
    is_faulted,
    median_spread,
    scratch,
    sized,
    wait_until,
)
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.types import RequestIdentity
from tests.harness.server_process import ServerProcess

READY_TARGET_S = 1.0
RSS_TARGET_MB = 100
IMPORT_TARGET_S = 0.3
L1_MB = sized(4096, 64)
REPEATS = sized(7, 1)
IDLE_S = sized(60, 0)
BURST_PROMPTS = sized(400, 4)
BURST_CHUNKS = 256
BURST_CLIENTS = sized(4, 1)
IMPORTS = "import uvloop, zmq, msgspec, prometheus_client"


def bare_start_s(code: str) -> float:
    """Return the wall seconds of an interpreter that runs `code`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def ping_until_faulted(server: ServerProcess) -> list[float]:
    """Send status requests one after another until the whole pool is faulted in; return their round trips in s."""
    seconds = []
    while sum(seconds) < 120:
        asked = time.perf_counter()
        found = server.get("/v1/status")
        seconds.append(time.perf_counter() - asked)
        if is_faulted(found):
            return seconds
        time.sleep(0.005)
    raise RuntimeError("the pool was not faulted in during 120 s of status requests")


def start_ready() -> list[dict[str, Any]]:
    """Measure the time from the fork of the process until it serves, and until its pool is faulted in."""
    ready: list[float] = []
    faulted: list[float] = []
    floor: list[float] = []
    slowest: list[float] = []
    for repeat in range(REPEATS + 1):
        imports_s = bare_start_s(IMPORTS)
        with scratch("start") as folder, ServerProcess(folder, l1_mb=L1_MB) as server:
            started = time.perf_counter()
            server.start()
            ready_s = time.perf_counter() - started
            pings = ping_until_faulted(server)
            if repeat:  # the first start is a warm-up: it reads the files for the first time
                faulted.append(time.perf_counter() - started)
                ready.append(ready_s)
                slowest.append(max(pings))
                floor.append(imports_s)
    value, faulted_s = median_spread(ready)[0], median_spread(faulted)[0]
    print(
        f"   {L1_MB} MB of L1: ready to serve after {value:.2f} s, faulted in after {faulted_s:.2f} s",
        flush=True,
    )
    return [
        compared(
            "start_ready",
            ready,
            "s",
            "an interpreter that imports the libraries",
            median_spread(floor)[0],
            most_value=READY_TARGET_S,
            faulted_s=faulted_s,
            faulted_spread=median_spread(faulted)[1],
            slowest_status_while_faulting_s=median_spread(slowest)[0],
        )
    ]


def memory_mb(pid: int) -> dict[str, float]:
    """Return RssAnon, RssFile and RssShmem of a process in MB."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem"):
            found[name] = int(value.split()[0]) * 1024 / 1e6
    return found


def bare_rss_mb() -> float:
    """Return the private and file-backed memory, in MB, of an interpreter that has imported the libraries."""
    code = f"{IMPORTS}, sys; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        rss = memory_mb(process.pid)
        process.stdin.close()
    return rss["RssAnon"] + rss["RssFile"]


def burst(server: ServerProcess, blocks: PagedBlocks) -> int:
    """Let clients store prompts, look them up and leave; return how many lookups hit."""
    hits = 0
    clients = [
        engine_client(server.socket_dir, server.port, blocks, model=f"burst-{i}")
        for i in range(BURST_CLIENTS)
    ]
    for client in clients:
        identity = client.identity(RequestIdentity())
        wait_until(lambda identity=identity: identity.ready, "the identity is declared")
        for number in range(BURST_PROMPTS):
            chain = chain_of(identity.root, number, BURST_CHUNKS)
            job = client.store(identity, b"", chain, blocks.plan, [[0]] * BURST_CHUNKS)
            if not job.done.wait(60):
                raise RuntimeError("a store of the burst did not end")
            call = client.lookup(identity, chain, request_id="burst", deadline_ms=5000)
            call.wait(5)
            if call.result.lease is not None:
                hits += 1
                client.release([call.result.lease])
    for client in clients:
        client.close()
    server.get("/readyz")  # as any health check does
    return hits


def idle_rss() -> list[dict[str, Any]]:
    """Measure the memory of a server one minute after a burst of stores and lookups."""
    floor = bare_rss_mb()
    blocks = PagedBlocks(layers=1, num_blocks=1, block_bytes=4096)
    with scratch("idle") as folder, ServerProcess(folder, l1_mb=L1_MB) as server:
        server.start()
        before = memory_mb(server.pid)
        hits = burst(server, blocks)
        after = memory_mb(server.pid)
        time.sleep(IDLE_S)
        readings = []
        for _ in range(5):
            readings.append(memory_mb(server.pid))
            time.sleep(1)
    blocks.close()
    return [
        compared(
            "idle_rss",
            [reading["RssAnon"] + reading["RssFile"] for reading in readings],
            "MB",
            "an interpreter that has imported the libraries",
            floor,
            most_value=RSS_TARGET_MB,
            anonymous_mb=readings[-1]["RssAnon"],
            file_mb=readings[-1]["RssFile"],
            pool_mb=readings[-1]["RssShmem"],
            ready_mb=before["RssAnon"] + before["RssFile"],
            after_burst_mb=after["RssAnon"] + after["RssFile"],
            burst_stored_chunks=BURST_CLIENTS * BURST_PROMPTS * BURST_CHUNKS,
            burst_hits=hits,
        )
    ]


def import_seconds(module: str) -> list[float]:
    """Return the wall seconds of fresh interpreters that import a module ("": none), their start included."""
    return [bare_start_s(f"import {module}" if module else "pass") for _ in range(REPEATS)]


def imports() -> list[dict[str, Any]]:
    """Measure the imports of server and client, less the start of the bare interpreter."""
    import_seconds("kvstrata.server.process")  # a warm-up: it reads the files for the first time
    bare = median_spread(import_seconds(""))[0]
    modules = {"import_server": "kvstrata.server.process", "import_client": "kvstrata.client"}
    return [
        compared(
            name,
            [seconds - bare for seconds in import_seconds(module)],
            "s",
            "starting the bare interpreter",
            bare,
            most_value=IMPORT_TARGET_S,
        )
        for name, module in modules.items()
    ]


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    return start_ready() + idle_rss() + imports()
