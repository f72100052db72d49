"""`groups_peek`, `groups_lookup`: a prompt of 128k tokens (512 chunks) in an engine with three groups, beside one.

One engine has full attention only.  The other one has a group of full attention, one with a window of four chunks and
one with a state: its hits need 512 + 4 + 1 records.  Both have the same prompts in L1, and take turns; each call asks
for another prompt.  `groups_peek` reads the index in shared memory, `groups_lookup` asks the server.

Sketch: the window and the state add five keys to 512, so three groups should cost hardly more than one; what is derived
and looked at beyond those five keys is waste.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.common import (
    chain_of,
    compared,
    median_spread,
    percentile,
    scratch,
    sized,
    store_ended,
    wait_until,
)
from kvstrata.client.pool_view import KEPT_CHAINS
from kvstrata.types import RequestIdentity
from tests.harness.cache_engine import CacheEngine
from tests.harness.server_process import ServerProcess

CHUNKS = 512
SPANS = (0, 4, 1)
PROMPTS = sized(KEPT_CHAINS + 6, 4)
"""More than the client keeps derived keys of."""
ROUNDS = sized(5, 1)
TARGET = 1.3
L1_MB = sized(1600, 160)


class Group(NamedTuple):
    """One group of an engine: its client, and the first chunk of each prompt that it stores."""

    engine: CacheEngine
    first: int


@contextlib.contextmanager
def attached(server: ServerProcess, name: bytes, spans: Sequence[int]) -> Iterator[list[Group]]:
    """An engine with a group for each span."""
    with contextlib.ExitStack() as stack:
        groups = []
        for rank, span in enumerate(spans):
            engine = CacheEngine(
                server.socket_dir,
                rank=rank,
                ranks=len(spans),
                span=span,
                group=name,
                model=name.decode(),
                block_bytes=64,
                num_blocks=8,
                layers=1,
            )
            groups.append(Group(stack.enter_context(engine), CHUNKS - span if span else 0))
        for group in groups:
            group.engine.connect()
        yield groups


def fill(groups: Sequence[Group]) -> list[bytes]:
    """Store what hits of all prompts need; return the prompts' chain keys."""
    identity = groups[0].engine.client.identity(RequestIdentity())
    prompts = [chain_of(identity.root, number, CHUNKS) for number in range(PROMPTS)]
    for engine, first in groups:
        own = engine.client.identity(RequestIdentity())
        for chain in prompts:
            parent = chain[(first - 1) * 32 : first * 32] if first else b""
            rows = [engine.blocks_of(0)] * (CHUNKS - first)
            store = partial(engine.client.store, own, parent, chain[first * 32 :], engine.blocks.plan, rows)
            store_ended(engine.client, store(), store)
    client = groups[0].engine.client
    wait_until(lambda: client.peek(identity, prompts[-1]) == CHUNKS, "all prompts are in L1")
    return prompts


def seconds_of(call: Callable[[bytes], None], prompts: Sequence[bytes]) -> list[float]:
    """The seconds of a call for each prompt."""
    seconds = []
    for chain in prompts:
        began = time.perf_counter()
        call(chain)
        seconds.append(time.perf_counter() - began)
    return seconds


def peek(groups: Sequence[Group]) -> Callable[[bytes], None]:
    """Looks at the index for a prompt whose keys were not derived lately."""
    client = groups[0].engine.client
    identity = client.identity(RequestIdentity())

    def call(chain: bytes) -> None:
        if client.peek(identity, chain) != CHUNKS:
            raise RuntimeError("a prompt is not in L1")

    return call


def lookup(groups: Sequence[Group]) -> Callable[[bytes], None]:
    """Asks the server for a prompt, and gives the lease back."""
    client = groups[0].engine.client
    identity = client.identity(RequestIdentity())

    def call(chain: bytes) -> None:
        asked = client.lookup(identity, chain, request_id="bench", deadline_ms=5_000)
        asked.wait(5)
        if asked.result.n_chunks != CHUNKS:
            raise RuntimeError(f"{asked.result.n_chunks} of {CHUNKS} chunks found: {asked.result.reason}")
        client.release([asked.result.lease], group=True)

    return call


def run() -> list[dict[str, Any]]:
    """Measure both figures."""
    times: dict[tuple[str, str], list[float]] = {}
    environment = {**os.environ, "KVSTRATA_L1_ENTRIES": "200000"}
    with scratch("groups") as folder, ServerProcess(folder, l1_mb=L1_MB, environment=environment) as server:
        server.start()
        with (
            attached(server, b"one group of all", (0,)) as one,
            attached(server, b"three groups one", SPANS) as three,
        ):
            engines = {"one": (one, fill(one)), "three": (three, fill(three))}
            for name, make in (("peek", peek), ("lookup", lookup)):
                for _ in range(ROUNDS):
                    for which, (groups, prompts) in engines.items():
                        found = seconds_of(make(groups), prompts)
                        times.setdefault((name, which), []).append(percentile(found, 0.5) * 1e6)
    return [
        compared(
            f"groups_{name}",
            times[name, "three"],
            "µs",
            "one group",
            median_spread(times[name, "one"])[0],
            most=TARGET,
        )
        for name in ("peek", "lookup")
    ]
