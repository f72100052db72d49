"""`serve_tiers`: questions about long documents with no cache, with L1, and with a remote tier behind an empty L1.

Real vLLM on the CPU runs as an API server; `kvstrata bench serve long-doc-qa` asks one request at a time.  vLLM's own
prefix cache is off, as if it could not hold the documents.  The first round computes all documents, the second round
asks about them again.  For a remote tier L1 is cleared between the rounds, so all KV comes from the tier.

Sketch: a document has 32 MiB of KV, which take 20 ms from Mooncake at 1.6 GB/s and 3 ms more into the engine's blocks;
then the 32 tokens of a question are computed.  A document that is computed takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import clear_l1, figure, fill_tier, scratch, sized
from benchmarks.vllm_hit_ttft import CHUNK_TOKENS, MODEL, ready
from kvstrata.cli import asking
from kvstrata.cli.table import table
from tests.harness import mooncake, vllm_model
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
    sources = found["sources"]
    chunks = {tier: sources.get(f"{tier} chunks", 0) * CHUNK_TOKENS for tier in ("L1", "L2")}
    return {
        "second round": case,
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
        ratio = found["ttft_ms"]["median"] / cold_ms
        whole = not tier or found["sources"][f"{tier} chunks"] == CHUNKS
        figures.append(
            figure(
                f"serve_tiers_{case}",
                value=found["ttft_ms"]["median"],
                unit="ms",
                ratio=ratio,
                ratio_to=f"no connector, {cold_ms:.0f} ms",
                target=f"all {CHUNKS} chunks from {tier}, ≤ {TARGET} × computed" if tier else "reported",
                ok=whole and (not tier or ratio <= TARGET),
                spread=(min(found["ttfts_ms"]), max(found["ttfts_ms"])),
                mean_ms=found["ttft_ms"]["mean"],
                p99_ms=found["ttft_ms"]["p99"],
                round_s=found["duration_s"],
                sources=found["sources"],
            )
        )
    return figures
