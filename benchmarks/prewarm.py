"""`prewarm_disk`, `prewarm_mooncake`: what it costs to load a prefix before its requests come, and what it saves.

Real vLLM on the CPU, 160 M parameters, without a prefix cache of its own, answers requests that begin with the same
prefix and end differently, eight at a time.  Three conditions, three times each, in turns:

    computed    no connector: each request computes the prefix
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
    chain_of,
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
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_api import VllmApi
from tests.tools import remotes

CHUNK = 256
PREFIX, QUESTION = sized((8 * CHUNK, 32), (2 * CHUNK, 16))
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


def asked(engine: VllmApi, prefix: list[int], seed: int) -> list[float]:
    """Return the seconds of each request, in the order in which they were sent."""

    def one(number: int) -> float:
        tokens = [*prefix, *prompt(1_000 * seed + number, QUESTION)]
        begun_s = time.perf_counter()
        engine.complete(tokens, max_tokens=1)
        return time.perf_counter() - begun_s

    with ThreadPoolExecutor(AT_ONCE) as users:
        return list(users.map(one, range(REQUESTS)))


def prewarmed(server: ServerProcess, folder: Path, *words: str) -> dict[str, Any]:
    """Run `kvstrata prewarm` on the prefix; return its report."""
    command = [
        Path(sys.executable).with_name("kvstrata"),
        "prewarm",
        folder / "prefix.json",
        "--url",
        server.url,
    ]
    done = subprocess.run([*command, "--json", *words], stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    if report["reason"]:
        raise RuntimeError(f"the prewarm ended early: {report}")
    return report


def through(
    tier: str, engine: VllmApi, plain: VllmApi, server: ServerProcess, folder: Path
) -> dict[str, Any]:
    """Measure the conditions with one tier; return the costs of each repeat, and the reports of the prewarms."""
    prefix = json.loads((folder / "prefix.json").read_text())
    prewarmed(server, folder, "--engine", engine.url, "--budget-s", "600")
    n_chunks = PREFIX // CHUNK

    def put() -> bool:
        [adapter] = server.get("/v1/status")["l2_store"]["adapters"].values()
        return adapter["outcomes"].get("stored", 0) + adapter["outcomes"].get("exists", 0) >= n_chunks

    wait_until(put, f"{tier} has the prefix")
    costs: dict[str, list[list[float]]] = {condition: [] for condition in CONDITIONS}
    reports = []
    for repeat in range(-1, REPEATS):  # the first one warms up
        seed = 10 * (repeat + 2)
        found = {"computed": asked(plain, prefix, seed)}
        clear_l1(server)
        found["user path"] = asked(engine, prefix, seed + 1)
        clear_l1(server)
        report = prewarmed(server, folder)
        found["prewarmed"] = asked(engine, prefix, seed + 2)
        report = server.get(f"/v1/prewarm/{report['job']}")
        if (report["l2_chunks"], report["user_path_loads"]) != (n_chunks, 0):
            raise RuntimeError(f"{tier}: not all was loaded before the requests: {report}")
        if repeat >= 0:
            reports.append(report)
            for condition in CONDITIONS:
                costs[condition].append(found[condition])
    return {"seconds": costs, "reports": reports}


def cost(found: dict[str, Any], condition: str, n: int) -> float:
    """Return the seconds that each of the first N requests costs, the median of the repeats."""
    spent = [report["seconds"] if condition == "prewarmed" else 0.0 for report in found["reports"]]
    seconds = found["seconds"][condition]
    return median_spread([(own_s + sum(one[:n])) / n for own_s, one in zip(spent, seconds, strict=True)])[0]


def figures(tier: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print the table; return the figure."""
    rows = [{"requests": n} | {c: f"{1e3 * cost(found, c, n):.1f} ms" for c in CONDITIONS} for n in COUNTS]
    p95_s = {c: [percentile(sorted(one), 0.95) for one in found["seconds"][c]] for c in CONDITIONS}
    print(
        table(
            [
                *rows,
                {"requests": "p95"} | {c: f"{1e3 * median_spread(p95_s[c])[0]:.1f} ms" for c in CONDITIONS},
            ]
        )
    )
    paid = (n for n in range(1, REQUESTS + 1) if cost(found, "prewarmed", n) <= cost(found, "computed", n))
    break_even, last = next(paid, REQUESTS + 1), COUNTS[-1]
    ratio = cost(found, "prewarmed", last) / cost(found, "computed", last)
    print(f"   {tier}: break-even {break_even}, report {found['reports'][-1]}", flush=True)
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
        p95_s={c: median_spread(p95_s[c])[0] for c in CONDITIONS},
        prewarm_s=median_spread([report["seconds"] for report in found["reports"]])[0],
        reports=found["reports"],
    )


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    model, made = vllm_model.ensure_model(MODEL), []
    with scratch("prewarm") as folder, VllmApi(model, folder / "plain", extra=None, flags=FLAGS) as plain:
        (folder / "prefix.json").write_text(json.dumps(prompt(1, PREFIX)))
        for name in ("disk", "mooncake"):
            with contextlib.ExitStack() as stack:
                entry: dict[str, Any] = {"type": "disk", "base_path": str(folder / "l2"), "capacity_gb": 1}
                environment = dict(os.environ)
                if name != "disk":
                    entry, environment, _ = stack.enter_context(remotes.tier(name, folder))
                server = ServerProcess(
                    folder / name, l1_mb=512, l2="embedded", flags=("--l2-adapter", json.dumps(entry)),
                    chunk_tokens=CHUNK, environment=environment,
                )  # fmt: skip
                stack.enter_context(server).start()
                extra = server.connector_config(**EXTRA)
                engine = stack.enter_context(
                    VllmApi(model, folder / f"vllm-{name}", extra=extra, flags=FLAGS)
                )
                made.append(figures(name, through(name, engine, plain, server, folder)))
    return made


PAUSE_S = sized(0.1, 0.01)
"""Between two lookups, in which a prewarm gets its turn."""
ROUNDS, LOOKUPS, USER_CHUNKS, PREWARM_CHUNKS = sized((50, 8, 32, 4_000), (2, 2, 4, 40))
P99_TARGET = 1.05


def run_prewarm_beside() -> list[dict[str, Any]]:
    """Measure the figure."""
    times: dict[bool, list[float]] = {False: [], True: []}
    loaded = []
    with scratch("beside") as folder:
        entry = {"type": "disk", "base_path": str(folder / "l2"), "capacity_gb": 1}
        flags = ("--l2-adapter", json.dumps(entry))
        with ServerProcess(folder, l1_mb=512, l2="embedded", flags=flags, chunk_tokens=16) as server:
            server.start()
            with RpcClient(server.socket_dir) as client:
                identity = client.identify()
                users = [chain_of(identity.root, number, USER_CHUNKS) for number in range(LOOKUPS)]
                tokens = list(range(7, 7 + 16 * PREWARM_CHUNKS))
                from kvstrata.native.core import chain_keys

                long = chain_keys(identity.root, tokens, 16)
                for chain in (*users, *(long[at : at + 2_048] for at in range(0, len(long), 2_048))):
                    client.store(identity, chain)
                wanted = PREWARM_CHUNKS + LOOKUPS * USER_CHUNKS
                wait_until(
                    lambda: (
                        server.get("/v1/status")["l2_store"]["adapters"]["disk-0"]["outcomes"].get(
                            "stored", 0
                        )
                        >= wanted
                    ),
                    "the disk has all chunks",
                )
                for number in range(2 * ROUNDS):
                    beside = bool(number % 2)
                    clear_l1(server)
                    job = server.post("/v1/prewarm", {"tokens": tokens})["job"] if beside else 0
                    for chain in users:
                        time.sleep(PAUSE_S)
                        begun_s = time.perf_counter()
                        reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
                        times[beside].append(time.perf_counter() - begun_s)
                        client.release([(client.session, reply.seq)])
                        if reply.l2_chunks != USER_CHUNKS:
                            raise RuntimeError(f"a lookup loaded {reply.l2_chunks} of {USER_CHUNKS} chunks")
                    if beside:
                        done = lambda job=job: server.get(f"/v1/prewarm/{job}")["state"] == "done"  # noqa: E731
                        loaded.append(server.get(f"/v1/prewarm/{job}")["keys"])
                        wait_until(done, "the prewarm ends")
    p99 = {beside: percentile(sorted(seconds), 0.99) for beside, seconds in times.items()}
    ratio = p99[True] / p99[False]
    return [
        figure(
            "prewarm_beside",
            value=1e3 * p99[True],
            unit="ms",
            ratio=ratio,
            target=f"≤ {P99_TARGET} × without prewarms",
            ok=ratio <= P99_TARGET,
            ratio_to="the same lookups without prewarms",
            median_ratio=percentile(sorted(times[True]), 0.5) / percentile(sorted(times[False]), 0.5),
            prewarmed_meanwhile=median_spread(loaded)[0],
        )
    ]
