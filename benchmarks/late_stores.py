"""`late_stores`: what an L1 as large as vLLM's own cache adds to it, when chunks are stored at once and when late.

Real vLLM on the CPU, 19 M parameters, with 1,000 blocks of 32 tokens and steps of 256 tokens, answers sessions of
agents, scaled down: each prompt continues the last one of its session, most by little, and pauses are log-normal.
`BENCH_TRACE` names a file of recorded sessions instead (a JSON object a line: `s` session, `t` second, `r` runs of
chunks of 256 tokens).  Three engines answer the same prompts: without the connector, storing at once, storing late.

The figure is the share of the prompts' tokens that hit, less the share that hit without the connector.  Beside it: the
bytes that were copied, and the 99th percentile of full steps: the CPU time of vLLM's thread and what it waits for
copies, since other work on the machine makes any step slow."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import figure, scratch, sized
from benchmarks.vllm_hit_ttft import SMALL_MODEL, ready, wait_attached
from kvstrata.measure.figures import percentile
from tests.harness import vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess

TARGET = 0.20
SEED = 36
BLOCK, BLOCKS, CHUNK, STEP = 32, 1_000, 64, 256
L1_MB = 64
"""2 KiB a token in bfloat16, as in vLLM's cache."""
SESSIONS = 40
"""Sessions that are open at a time; vLLM's cache holds some eight of them."""
REQUESTS = sized(300, 20)
SCALE = 32
"""A token here stands for so many."""
MAX_TOKENS = 7_000
ANSWER = 4
OPTIONS = {
    "max_model_len": 8_192,
    "num_gpu_blocks_override": BLOCKS,
    "block_size": BLOCK,
    "max_num_batched_tokens": STEP,
    "max_num_seqs": 8,
}


def drawn() -> Iterator[list[int]]:
    """Prompts of sessions that are open at the same time, in the order of their arrival."""
    draw = random.Random(SEED)
    heads = [tokens_of(draw.randrange(1 << 30), 350) for _ in range(3)]

    def session(tokens: int) -> list[int]:
        return [*draw.choice(heads), *tokens_of(draw.randrange(1 << 30), tokens)]

    open_sessions = [(draw.expovariate(1 / 60), session(draw.randrange(200, 6_000))) for _ in range(SESSIONS)]
    while True:
        at = min(range(SESSIONS), key=lambda n: open_sessions[n][0])
        now_s, prompt = open_sessions[at]
        more = min(800, int(draw.lognormvariate(3.8, 1.2)) + 1)
        prompt = [*prompt, *tokens_of(draw.randrange(1 << 30), more)]
        yield prompt
        ended = len(prompt) > MAX_TOKENS - 800 or draw.random() < 0.01
        pause_s = draw.lognormvariate(2.2, 1.0) if draw.random() < 0.9 else draw.lognormvariate(5, 1.2)
        open_sessions[at] = (now_s + pause_s, session(200) if ended else prompt)


def recorded(file: Path) -> Iterator[list[int]]:
    """Prompts of a recorded trace, whose sessions begin at random times so that SESSIONS are open at a time."""
    opened = gzip.open if file.suffix == ".gz" else open
    sessions: dict[int, list[dict[str, Any]]] = {}
    with opened(file, "rt") as lines:
        for line in lines:
            request = json.loads(line)
            sessions.setdefault(request["s"], []).append(request)
    draw = random.Random(SEED)
    span_s = sum(min(28_800, each[-1]["t"]) for each in sessions.values()) / SESSIONS
    arrivals = []
    for number, each in sessions.items():
        begin_s = draw.uniform(0, span_s)
        arrivals += [(begin_s + one["t"], number, at) for at, one in enumerate(each) if one["t"] <= 28_800]
    begin = next(i for i, one in enumerate(sorted(arrivals)) if one[0] > span_s / 2)
    for _, number, at in sorted(arrivals)[begin:]:
        runs = sessions[number][at]["r"]
        chunks = [
            chunk
            for first, count in zip(runs[::2], runs[1::2], strict=True)
            for chunk in range(first, first + count)
        ]
        yield [token for chunk in chunks for token in tokens_of(chunk, 256 // SCALE)][:MAX_TOKENS] or [3]


def tokens_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, vllm_model.VOCABULARY) for _ in range(count)]


def answered(store: str, model: Path, folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Answer the prompts by an engine that stores so, or that has no connector."""
    with ServerProcess(folder / f"server-{store}", l1_mb=L1_MB, chunk_tokens=CHUNK) as server:
        server.start()
        extra = {"kvstrata.store": store, "kvstrata.chunk_size": CHUNK}
        of_server = server.connector_config(**extra) if store else None
        folder /= f"vllm-{store}"
        one_thread = {"OMP_NUM_THREADS": "1"}
        with VllmProcess(model, folder, extra=of_server, options=OPTIONS, environment=one_thread) as vllm:
            if store:
                wait_attached(vllm)
            vllm.generate(tokens_of(1, 20), max_tokens=1)
            vllm.send("replay", prompts=prompts, max_tokens=ANSWER, at_once=3)
            done = vllm.result(timeout_s=1_800)
            stats = vllm.ask("client")["worker"] if store else {}
            waits = vllm.ask("take_calls")["methods"]["handle_preemptions"] if store else {"p99_s": 0.0}
            vllm.quit()
    asked = sum(map(len, prompts))
    full = [(wall_s, cpu_s) for tokens, wall_s, cpu_s in done["steps"] if tokens == STEP]
    wall, cpu = (sorted(seconds) for seconds in zip(*full, strict=True))
    return {
        "hits": sum(done["cached_tokens"]) / asked,
        "chunks": stats.get("store_stored_chunks", 0),
        "wall_ms": 1e3 * percentile(wall, 0.99),
        "cpu_ms": 1e3 * percentile(cpu, 0.99),
        "wait_ms": 1e3 * waits["p99_s"],
        "counts": done["counts"],
    }


def run() -> list[dict[str, Any]]:
    """Measure the figure; without vLLM there is none."""
    if not ready():
        return []
    model = vllm_model.ensure_model(SMALL_MODEL)
    trace = os.environ.get("BENCH_TRACE")
    source = recorded(Path(trace)) if trace else drawn()
    prompts = [next(source) for _ in range(REQUESTS)]
    results: dict[str, dict[str, Any]] = {}
    with scratch("late") as folder:
        for store in ("", "commit", "late"):
            results[store] = one = answered(store, model, folder, prompts)
            print(
                f"   {store or 'no connector':12}: hits {one['hits']:.3f}, {one['chunks']} chunks stored, p99 of full "
                f"steps {one['wall_ms']:.1f} ms, CPU {one['cpu_ms']:.1f} ms, of waits for copies before a step "
                f"{one['wait_ms']:.2f} ms, {one['counts']}",
                flush=True,
            )
    own, commit, late = (results[store] for store in ("", "commit", "late"))
    slower = (late["cpu_ms"] + late["wait_ms"]) / (commit["cpu_ms"] + commit["wait_ms"])
    gain = late["hits"] - own["hits"]
    copied = late["chunks"] / max(1, commit["chunks"])
    return [
        figure(
            "late_stores",
            value=gain,
            unit="of the tokens",
            ratio=copied,
            target=f"hits ≥ {TARGET} beyond vLLM's own, fewer bytes than at once, p99 of full steps ≤ 1.05 ×",
            ok=gain >= TARGET and copied < 1 and slower <= 1.05,
            ratio_to="the bytes that are stored at once",
            own=own["hits"],
            commit_gain=commit["hits"] - own["hits"],
            step_p99_ratio=slower,
            step_wall_p99_ratio=late["wall_ms"] / commit["wall_ms"],
            requests=len(prompts),
        )
    ]
