"""Token hit ratios of the eviction policies of the real pool on a trace of requests.

    python -m benchmarks.policies [--trace FILE] [--shares 2,5,10,20]

FILE has one JSON object a line, as in the traces published with Mooncake (FAST 2025), with `timestamp` (ms),
`input_length` and `output_length` (tokens), and `hash_ids` (one id per 512-token block of the prompt; equal ids are
equal prefixes).  Without FILE, a synthetic trace of similar statistics is made.  The ratios are compared with those of
a plain LRU list of blocks.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import figure
from benchmarks.traces import BLOCK_TOKENS, TraceRequest, read_trace, synthetic_trace
from kvstrata.native.core import Pool

EXTENT_BYTES = 4096
POLICIES = ("LRU", "ARC", "S3FIFO")
SHARES = (0.02, 0.05, 0.10, 0.20)
IDENTITY = bytes(32)


def key_of(block: int) -> bytes:
    """Return the storage key that stands for a block of the trace."""
    return hashlib.sha256(block.to_bytes(8, "little")).digest()


def empty_pool(capacity: int, policy: str) -> Pool:
    """Return a pool that has room for `capacity` extents of EXTENT_BYTES."""
    index_fd = os.memfd_create("policies-index", os.MFD_CLOEXEC)
    extents_fd = os.memfd_create("policies-extents", os.MFD_CLOEXEC)
    try:
        return Pool.create(
            index_fd,
            extents_fd,
            extents_bytes=capacity * EXTENT_BYTES,
            entry_capacity=capacity,
            policy=policy,
            max_session_share=1,
        )
    finally:
        os.close(index_fd)
        os.close(extents_fd)


def pool_hits(prompts: Sequence[TraceRequest], capacity: int, policy: str) -> float:
    """Return the share of the tokens that a pool of `capacity` blocks serves. The pool's extents are never written."""
    pool = empty_pool(capacity, policy)
    hit_tokens = 0
    for prompt in prompts:
        keys = b"".join(key_of(block) for block in prompt.blocks)
        ticket, hits, *_ = pool.lease(keys, 1, [0])
        if ticket:
            pool.release(ticket)
        hit_tokens += min(hits * BLOCK_TOKENS, prompt.tokens)
        parent = keys[(hits - 1) * 32 : hits * 32] if hits else b""
        ticket, outcomes, _ = pool.reserve(keys[hits * 32 :], parent, EXTENT_BYTES, 0, IDENTITY)
        if ticket:
            pool.commit(ticket, [i for i, outcome in enumerate(outcomes) if outcome == 0], check=False)
    pool.close()
    return hit_tokens / sum(prompt.tokens for prompt in prompts)


def plain_lru_hits(prompts: Sequence[TraceRequest], capacity: int) -> float:
    """Return the same share for a plain LRU list of blocks; a prompt uses its blocks from the last to the first."""
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    hit_tokens = 0
    for prompt in prompts:
        hits = 0
        while hits < len(prompt.blocks) and prompt.blocks[hits] in cache:
            hits += 1
        hit_tokens += min(hits * BLOCK_TOKENS, prompt.tokens)
        for block in reversed(prompt.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit_tokens / sum(prompt.tokens for prompt in prompts)


def measure(prompts: Sequence[TraceRequest], shares: Sequence[float]) -> dict[str, dict[float, float]]:
    """Return hit ratios by policy, then by the share of the distinct blocks that the cache holds."""
    distinct = len({block for prompt in prompts for block in prompt.blocks})
    table: dict[str, dict[float, float]] = {}
    for share in shares:
        capacity = max(1, int(distinct * share))
        table.setdefault("plain LRU", {})[share] = plain_lru_hits(prompts, capacity)
        for policy in POLICIES:
            table.setdefault(policy, {})[share] = pool_hits(prompts, capacity, policy)
    return table


def run() -> list[dict[str, Any]]:
    """Measure the pool's policies against a plain LRU on the synthetic trace."""
    table = measure(synthetic_trace(), (0.05, 0.10))
    figures = []
    for policy in POLICIES:
        value = table[policy][0.10]
        ratio = value / table["plain LRU"][0.10]
        figures.append(
            figure(
                f"hit_ratio_{policy.lower()}",
                value=value,
                unit="token hit ratio, synthetic trace, cache of 10 % of the blocks",
                ratio=ratio,
                target="≥ 0.9 × a plain LRU",
                ok=ratio >= 0.9,
                ratio_to="a plain LRU of blocks",
                at_5_percent=table[policy][0.05],
            )
        )
    return figures


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines; a synthetic trace without it")
    parser.add_argument(
        "--shares",
        type=lambda text: [float(part) / 100 for part in text.split(",")],
        default=list(SHARES),
        help="cache sizes in percent of the distinct blocks (2,5,10,20)",
    )
    arguments = parser.parse_args()
    prompts = read_trace(arguments.trace) if arguments.trace else synthetic_trace()
    references = sum(len(prompt.blocks) for prompt in prompts)
    distinct = len({block for prompt in prompts for block in prompt.blocks})
    print(f"{len(prompts)} prompts, {references} references to {distinct} blocks")
    started = time.monotonic()
    table = measure(prompts, arguments.shares)
    print("cache".ljust(12), *(f"{share:7.0%}" for share in arguments.shares))
    for policy, row in table.items():
        print(policy.ljust(12), *(f"{row[share]:7.3f}" for share in arguments.shares))
    print(f"{time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
