"""`p2p_ttft`, `p2p_round`: a round of questions about long documents on one instance, then a round on another instance.

Real vLLM on the CPU, 160 M parameters, runs as an API server; `kvstrata bench serve long-doc-qa` asks one request at a
time.  vLLM's own prefix cache is off, as if it could not hold the documents.  Each round asks about the same documents
of 6,000 tokens.  In a cluster (a controller, two instances, each with its own L1), an engine of the first instance
computes the KV, and the second instance reads that KV from the first one's memory; without a cache both rounds compute.

Sketch: a document has 96 MB of KV, which take 20 ms over shared memory at 5 GB/s and 5 ms more into the engine's
blocks; then 144 tokens are computed.  A document that is computed takes seconds.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from benchmarks.common import figure, scratch, sized
from benchmarks.serve_tiers import asked
from benchmarks.vllm_hit_ttft import CHUNK_TOKENS, MODEL, ready
from kvstrata.cli.table import table
from tests.harness import vllm_model
from tests.harness.cluster import Cluster
from tests.harness.vllm_api import VllmApi

DOCUMENTS, DOCUMENT_TOKENS = sized((4, 6_000), (2, 600))
CHUNKS = DOCUMENTS * (DOCUMENT_TOKENS // CHUNK_TOKENS)
L1_MB = 640
TTFT_TARGET, ROUND_TARGET = 6.0, 5.0
SIZES = {"documents": DOCUMENTS, "tokens": DOCUMENT_TOKENS}


def measured(model: Path, folder: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Run the rounds; return their reports, and how many records the second instance read from the first instance."""
    uncached = ("--no-enable-prefix-caching",)
    rounds: dict[str, dict[str, Any]] = {}
    with VllmApi(model, folder / "none", extra=None, flags=uncached) as engine:
        for number in (1, 2):
            rounds[f"computed, round {number}"] = asked(f"p2p-none-{number}", engine, None, **SIZES)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(folder / "cluster", l1_mb=L1_MB))
        for number, server in enumerate(cluster.servers):
            extra = server.connector_config(**{"kvstrata.lookup_timeout_ms": 30_000})
            with VllmApi(model, folder / f"vllm-{number}", extra=extra, flags=uncached) as engine:
                name = f"instance {number + 1}, round {number + 1}"
                rounds[name] = asked(f"p2p-{number}", engine, server, **SIZES)
            cluster.until_known(number)
        return rounds, cluster.peer_records(1)


def row_of(case: str, found: dict[str, Any]) -> dict[str, str]:
    """Return a line of the table."""
    return {
        "": case,
        **{f"TTFT {word}, ms": f"{found['ttft_ms'][word]:.0f}" for word in ("mean", "median", "p99")},
        "round, s": f"{found['duration_s']:.1f}",
    }


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    with scratch("p2p-serve") as folder:
        rounds, read_records = measured(vllm_model.ensure_model(MODEL), folder)
    print(table([row_of(case, found) for case, found in rounds.items()]), flush=True)
    computed, read = rounds["computed, round 2"], rounds["instance 2, round 2"]
    ttft_ms, computed_ms = read["ttft_ms"]["median"], computed["ttft_ms"]["median"]
    whole = read_records == CHUNKS
    common = {
        "rounds": {
            case: found["ttft_ms"] | {"round_s": found["duration_s"]} for case, found in rounds.items()
        }
    }
    return [
        figure(
            "p2p_ttft",
            value=ttft_ms,
            unit="ms",
            ratio=computed_ms / ttft_ms,
            ratio_to=f"computed, {computed_ms:.0f} ms",
            target=f"all {CHUNKS} chunks from the peer, ≥ {TTFT_TARGET:g} × as fast as computed",
            ok=whole and computed_ms / ttft_ms >= TTFT_TARGET,
            spread=(min(read["ttfts_ms"]), max(read["ttfts_ms"])),
            **common,
        ),
        figure(
            "p2p_round",
            value=read["duration_s"],
            unit="s",
            ratio=computed["duration_s"] / read["duration_s"],
            ratio_to=f"computed, {computed['duration_s']:.1f} s",
            target=f"all {CHUNKS} chunks from the peer, ≥ {ROUND_TARGET:g} × as fast as computed",
            ok=whole and computed["duration_s"] / read["duration_s"] >= ROUND_TARGET,
            **common,
        ),
    ]
