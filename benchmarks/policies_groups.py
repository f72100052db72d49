"""What eviction costs a model whose KV has windows beside full attention, on the real pool and a drawn trace.

    python -m benchmarks.policies_groups [--trace FILE] [--windows 1,5] [--shares 5,20]

Each block of a prompt has a record of full attention, and the last block that a prompt computes has one of each window,
as vLLM's engines store them: at the end of the prompt, and where it parts from a prompt whose windows are not there.
All records have the same length.  A record is useless if no hit can use it: full attention behind the last window
that is there, or a window without all of the full attention before it.

The other column of hits is the pool's with useless full attention dropped every `DROP_EVERY` requests.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import figure, sized
from benchmarks.policies import EXTENT_BYTES, IDENTITY, POLICIES, empty_pool
from benchmarks.traces import BLOCK_TOKENS, TraceRequest, read_trace, synthetic_trace
from kvstrata.keys.batch import nth

REQUESTS = 6_000
DROP_EVERY = 50


class Outcome(NamedTuple):
    """What a pool served of a trace."""

    hit_ratio: float
    """Share of the tokens."""
    tokens_per_kb: float
    """Tokens of hits for each KB that the pool can hold."""
    useless: float
    """Share of the records that were useless at the end."""


class Hybrid:
    """A pool of `capacity` records, and what is known of the prompts that it has served."""

    def __init__(self, capacity: int, policy: str, windows: int) -> None:
        self.pool = empty_pool(capacity, policy)
        self._slices = range(1 + windows)
        self._spans = (0,) + (1,) * windows
        self._paths: dict[tuple[int, ...], None] = {}
        self._next: collections.defaultdict[int, set[int]] = collections.defaultdict(set)

    def serve(self, prompt: TraceRequest) -> int:
        """Look a prompt up and store what it then computes; returns the blocks of the hit."""
        blocks = prompt.blocks
        self._paths[tuple(blocks)] = None
        for one, following in itertools.pairwise(blocks):
            self._next[one].add(following)
        keys = b"".join(_key(block, number) for block in blocks for number in self._slices)
        ticket, hit, *_ = self.pool.lease(keys, len(self._slices), [0], b"", self._spans)
        if ticket:
            self.pool.release(ticket)
        whole = b"".join(_key(block, 0) for block in blocks)
        there = self.pool.peek(whole)
        self._store(whole[there * 32 :], nth(whole, there - 1) if there else b"")
        for end in sorted({there, len(blocks)} if there > hit else {len(blocks)}):
            for number in self._slices[1:]:
                if not self.pool.peek(_key(blocks[end - 1], number)):
                    self._store(_key(blocks[end - 1], number), b"")
        return hit

    def _store(self, keys: bytes, parent: bytes) -> None:
        if keys:
            ticket, outcomes, _ = self.pool.reserve(keys, parent, EXTENT_BYTES, 0, IDENTITY)
            if ticket:
                done = [i for i, outcome in enumerate(outcomes) if outcome == 0]
                self.pool.commit(ticket, done, check=False)

    def _has(self, block: int) -> bool:
        return bool(self.pool.peek(_key(block, 0)))

    def _has_windows(self, block: int) -> bool:
        return all(self.pool.peek(_key(block, number)) for number in self._slices[1:])

    def drop_useless(self) -> None:
        """Drop the full attention at the ends of prompts whose windows are gone."""
        for path in list(self._paths):
            if not self._has(path[0]):
                del self._paths[path]
                continue
            for block in reversed(path):
                if not self._has(block):
                    continue
                if self._has_windows(block) or any(map(self._has, self._next[block])):
                    break
                self.pool.remove(_key(block, 0))

    def useless(self) -> float:
        """The share of the records that no hit of a prompt so far can use."""
        there: set[tuple[int, int]] = set()
        useful: set[tuple[int, int]] = set()
        for path in self._paths:
            there.update(
                (block, number)
                for block in path
                for number in self._slices
                if self.pool.peek(_key(block, number))
            )
            for end in self._ends(path):
                useful.update((block, 0) for block in path[:end])
                useful.update((path[end - 1], number) for number in self._slices[1:])
        return len(there - useful) / len(there) if there else 0.0

    def _ends(self, path: Sequence[int]) -> Iterator[int]:
        for end, block in enumerate(path, 1):
            if not self._has(block):
                return
            if self._has_windows(block):
                yield end


def _key(block: int, number: int) -> bytes:
    return hashlib.sha256(b"%d/%d" % (block, number)).digest()


def outcome(
    prompts: Sequence[TraceRequest], capacity: int, policy: str, windows: int, *, drop: bool = False
) -> Outcome:
    """Serve a trace from a pool of `capacity` records."""
    hybrid = Hybrid(capacity, policy, windows)
    hit_tokens = 0
    for number, prompt in enumerate(prompts, 1):
        hit_tokens += min(hybrid.serve(prompt) * BLOCK_TOKENS, prompt.tokens)
        if drop and number % DROP_EVERY == 0:
            hybrid.drop_useless()
    useless = hybrid.useless()
    hybrid.pool.close()
    asked = sum(prompt.tokens for prompt in prompts)
    return Outcome(hit_tokens / asked, hit_tokens / (capacity * EXTENT_BYTES / 1024), useless)


def run() -> list[dict[str, Any]]:
    """Measure the policies, and what dropping useless records would change, on the synthetic trace."""
    prompts = synthetic_trace()[: sized(REQUESTS, 1_000)]
    capacity = len({block for prompt in prompts for block in prompt.blocks}) // 20
    figures = []
    for policy in POLICIES:
        kept = outcome(prompts, capacity, policy, windows=5)
        dropped = outcome(prompts, capacity, policy, windows=5, drop=True)
        ratio = kept.hit_ratio / dropped.hit_ratio
        figures.append(
            figure(
                f"hit_ratio_groups_{policy.lower()}",
                value=kept.hit_ratio,
                unit="token hit ratio, five windows beside full attention, records of 5 % of the blocks",
                ratio=ratio,
                target="LRU: ≥ 0.98 × with useless records dropped",
                ok=policy != "LRU" or ratio >= 0.98,
                ratio_to="the same pool, whose useless full attention is dropped",
                useless_share=kept.useless,
                tokens_per_kb=kept.tokens_per_kb,
                tokens_per_kb_dropped=dropped.tokens_per_kb,
            )
        )
    return figures


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines, as for benchmarks.policies")
    parser.add_argument("--windows", default="1,5", help="numbers of windows")
    parser.add_argument("--shares", default="5,20", help="pool sizes in percent of the distinct blocks")
    arguments = parser.parse_args()
    prompts = read_trace(arguments.trace) if arguments.trace else synthetic_trace()[:REQUESTS]
    distinct = len({block for prompt in prompts for block in prompt.blocks})
    print(f"{len(prompts)} prompts of {distinct} blocks")
    print("policy  windows  size   hits  useless  hits if useless are dropped")
    for policy in POLICIES:
        for windows in map(int, arguments.windows.split(",")):
            for percent in map(float, arguments.shares.split(",")):
                capacity = max(1, int(distinct * percent / 100))
                kept = outcome(prompts, capacity, policy, windows)
                dropped = outcome(prompts, capacity, policy, windows, drop=True)
                print(
                    f"{policy:7} {windows:7} {percent:4g} %  {kept.hit_ratio:.3f}  {kept.useless:6.1%}"
                    f"  {dropped.hit_ratio:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
