"""`index_*_512`: times of the pool's calls and of a client's index reader, from Python, on a million entries.

    python -m benchmarks.index_kernels [--entries N]

Each call asks for another chain, whose entries are scattered over the index, as in a pool that has been in use for a
long time.  No byte of an extent is touched.  The times are compared with the same number of look-ups in a Python dict
of the same keys.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import figure, sized
from kvstrata.native.index import IndexReader
from kvstrata.native.pool import Pool

ENTRIES = sized(1_000_000, 20_000)
CHUNKS = 512
EXTENT_BYTES = 4096
REPEATS = sized(5, 1)
CALLS = 200
IDENTITY = bytes(32)


def chain_of(number: int) -> list[bytes]:
    """Return the keys of one chain."""
    return [hashlib.sha256(b"%d.%d" % (number, chunk)).digest() for chunk in range(CHUNKS)]


class Fixture:
    """A pool with `entries` READY entries in chains of 512, and a client's reader of its index."""

    def __init__(self, entries: int) -> None:
        index_fd = os.memfd_create("kernels-index", os.MFD_CLOEXEC)
        extents_fd = os.memfd_create("kernels-extents", os.MFD_CLOEXEC)
        try:
            self.pool = Pool.create(
                index_fd,
                extents_fd,
                extents_bytes=entries * EXTENT_BYTES,
                entry_capacity=entries,
                max_session_share=1,
            )
            self.reader = IndexReader(index_fd)
        finally:
            os.close(index_fd)
            os.close(extents_fd)
        self.row = self.pool.claim_row(b"s" * 16, b"g" * 16, os.getpid())
        lists = [chain_of(number) for number in range(entries // CHUNKS)]
        self.chains = [b"".join(keys) for keys in lists]
        self.keys = [key for keys in lists for key in keys]
        random.Random(1).shuffle(self.keys)
        for begin in range(0, len(self.keys), CHUNKS):
            self.store(b"".join(self.keys[begin : begin + CHUNKS]))

    def store(self, keys: bytes) -> None:
        """Make READY entries for these keys, without writing their extents."""
        ticket, outcomes, _ = self.pool.reserve(keys, b"", EXTENT_BYTES, 0, IDENTITY)
        if any(outcomes):
            raise RuntimeError("the pool refused a chunk")
        self.pool.commit(ticket, list(range(len(outcomes))), check=False)

    def close(self) -> None:
        """Unmap the pool and the reader's index."""
        self.pool.close()
        self.reader.close()


def p50_us(
    call: Callable[[bytes], object], chains: Sequence[bytes], before: Callable[[], None]
) -> list[float]:
    """Return REPEATS medians in microseconds, each over CALLS calls; each call gets another chain."""
    medians = []
    for repeat in range(REPEATS):
        times = []
        for chain in random.Random(repeat).sample(chains, min(CALLS, len(chains))):
            before()
            started = time.perf_counter()
            call(chain)
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times) * 1e6)
    return medians


def measure(entries: int) -> dict[str, list[float]]:
    """Return medians in microseconds per call of 512 keys, by kind of call."""
    fixture = Fixture(entries)
    pool, reader, row = fixture.pool, fixture.reader, fixture.row
    tickets: list[int] = []

    def peek(chain: bytes) -> None:
        if reader.peek(chain) != CHUNKS:
            raise RuntimeError("a peek missed chunks that are in L1")

    def lease(chain: bytes) -> None:
        tickets.append(pool.lease(chain, 1, [row])[0])

    def release_all() -> None:
        while tickets:
            pool.release(tickets.pop(), row)

    def release(_: bytes) -> None:
        pool.release(tickets.pop(0), row)

    table = dict.fromkeys(fixture.keys, True)

    def in_dict(chain: bytes) -> None:
        if not all(chain[at : at + 32] in table for at in range(0, len(chain), 32)):
            raise RuntimeError("the dict missed one of its keys")

    others = iter(range(1 << 40))
    fresh = [b""]

    def make_fresh() -> None:
        fresh[0] = b"".join(chain_of(10**9 + next(others)))

    def reserve(_: bytes) -> None:
        pool.reserve(fresh[0], b"", EXTENT_BYTES, 0, IDENTITY)

    results = {
        "peek": p50_us(peek, fixture.chains, pool.heartbeat),
        "dict": p50_us(in_dict, fixture.chains, lambda: None),
        "lease": p50_us(lease, fixture.chains, release_all),
    }
    release_all()
    for chain in random.Random(2).choices(fixture.chains, k=REPEATS * CALLS):
        lease(chain)
    results["release"] = p50_us(release, fixture.chains, lambda: None)
    results["reserve, evicting"] = p50_us(reserve, fixture.chains, make_fresh)
    fixture.close()
    return results


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    results = measure(ENTRIES)
    limits = {"peek": 30.0, "lease": 100.0, "release": 100.0}
    return [
        figure(
            f"index_{kind}_512",
            value=statistics.median(results[kind]),
            unit="µs",
            ratio=statistics.median(results[kind]) / statistics.median(results["dict"]),
            target=f"≤ {limit:.0f} µs",
            ok=statistics.median(results[kind]) <= limit,
            spread=[min(results[kind]), max(results[kind])],
            ratio_to="512 look-ups in a Python dict of the same keys",
        )
        for kind, limit in limits.items()
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--entries", type=int, default=ENTRIES)
    arguments = parser.parse_args()
    for kind, medians in measure(arguments.entries).items():
        print(
            f"{kind:20} p50 {statistics.median(medians):8.1f} µs ({min(medians):.1f} to {max(medians):.1f})"
        )


if __name__ == "__main__":
    main()
