"""`prewarm_disk`, `prewarm_mooncake`: what it costs to load a prefix before its requests come, and what it saves.

Real vLLM on the CPU, 160 M parameters, without a prefix cache of its own, answers requests that begin with the same
prefix and end differently, eight at a time.  Three conditions, three times each, in turns:

    computed    no connector: each request computes the prefix (measured beside the first tier)
    user path   L1 is empty, the tier has the prefix: the first requests load it
    prewarmed   the same, and a prewarm loads the prefix before the first request

The cost of N requests is the sum of the first N times to the answer's only token, and the seconds of the prewarm.  The
figure is the break-even N: the least number of requests after which the prewarm costs less than computing.  `ratio` is
its cost at the last N against computing.  Before that, `kvstrata prewarm --engine` fills the tier.

`prewarm_beside`: the 99th percentile of users' lookups that load from a disk tier while prewarms run, against the same
without them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import (
    clear_l1,
    figure,
    median_spread,
    percentile,
    scratch,
    sized,
    wait_until,
)
from benchmarks.vllm_hit_ttft import MODEL, prompt, ready
from kvstrata.cli.table import table
from tests.harness import vllm_model
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient, chain_of
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_api import VllmApi
from tests.tools import remotes

CHUNK = 256
PREFIX, QUESTION = sized((4 * CHUNK, 32), (2 * CHUNK, 16))
REQUESTS, AT_ONCE, REPEATS = sized((32, 8, 3), (4, 2, 1))
COUNTS = [n for n in (1, 2, 4, 8, 16, 32) if n <= REQUESTS]
BREAK_EVEN, AMORTISED = 4, 0.9
FLAGS = ("--no-enable-prefix-caching", "--dtype", "float32")
EXTRA = {
    "kvstrata.lookup_timeout_ms": 30_000,
    "kvstrata.save_unfull_chunk": False,
    "kvstrata.store": "commit",
}
CONDITIONS = ("computed", "user path", "prewarmed")


def asked(engine: VllmApi, prefix: list[int], seed: int, requests: int = REQUESTS) -> list[float]:
    """Return the seconds of each request, in the order in which they were sent."""

    def one(number: int) -> float:
        tokens = [*prefix, *prompt(1_000 * seed + number, QUESTION)]
        begun_s = time.perf_counter()
        engine.complete(tokens, max_tokens=1)
        return time.perf_counter() - begun_s

    with ThreadPoolExecutor(AT_ONCE) as users:
        return list(users.map(one, range(requests)))


def prewarmed(server: ServerProcess, folder: Path) -> dict[str, Any]:
    """Run `kvstrata prewarm` on the prefix; return its report."""
    command = [
        Path(sys.executable).with_name("kvstrata"),
        "prewarm",
        folder / "prefix.json",
        "--url",
        server.url,
    ]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    if report["reason"]:
        raise RuntimeError(f"the prewarm ended early: {report}")
    return report


def stored(server: ServerProcess) -> int:
    """Return how many records the only tier was given."""
    [adapter] = server.get("/v1/status")["l2_store"]["adapters"].values()
    return int(adapter["outcomes"].get("stored", 0)) + int(adapter["outcomes"].get("exists", 0))


def through(
    tier: str,
    engine: VllmApi,
    plain: VllmApi,
    server: ServerProcess,
    folder: Path,
    computed: list[list[float]],
) -> dict[str, Any]:
    """Measure the conditions with one tier; return the seconds of each repeat, and the reports of the prewarms.

    `computed`: what was measured without a connector; filled if it is empty.
    """
    prefix = json.loads((folder / "prefix.json").read_text())
    engine.complete(prefix, max_tokens=1)
    n_chunks = PREFIX // CHUNK
    wait_until(lambda: stored(server) >= n_chunks, f"{tier} has the prefix")
    seconds: dict[str, list[list[float]]] = {"computed": computed, "user path": [], "prewarmed": []}
    reports = []
    for engine_of in (plain, engine):
        asked(engine_of, prefix, 1, AT_ONCE)
    for repeat in range(REPEATS):
        seed = 10 * (repeat + 1)
        if len(computed) <= repeat:
            computed.append(asked(plain, prefix, seed))
        clear_l1(server)
        seconds["user path"].append(asked(engine, prefix, seed + 1))
        clear_l1(server)
        report = prewarmed(server, folder)
        seconds["prewarmed"].append(asked(engine, prefix, seed + 2))
        reports.append(server.get(f"/v1/prewarm/{report['job']}"))
        if reports[-1]["l2_chunks"] != n_chunks:
            raise RuntimeError(f"{tier}: not all was loaded before the requests: {reports[-1]}")
    return {"seconds": seconds, "reports": reports}


def cost(found: dict[str, Any], condition: str, n: int) -> float:
    """Return the seconds that each of the first N requests costs, the median of the repeats."""
    spent = [report["seconds"] if condition == "prewarmed" else 0.0 for report in found["reports"]]
    seconds = found["seconds"][condition]
    return median_spread([(own_s + sum(one[:n])) / n for own_s, one in zip(spent, seconds, strict=True)])[0]


def figures(tier: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print the table; return the figure."""
    rows = [{"requests": n} | {c: f"{1e3 * cost(found, c, n):.1f} ms" for c in CONDITIONS} for n in COUNTS]
    p95_s = {
        c: median_spread([percentile(sorted(one), 0.95) for one in found["seconds"][c]])[0]
        for c in CONDITIONS
    }
    print(table([*rows, {"requests": "p95"} | {c: f"{1e3 * p95_s[c]:.1f} ms" for c in CONDITIONS}]))
    paid = (n for n in range(1, REQUESTS + 1) if cost(found, "prewarmed", n) <= cost(found, "computed", n))
    break_even, last = next(paid, REQUESTS + 1), COUNTS[-1]
    ratio = cost(found, "prewarmed", last) / cost(found, "computed", last)
    return figure(
        f"prewarm_{tier}",
        value=break_even,
        unit="requests",
        ratio=ratio,
        target=f"break-even ≤ {BREAK_EVEN}, cost at {last} requests ≤ {AMORTISED} × computed",
        ok=break_even <= BREAK_EVEN and ratio <= AMORTISED,
        ratio_to=f"computing, at {last} requests",
        ratio_user_path=cost(found, "user path", last) / cost(found, "computed", last),
        seconds={c: {n: cost(found, c, n) for n in COUNTS} for c in CONDITIONS},
        p95_s=p95_s,
        prewarm_s=median_spread([report["seconds"] for report in found["reports"]])[0],
        reports=found["reports"],
    )


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    model, made = vllm_model.ensure_model(MODEL), []
    computed: list[list[float]] = []
    with scratch("prewarm") as folder, VllmApi(model, folder / "plain", extra=None, flags=FLAGS) as plain:
        (folder / "prefix.json").write_text(json.dumps(prompt(1, PREFIX)))
        for name in ("disk", "mooncake"):
            with contextlib.ExitStack() as stack:
                entry: dict[str, Any] = {"type": "disk", "base_path": str(folder / "l2"), "capacity_gb": 1}
                environment = {"KVSTRATA_L2_LOAD": "always"}
                if name != "disk":
                    entry, more, _ = stack.enter_context(remotes.tier(name, folder))
                    environment |= more
                server = ServerProcess(
                    folder / name, l1_mb=512, l2="embedded", flags=("--l2-adapter", json.dumps(entry)),
                    chunk_tokens=CHUNK, environment={**os.environ, **environment},
                )  # fmt: skip
                stack.enter_context(server).start()
                extra = server.connector_config(**EXTRA)
                engine = stack.enter_context(
                    VllmApi(model, folder / f"vllm-{name}", extra=extra, flags=FLAGS)
                )
                made.append(figures(name, through(name, engine, plain, server, folder, computed)))
    return made


PAUSE_S = sized(0.1, 0.01)
"""Between two lookups, in which a prewarm gets its turn."""
ROUNDS, LOOKUPS, USER_CHUNKS, PREWARM_CHUNKS = sized((50, 8, 32, 4_000), (2, 2, 4, 40))


def run_prewarm_beside() -> list[dict[str, Any]]:
    """Measure the figure."""
    times: dict[bool, list[float]] = {False: [], True: []}
    loaded = []
    with scratch("beside") as folder:
        flags = (
            "--l2-adapter",
            json.dumps({"type": "disk", "base_path": str(folder / "l2"), "capacity_gb": 1}),
        )
        with contextlib.ExitStack() as stack:
            server = ServerProcess(folder, l1_mb=512, l2="embedded", flags=flags, chunk_tokens=CHUNK_TOKENS)
            stack.enter_context(server).start()
            client = stack.enter_context(RpcClient(server.socket_dir))
            identity = client.identify()
            users = [chain_of(identity.root, USER_CHUNKS, 10**6 * (n + 1)) for n in range(LOOKUPS)]
            long = chain_of(identity.root, PREWARM_CHUNKS)
            for chain in (*users, *(long[at : at + 2_048] for at in range(0, len(long), 2_048))):
                client.store(identity, chain)
            wait_until(
                lambda: stored(server) >= PREWARM_CHUNKS + LOOKUPS * USER_CHUNKS, "the disk has all chunks"
            )
            for number in range(2 * ROUNDS):
                beside = bool(number % 2)
                clear_l1(server)
                body = {"tokens": list(range(CHUNK_TOKENS * PREWARM_CHUNKS))}
                report = server.post("/v1/prewarm", body) if beside else {}
                for chain in users:
                    time.sleep(PAUSE_S)
                    begun_s = time.perf_counter()
                    reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
                    times[beside].append(time.perf_counter() - begun_s)
                    client.release([(client.session, reply.seq)])
                    if reply.l2_chunks != USER_CHUNKS:
                        raise RuntimeError(f"a lookup loaded {reply.l2_chunks} of {USER_CHUNKS} chunks")
                if beside:
                    loaded.append(server.get(f"/v1/prewarm/{report['job']}")["keys"])
                    while server.get(f"/v1/prewarm/{report['job']}")["state"] == "running":
                        time.sleep(PAUSE_S)
    shares = {name: percentile(sorted(times[True]), share) / percentile(sorted(times[False]), share)
              for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))}  # fmt: skip
    return [
        figure(
            "prewarm_beside",
            value=1e3 * percentile(sorted(times[True]), 0.99),
            unit="ms",
            ratio=shares["p99"],
            target="≤ 1.05 × without prewarms",
            ok=shares["p99"] <= 1.05,
            ratio_to="the same lookups without prewarms",
            ratios=shares,
            loaded_meanwhile=median_spread(loaded)[0],
        )
    ]
