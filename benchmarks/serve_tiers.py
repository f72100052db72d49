"""`serve_tiers`: questions about long documents with no cache, with L1, and with a remote tier behind an empty L1.

Real vLLM on the CPU runs as an API server; `kvstrata bench serve long-doc-qa` asks one request at a time.  vLLM's own
prefix cache is off, as if it could not hold the documents.  The first round computes all documents, the second round
asks about them again.  For a remote tier L1 is cleared between the rounds, so all KV comes from the tier.

Sketch: a document has 32 MiB of KV, which take 20 ms from Mooncake at 1.6 GB/s and 3 ms more into the engine's blocks;
then the 32 tokens of a question are computed.  A document that is computed takes seconds.

`p2p_ttft`, `p2p_round`: the same of documents of 6,000 tokens in a cluster (a controller, two instances, each with its
own L1): an engine of the first instance computes the KV, and the second instance reads it from the first one's memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import clear_l1, compared, fill_tier, scratch, sized
from benchmarks.vllm_hit_ttft import CHUNK_TOKENS, MODEL, ready
from kvstrata.cli import asking
from kvstrata.cli.table import table
from tests.harness import mooncake, vllm_model
from tests.harness.cluster import Cluster
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_api import VllmApi
from tests.tools import remotes

DOCUMENTS, DOCUMENT_TOKENS = sized((8, 2_048), (2, 512))
CHUNKS = DOCUMENTS * DOCUMENT_TOKENS // CHUNK_TOKENS
L1_MB = 640
REMOTE = ("mooncake", "redis")
TIER_OF = {"l1": "L1", "mooncake": "L2", "redis": "L2"}
TARGET = 0.25


def asked(
    case: str,
    engine: VllmApi,
    server: ServerProcess | None,
    *,
    documents: int = DOCUMENTS,
    tokens: int = DOCUMENT_TOKENS,
) -> dict[str, Any]:
    """Ask one round of questions, always about the same documents; return the report of `kvstrata bench serve`."""
    command = [
        *(Path(sys.executable).with_name("kvstrata"), "bench", "serve", "long-doc-qa", "--url", engine.url),
        *("--documents", str(documents), "--document-tokens", str(tokens), "--rounds", "1"),
        *("--concurrency", "1", "--extra-body", '{"detokenize": false}', "--json"),
        *(("--cache-server", server.url) if server else ()),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    [found] = json.loads(done.stdout)["rounds"]
    if found["failed"]:
        raise RuntimeError(f"{case}: {found['errors']}")
    return dict(found)


def change(server: ServerProcess, adapter: str, action: str) -> None:
    """Pause or resume a tier."""
    asking.ask(server.url, asking.Ask(f"/v1/l2/adapters/{adapter}/{action}", {}, timeout_s=60))


def through(name: str, adapter: str, engine: VllmApi, server: ServerProcess) -> dict[str, Any]:
    """Run both rounds with a remote tier, which is paused otherwise; return the report of the second round."""
    change(server, adapter, "resume")
    fill_tier(server, adapter, lambda: asked(name, engine, server), CHUNKS)
    second = asked(name, engine, server)
    change(server, adapter, "pause")
    clear_l1(server)
    return second


def measured(model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the report of the second round of each case."""
    rounds: dict[str, dict[str, Any]] = {}
    uncached = ("--no-enable-prefix-caching",)
    with VllmApi(model, folder / "none", extra=None, flags=uncached) as engine:
        asked("none", engine, None)
        rounds["none"] = asked("none", engine, None)
    with contextlib.ExitStack() as stack:
        tiers = [stack.enter_context(remotes.tier(name, folder)) for name in REMOTE]
        flags = [word for tier in tiers for word in ("--l2-adapter", json.dumps(tier.entry))]
        environment = {**os.environ, **mooncake.environment()}
        server = ServerProcess(
            folder / "server", l1_mb=L1_MB, l2="embedded", flags=flags, environment=environment
        )
        stack.enter_context(server).start()
        adapters = [f"{tier.entry['type']}-{number}" for number, tier in enumerate(tiers)]
        for adapter in adapters:
            change(server, adapter, "pause")
        engine = VllmApi(model, folder / "vllm", extra=server.connector_config(), flags=uncached)
        stack.enter_context(engine)
        asked("l1", engine, server)
        rounds["l1"] = asked("l1", engine, server)
        clear_l1(server)
        for name, adapter in zip(REMOTE, adapters, strict=True):
            rounds[name] = through(name, adapter, engine, server)
    return rounds


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


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    with scratch("serve-tiers") as folder:
        rounds = measured(vllm_model.ensure_model(MODEL), folder)
    print(table([row_of(case, found) for case, found in rounds.items()]), flush=True)
    cold_ms = rounds["none"]["ttft_ms"]["median"]
    figures = []
    for case, found in rounds.items():
        tier = TIER_OF.get(case, "")
        figures.append(
            compared(
                f"serve_tiers_{case}",
                found["ttft_ms"]["median"],
                "ms",
                f"no connector; all {CHUNKS} chunks come from {tier}" if tier else "no connector",
                cold_ms,
                most=TARGET if tier else None,
                ok=not tier or found["sources"][f"{tier} chunks"] == CHUNKS,
                ttfts_ms=(min(found["ttfts_ms"]), max(found["ttfts_ms"])),
                mean_ms=found["ttft_ms"]["mean"],
                p99_ms=found["ttft_ms"]["p99"],
                round_s=found["duration_s"],
                sources=found["sources"],
            )
        )
    return figures


P2P_DOCUMENTS, P2P_TOKENS = sized((4, 6_000), (2, 600))
P2P_CHUNKS = P2P_DOCUMENTS * (P2P_TOKENS // CHUNK_TOKENS)
TTFT_TARGET, ROUND_TARGET = 6.0, 5.0
SIZES = {"documents": P2P_DOCUMENTS, "tokens": P2P_TOKENS}


def p2p_rounds(model: Path, folder: Path) -> tuple[dict[str, dict[str, Any]], int]:
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


def run_p2p_serve() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    with scratch("p2p-serve") as folder:
        rounds, read_records = p2p_rounds(vllm_model.ensure_model(MODEL), folder)
    print(table([row_of(case, found) for case, found in rounds.items()]), flush=True)
    computed, read = rounds["computed, round 2"], rounds["instance 2, round 2"]
    ttft_ms, computed_ms = read["ttft_ms"]["median"], computed["ttft_ms"]["median"]
    whole = read_records == P2P_CHUNKS
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
            f"computed; all {P2P_CHUNKS} chunks come from the peer",
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
            f"computed; all {P2P_CHUNKS} chunks come from the peer",
            computed["duration_s"],
            inverse=True,
            least=ROUND_TARGET,
            ok=whole,
            **common,
        ),
    ]
