"""`p2p_ttft`, `p2p_round`: questions about long documents whose KV a peer has.

Real vLLM on the CPU runs as an API server in a cluster (a controller, two instances, each with its own L1), and
`kvstrata bench serve long-doc-qa` asks one request at a time.  vLLM's own prefix cache is off, as if it could not hold
the documents.  An engine of the first instance computes them, and the second instance reads them from the first one's
memory.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import compared, scratch, sized
from benchmarks.vllm_hit_ttft import CHUNK_TOKENS, MODEL, ready
from kvstrata.cli.table import table
from tests.harness import vllm_model
from tests.harness.cluster import Cluster
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_api import VllmApi

DOCUMENTS, TOKENS = sized((4, 6_000), (2, 600))
CHUNKS = DOCUMENTS * (TOKENS // CHUNK_TOKENS)
TTFT_TARGET, ROUND_TARGET = 15.0, 7.0
L1_MB = 640


def asked(
    case: str,
    engine: VllmApi,
    server: ServerProcess | None,
) -> dict[str, Any]:
    """Ask one round of questions, always about the same documents; return the report of `kvstrata bench serve`."""
    command = [
        *(Path(sys.executable).with_name("kvstrata"), "bench", "serve", "long-doc-qa", "--url", engine.url),
        *("--documents", str(DOCUMENTS), "--document-tokens", str(TOKENS), "--rounds", "1"),
        *("--concurrency", "1", "--extra-body", '{"detokenize": false}', "--json"),
        *(("--cache-server", server.url) if server else ()),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    [found] = json.loads(done.stdout)["rounds"]
    if found["failed"]:
        raise RuntimeError(f"{case}: {found['errors']}")
    return dict(found)


def row_of(case: str, found: dict[str, Any]) -> dict[str, str]:
    """Return a line of the table."""
    chunks = {tier: found["sources"].get(f"{tier} chunks", 0) * CHUNK_TOKENS for tier in ("L1", "L2")}
    return {
        "round": case,
        **{f"TTFT {word}, ms": f"{found['ttft_ms'][word]:.0f}" for word in ("mean", "median", "p99")},
        "round, s": f"{found['duration_s']:.1f}",
        **{f"tokens from {tier}": str(tokens) for tier, tokens in chunks.items()},
        "computed": str(found["input_tokens"] - sum(chunks.values())),
    }


def rounds_of(model: Path, folder: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Run the rounds; return their reports, and how many records the second instance read from the first instance."""
    uncached = ("--no-enable-prefix-caching",)
    rounds: dict[str, dict[str, Any]] = {}
    with VllmApi(model, folder / "none", extra=None, flags=uncached) as engine:
        for number in (1, 2):
            rounds[f"computed, round {number}"] = asked(f"p2p-none-{number}", engine, None)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(folder / "cluster", l1_mb=L1_MB))
        for number, server in enumerate(cluster.servers):
            extra = server.connector_config(**{"kvstrata.lookup_timeout_ms": 30_000})
            with VllmApi(model, folder / f"vllm-{number}", extra=extra, flags=uncached) as engine:
                name = f"instance {number + 1}, round {number + 1}"
                rounds[name] = asked(f"p2p-{number}", engine, server)
            cluster.until_known(number)
        return rounds, cluster.peer_records(1)


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    with scratch("p2p") as folder:
        rounds, read_records = rounds_of(vllm_model.ensure_model(MODEL), folder)
    print(table([row_of(case, found) for case, found in rounds.items()]), flush=True)
    computed, read = rounds["computed, round 2"], rounds["instance 2, round 2"]
    ttft_ms, computed_ms = read["ttft_ms"]["median"], computed["ttft_ms"]["median"]
    whole = read_records > 0 and read["sources"].get("L2 chunks") == CHUNKS  # its only tier is the peer
    common = {
        "rounds": {
            case: found["ttft_ms"] | {"round_s": found["duration_s"]} for case, found in rounds.items()
        }
    }
    return [
        compared(
            "p2p_ttft",
            ttft_ms,
            "ms",
            f"computed; all {CHUNKS} chunks come from the peer",
            computed_ms,
            inverse=True,
            least=TTFT_TARGET,
            ok=whole,
            ttfts_ms=(min(read["ttfts_ms"]), max(read["ttfts_ms"])),
            **common,
        ),
        compared(
            "p2p_round",
            read["duration_s"],
            "s",
            f"computed; all {CHUNKS} chunks come from the peer",
            computed["duration_s"],
            inverse=True,
            least=ROUND_TARGET,
            ok=whole,
            **common,
        ),
    ]
