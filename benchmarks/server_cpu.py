"""`server_cpu_per_128k_hit`: CPU time of the server process for one lookup and release of 512 chunks in L1.

Each lookup asks for another prompt.  The CPU time that an idle server uses in the same time is subtracted.

Sketch: the server derives 512 storage keys (64 bytes of SHA-256 each), finds, leases and releases 512 entries, and
handles two messages.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.common import (
    chains,
    compared,
    cpu_seconds,
    engine_client,
    scratch,
    sized,
    start_faulted,
    wait_until,
)
from kvstrata.client import CacheClient, Identity
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.types import RequestIdentity
from tests.harness.server_process import ServerProcess

CHUNKS = 512
PROMPTS = sized(16, 2)
TARGET_MS = 1.0
REPEATS = sized(7, 1)
CYCLES = sized(200, 10)
IDLE_S = sized(1.0, 0.1)


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    with scratch("server-cpu") as folder, ServerProcess(Path(folder), l1_mb=512) as server:
        start_faulted(server)
        blocks = PagedBlocks(layers=1, num_blocks=CHUNKS, block_bytes=4096)
        client = engine_client(server.socket_dir, server.port, blocks)
        try:
            identity = client.identity(RequestIdentity())
            wait_until(lambda: identity.ready, "the identity is known")
            prompts = chains(identity.root, PROMPTS, CHUNKS)
            for chain in prompts:
                wait_until(lambda chain=chain: _stored(client, identity, chain, blocks), "a prompt is stored")

            def hit(cycle: int) -> None:
                call = client.lookup(
                    identity, prompts[cycle % PROMPTS], request_id=str(cycle), deadline_ms=10_000
                )
                if not call.wait(10) or call.result.n_chunks != CHUNKS:
                    raise RuntimeError(f"a lookup found {call.done and call.result.n_chunks} chunks")
                client.release([call.result.lease])

            def settled() -> None:
                wait_until(lambda: client.stats()["requests_under_way"] == 0, "all leases are released")

            for cycle in range(CYCLES):
                hit(cycle)
            settled()
            before = cpu_seconds(server.pid)
            time.sleep(IDLE_S)  # measures the CPU time of an idle server
            idle_share = (cpu_seconds(server.pid) - before) / IDLE_S
            values = []
            for _ in range(REPEATS):
                started_s, before = time.monotonic(), cpu_seconds(server.pid)
                for cycle in range(CYCLES):
                    hit(cycle)
                settled()
                used = cpu_seconds(server.pid) - before - idle_share * (time.monotonic() - started_s)
                values.append(1000 * used / CYCLES)
        finally:
            client.close()
            blocks.close()
    return [
        compared(
            "server_cpu_per_128k_hit",
            values,
            "ms",
            "the target",
            TARGET_MS,
            most_value=TARGET_MS,
            idle_cpu_share=idle_share,
        )
    ]


def _stored(client: CacheClient, identity: Identity, chain: bytes, blocks: PagedBlocks) -> bool:
    """Store a prompt; return whether all of it is stored, which may take several tries on a busy machine."""
    job = client.store(identity, b"", chain, blocks.plan, [[i] for i in range(CHUNKS)])
    return job.done.wait(60) and set(job.outcomes) <= {"stored", "present"}
