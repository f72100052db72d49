"""`peer_disk_ttft`: a prompt that only another instance's disk has, against one on the own disk, and against computing.

Two servers with disks, and at each a simulated engine (the times of 8 billion parameters on one H100, 4 KiB of KV a
token) with the real connector.  A prompt is computed at one engine, and both L1 are emptied; then it is asked at the
same engine, or at the other one.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from typing import Any

from benchmarks.common import clear_l1, figure, scratch, sized, wait_until
from benchmarks.sibling_prefills import engine, tokens
from kvstrata.cli import asking
from tests.harness.cluster import Cluster

TOKENS, ROUNDS = sized((8_192, 15), (1_024, 1))
MOST = 1.2


def answered_s(url: str, prompt: list[int]) -> float:
    """Seconds until an answer of one token; the engine's own cache is empty."""
    asking.ask(url, asking.Ask("/reset_prefix_cache", {}))
    begun_s = time.perf_counter()
    asking.ask(url, asking.Ask("/v1/completions", {"prompt": prompt, "max_tokens": 1}, timeout_s=120))
    return time.perf_counter() - begun_s


def run() -> list[dict[str, Any]]:
    """Measure the figure."""
    draw, took_s = random.Random(7), {"own": [], "peer": [], "computed": []}  # type: ignore[var-annotated]
    with (
        scratch("disks") as folder,
        Cluster(folder, l1_mb=512, l2="fs") as cluster,
        contextlib.ExitStack() as stack,
    ):
        urls = [
            stack.enter_context(
                engine(server, folder / f"{number}.log", **{"kvstrata.lookup_timeout_ms": 10_000})
            )
            for number, server in enumerate(cluster.servers)
        ]

        def on_disk() -> int:
            row = cluster.member(0)
            return 0 if row is None else sum(n for tier, n in row["keys"].items() if tier != "l1")

        for which in ["own", "peer"] * ROUNDS:
            prompt, before = tokens(draw, TOKENS), on_disk()
            took_s["computed"].append(answered_s(urls[0], prompt))
            wait_until(lambda before=before: on_disk() >= before + TOKENS // 256, "it is on the disk")
            for server in cluster.servers:
                clear_l1(server)
            wait_until(lambda: not cluster.known(0), "the controller knows that L1 is empty")
            took_s[which].append(answered_s(urls[which == "peer"], prompt))
    own_s, peer_s, computed_s = (statistics.median(took_s[which]) for which in ("own", "peer", "computed"))
    most_s = min(computed_s, MOST * own_s)
    return [
        figure(
            "peer_disk_ttft", value=1000 * peer_s, unit="ms", ratio=peer_s / own_s,
            ratio_to=f"the own disk's ({1000 * own_s:.0f} ms; computing {1000 * computed_s:.0f} ms)",
            target=f"<= {MOST} x and <= computing", ok=peer_s <= most_s,
            spread=[1000 * min(took_s["peer"]), 1000 * max(took_s["peer"])],
        )
    ]  # fmt: skip
