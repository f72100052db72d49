"""`repair_rate`: how fast hot prefixes are copied to further instances, and what these instances' users notice.

Three servers; the first one's engine computes prefixes that are wanted everywhere, engines at the others look up and
load prompts of their own all the time.  After a death the same is done (tests/integration/controller/test_copies.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from benchmarks.common import figure, percentile, scratch, sized, wait_until
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, prompt
from tests.harness.cluster import Cluster

PREFIXES, CHUNKS, BLOCK_BYTES, MB_S = sized((6, 60, 512 << 10, 100), (1, 8, 4_096, 1))
LEAST, MOST = 0.8, 1.1


def run() -> list[dict[str, Any]]:
    """Measure the figure."""
    flags, hot = ("--copies-mb-s", str(MB_S)), [prompt(CHUNKS, seed) for seed in range(PREFIXES)]
    ends, took = threading.Event(), list[tuple[float, float]]()

    def uses(engine: CacheEngine, tokens: list[int]) -> None:
        while not ends.is_set():
            begun_s = time.time()
            result = engine.looked_up(tokens)
            assert result.lease is not None
            items = engine.items(tokens, result)
            engine.client.load(engine.identity(), result.lease, items, engine.blocks.plan, sync=True).wait(60)
            took.append((begun_s, time.time() - begun_s))

    with scratch("repair") as folder, contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(
                folder, l1_mb=sized(1_536, 64), n_servers=3, chunk_tokens=CHUNK_TOKENS, controller_flags=flags
            )
        )
        engines = [
            stack.enter_context(CacheEngine(server.socket_dir, block_bytes=BLOCK_BYTES)).connect()
            for server in cluster.servers
        ]
        engines[0].client.prompt_tokens_s = 1.0  # so slow that what it computes is wanted everywhere
        for tokens in hot:
            engines[0].stored(tokens)
        users = [threading.Thread(target=uses, args=(engine, prompt(2, 100 + number)))
                 for number, engine in enumerate(engines[1:]) if engine.stored(prompt(2, 100 + number))]  # fmt: skip
        for user in users:
            user.start()

        def copies() -> list[dict[str, Any]]:
            for tokens in hot:
                engines[0].looked_up(tokens)
            time.sleep(0.5)
            events = cluster.controller.ask("/v1/events?limit=1000")["events"]
            return [one for one in events if one["kind"] == "copied"]

        try:
            time.sleep(sized(10, 0))
            wait_until(lambda: len(copies()) >= 2 * PREFIXES, "everybody has them", 120)
            found = copies()
            copied_bytes = cluster.controller.ask("/v1/plan")["copies"]["copied_bytes"]
        finally:
            ends.set()
            for user in users:
                user.join()
    spans = [(one["unix_ms"] / 1000 - one["facts"]["took_s"], one["unix_ms"] / 1000) for one in found]
    beside = [s for at, s in took if any(begun <= at <= end for begun, end in spans)]
    quiet = [s for at, s in took if at < min(begun for begun, _ in spans)]
    share = copied_bytes / sum(end - begun for begun, end in spans) / (MB_S << 20)
    slower = percentile(beside, 99) / percentile(quiet, 99)
    return [
        figure("repair_rate", value=share, unit="of the allowed bytes a second", ratio=slower,
               ratio_to=f"users' p99 without copies ({1000 * percentile(quiet, 99):.2f} ms)",
               target=f">= {LEAST}; p99 <= {MOST} x", ok=share >= LEAST and slower <= MOST)
    ]  # fmt: skip
