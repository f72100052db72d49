"""`evict_pressure`: the rate of storing three times as much as L1 holds, against storing into an empty, faulted pool.

At least 64 independent prompts are stored back to back, once all with one chunk size and once alternating between two
sizes, each time without L2, with `fs`, and with an `fs` that writes 50 MB/s.  The rate into an empty pool is measured
before and after each run, on a server with as much L1 and no L2.  The target also demands that no chunk is refused and
that the newest prompts are in L1, complete and with the right bytes.

Sketch: the same bytes are gathered and checksummed; to make room for a prompt of 48 MiB, the server takes 12 large or
48 small entries off a list.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    ROOT,
    chain_of,
    engine_client,
    figure,
    median_spread,
    scratch,
    sized,
    start_faulted,
    wait_until,
)
from kvstrata.client import LoadItem
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.types import RequestIdentity, unpack_extents
from tests.harness.http_read import read
from tests.harness.server_process import ServerProcess

TARGET = 0.9
L1_MB = sized(1536, 256)
TIMES_L1 = 3
EMPTY_SHARE = 0.75
"""Share of L1 that is stored into the empty pool."""
NEWEST_SHARE = 0.9
"""Share of L1 that must hold the newest prompts: a chunk is evicted only when another needs its room."""
PINNED_SHARE = 0.25
"""Share of L1 that waiting puts may pin, older chunks included; with L2 this share need not hold the newest prompts."""
REPEATS = sized(9, 1)
LAYERS = 32
PROMPT_BLOCKS = sized(192, 48)
"""Blocks of 256 KiB (32 layers of 8 KiB): 48 MiB a prompt."""
BLOCK_BYTES = 8192
SIZES = {"one": (16,), "two": (16, 4)}
"""Blocks in a chunk: 4 MiB for all prompts, or 4 MiB and 1 MiB in turn."""
THROTTLED_MB_PER_S = 50


class Engine:
    """One client per chunk size; the clients take turns with the blocks of two prompts."""

    def __init__(self, server: ServerProcess, chunk_blocks: Sequence[int]) -> None:
        self.blocks = PagedBlocks(layers=LAYERS, num_blocks=3 * PROMPT_BLOCKS, block_bytes=BLOCK_BYTES)
        self.blocks.touch()
        self.chunk_blocks = chunk_blocks
        self.clients = []
        for size in chunk_blocks:
            self.blocks.chunk_blocks = size
            where = server.socket_dir, server.port, self.blocks
            self.clients.append(engine_client(*where, model=f"evict-{size}", chunk_tokens=16 * size))
        self.identities = [client.identity(RequestIdentity()) for client in self.clients]
        wait_until(lambda: all(identity.ready for identity in self.identities), "identities are declared")
        self.stored: list[tuple[int, bytes]] = []
        """(number of the client, chain) of each prompt, oldest first."""
        self.prompts = 0

    def rows(self, kind: int, place: int) -> list[list[int]]:
        """Return the blocks of each chunk of the prompt in place 0 or 1 (to store) or 2 (to load into)."""
        size = self.chunk_blocks[kind]
        first = place * PROMPT_BLOCKS
        return [list(range(first + at, first + at + size)) for at in range(0, PROMPT_BLOCKS, size)]

    def stamp(self, place: int, number: int) -> None:
        """Write the prompt's number into every block of the first and the last layer of a place."""
        for layer in (0, LAYERS - 1):
            for block in range(place * PROMPT_BLOCKS, (place + 1) * PROMPT_BLOCKS):
                address = self.blocks.bases[layer] + block * BLOCK_BYTES
                ctypes.c_uint64.from_address(address).value = number * PROMPT_BLOCKS + block % PROMPT_BLOCKS

    def is_stamped(self, place: int, number: int) -> bool:
        """Whether the place holds the number that `stamp` wrote."""
        return all(
            ctypes.c_uint64.from_address(self.blocks.bases[layer] + block * BLOCK_BYTES).value
            == number * PROMPT_BLOCKS + block % PROMPT_BLOCKS
            for layer in (0, LAYERS - 1)
            for block in range(place * PROMPT_BLOCKS, (place + 1) * PROMPT_BLOCKS)
        )

    def store(self, n_prompts: int) -> tuple[float, dict[str, int]]:
        """Store new prompts back to back; return bytes a second, and the chunks by outcome."""
        jobs: list[Any] = []
        started = time.perf_counter()
        for number in range(self.prompts, self.prompts + n_prompts):
            kind, place = number % len(self.clients), number % 2
            n_chunks = PROMPT_BLOCKS // self.chunk_blocks[kind]
            chain = chain_of(self.identities[kind].root, number, n_chunks)
            if len(jobs) >= 2 and not jobs[-2].wait_gathered(60):
                raise RuntimeError("a store was not gathered within 60 s")
            self.stamp(place, number)
            jobs.append(
                self.clients[kind].store(
                    self.identities[kind], b"", chain, self.blocks.plan, self.rows(kind, place)
                )
            )
            self.stored.append((kind, chain))
        for job in jobs:
            if not job.done.wait(60):
                raise RuntimeError("a store did not end within 60 s")
        seconds = time.perf_counter() - started
        self.prompts += n_prompts
        outcomes: dict[str, int] = {}
        for job in jobs:
            for outcome in job.outcomes:
                outcomes[str(outcome)] = outcomes.get(str(outcome), 0) + 1
        return sum(job.bytes for job in jobs) / seconds, outcomes

    def newest_in_l1(self) -> int:
        """Count the newest prompts that are whole in L1, up to the first that is not."""
        for age, (kind, chain) in enumerate(reversed(self.stored)):
            if self.clients[kind].peek(self.identities[kind], chain) * 32 < len(chain):
                return age
        return len(self.stored)

    def check(self, age: int) -> None:
        """Retrieve the prompt of this age (0: the newest) and check its stamps. Raises RuntimeError."""
        kind, chain = self.stored[-1 - age]
        client = self.clients[kind]
        number = self.prompts - 1 - age
        self.stamp(2, 0)
        call = client.lookup(self.identities[kind], chain, request_id="check", deadline_ms=5000)
        call.wait(5)
        rows = self.rows(kind, 2)
        if call.result.n_chunks != len(rows):
            raise RuntimeError(
                f"prompt of age {age}: found {call.result.n_chunks} of {len(rows)} chunks: {call.result.reason}"
            )
        items = [
            LoadItem(chain[32 * i : 32 * i + 32], extent.offset_bytes, extent.length_bytes, rows[i])
            for i, extent in enumerate(unpack_extents(call.result.extents))
        ]
        job = client.load(self.identities[kind], call.result.lease, items, self.blocks.plan, sync=True)
        if job.failed or not self.is_stamped(2, number):
            raise RuntimeError(f"prompt of age {age} came back wrong ({len(job.failed)} chunks failed)")

    def close(self) -> None:
        """Close the clients."""
        for client in self.clients:
            client.close()
        self.blocks.close()


def empty(server: ServerProcess, engine: Engine) -> None:
    """Clear L1 and L2 once all leases are released and all puts have ended."""
    wait_until(lambda: server.get("/v1/status")["sessions"]["leases"] == 0, "leases are released")
    wait_until(lambda: put_stats(server).get("backlog_bytes", 0) == 0, "puts end")
    wait_until(lambda: is_cleared(server), "L1 is empty")
    engine.stored.clear()


def is_cleared(server: ServerProcess) -> bool:
    """Ask the server to clear everything; return whether L1 is empty."""
    read(f"{server.url}/v1/clear", body={"tier": "all"})
    return bool(server.get("/v1/status")["pool"]["used_bytes"] == 0)


def put_stats(server: ServerProcess) -> dict[str, Any]:
    """Return the numbers of the puts to L2, from the status document; empty without L2."""
    found: dict[str, Any] = server.get("/v1/status").get("l2_store", {})
    return found


def put_outcomes(server: ServerProcess) -> dict[str, int]:
    """Return the puts of all adapters by outcome since the start."""
    total: dict[str, int] = {}
    for adapter in put_stats(server).get("adapters", {}).values():
        for outcome, count in adapter["outcomes"].items():
            total[outcome] = total.get(outcome, 0) + count
    return total


def case(
    name: str, plain: ServerProcess, plain_engine: Engine, server: ServerProcess, engine: Engine
) -> dict[str, Any]:
    """Measure one mix of chunk sizes on `server`, against `plain`, which has no L2."""
    prompt_bytes = PROMPT_BLOCKS * LAYERS * BLOCK_BYTES
    n_empty = int(EMPTY_SHARE * (L1_MB << 20) / prompt_bytes)
    n_all = max(64, -(-TIMES_L1 * (L1_MB << 20) // prompt_bytes))
    rates, floors, newest = [], [], []
    refused: dict[str, int] = {}
    before = put_outcomes(server)
    for repeat in range(REPEATS + 1):
        empty(plain, plain_engine)
        floor_before, _ = plain_engine.store(n_empty)
        empty(plain, plain_engine)
        empty(server, engine)
        rate, outcomes = engine.store(n_all)
        newest.append(engine.newest_in_l1())
        for age in range(3):
            engine.check(age)
        empty(plain, plain_engine)
        floor_after, _ = plain_engine.store(n_empty)
        for outcome, count in outcomes.items():
            if outcome != "stored":
                refused[outcome] = refused.get(outcome, 0) + count
        if repeat:  # the first one warms up caches and page tables
            rates.append(rate)
            floors.append((floor_before + floor_after) / 2)
    puts = {outcome: count - before.get(outcome, 0) for outcome, count in put_outcomes(server).items()}
    value, spread = median_spread([rate / 1e9 for rate in rates])
    ratio, ratio_spread = median_spread([rate / floor for rate, floor in zip(rates, floors, strict=True)])
    share = NEWEST_SHARE if server is plain else NEWEST_SHARE - PINNED_SHARE
    wanted = int(share * (L1_MB << 20) / prompt_bytes)
    skipped = {
        outcome: count for outcome, count in puts.items() if outcome not in ("stored", "exists", "throttled")
    }
    if puts:
        print(f"   {name}: puts {puts.get('stored', 0)} stored, skipped {skipped or 'none'}", flush=True)
    return figure(
        f"evict_pressure_{name}",
        value=value,
        unit="GB/s",
        ratio=ratio,
        target=f"≥ {TARGET} × the rate into an empty, faulted pool; nothing refused; the newest in L1",
        ok=ratio >= TARGET and not refused and min(newest) >= wanted,
        spread=spread,
        ratio_to=f"rate into an empty, faulted pool without L2, {median_spread(floors)[0] / 1e9:.2f} GB/s",
        ratio_spread=ratio_spread,
        prompts=n_all,
        refused_chunks=refused,
        newest_prompts_in_l1=min(newest),
        newest_prompts_wanted=wanted,
        l1_holds_prompts=round((L1_MB << 20) / prompt_bytes, 1),
        puts=puts,
    )


def adapters(folder: Path) -> dict[str, str]:
    """Return the `--l2-adapter` of each kind of L2 by its name in the figures."""
    return {
        "fs": json.dumps({"type": "fs", "base_path": str(folder / "fs"), "capacity_gb": 4}),
        "slow": json.dumps(
            {
                "type": "plugin",
                "module_path": "benchmarks.throttled_fs",
                "class_name": "ThrottledFs",
                "adapter_params": {
                    "base_path": str(folder / "slow"),
                    "mb_per_s": THROTTLED_MB_PER_S,
                    "capacity_gb": 4,
                },
            }
        ),
    }


def run() -> list[dict[str, Any]]:
    """Measure six cases, and report the worst of them as `evict_pressure`."""
    figures = []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with scratch("evict") as folder, ServerProcess(folder / "plain", l1_mb=L1_MB) as plain:
        start_faulted(plain)
        for sizes, chunk_blocks in SIZES.items():
            plain_engine = Engine(plain, chunk_blocks)
            figures.append(case(f"{sizes}_none", plain, plain_engine, plain, plain_engine))
            for l2, adapter in adapters(folder).items():
                with ServerProcess(
                    folder / l2,
                    l1_mb=L1_MB,
                    l2="embedded",  # replaced by the flag
                    flags=("--l2-adapter", adapter),
                    environment=environment,
                ) as server:
                    start_faulted(server)
                    engine = Engine(server, chunk_blocks)
                    figures.append(case(f"{sizes}_{l2}", plain, plain_engine, server, engine))
                    engine.close()
            plain_engine.close()
    worst = min(figures, key=lambda entry: (entry["ok"], entry["ratio"]))
    summary = {
        **worst,
        "name": "evict_pressure",
        "case": worst["name"],
        "ok": all(entry["ok"] for entry in figures),
    }
    return [summary, *figures]
