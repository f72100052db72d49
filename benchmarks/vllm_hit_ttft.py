"""`vllm_hit_ttft`: time to first token of prompts of any length whose KV another process has stored, against vLLM's own
prefix hit.

Real vLLM on the CPU, 19 M parameters, float32, gets 20 prompts whose lengths between 300 and 8,000 tokens are drawn by
a seed (`BENCH_SEED`, drawn and printed if not set).  An engine stores them.  Another process answers each of them
several times as our hit, with its own cache emptied before, and as vLLM's own hit, in turns.  The ratio of a length is
that of its two medians; the figure is the median over the lengths, and names the worst.  An engine without tails
(`save_unfull_chunk` off) does the same.

Sketch: vLLM's time for a prompt in its own cache, and a copy of the prompt's KV.  The floor is that: vLLM's own hit and
a bare memcpy of the hit's bytes, measured in the same turn; nobody who keeps KV outside of vLLM's blocks does better.

The same run counts the records and bytes that a prompt takes with tails (`save_unfull_chunk`) and without them.

`vllm_miss_overhead`: the time that the connector adds to a prompt that is not cached, by its lookup and its store.
Real vLLM, 160 M parameters, gets prompts of 6,000 tokens, each new.  Two processes stay warm, one with the connector
and a server, one without.  Both compute the same prompt, one after the other, in alternating order.  The figure is
the paired ratio of wall clock times with its 95 % interval.  `vllm_miss_cpu` is the share of a request's time that
the connector's methods take as CPU time in vLLM's step thread."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import compared, figure, median_spread, scratch, sized, wait_until
from tests.harness import vllm_env, vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess

TARGET, WORST = 1.10, 1.25
MODEL, CHUNK_TOKENS = sized("160m", "19m"), 256
"""The model of other benchmarks, too."""
SMALL_MODEL = "19m"
LENGTHS, SHORTEST, LONGEST = sized((20, 300, 8_000), (3, 300, 700))
REPEATS = sized(5, 1)
SEED = "BENCH_SEED"
OPTIONS = {"dtype": "float32", "max_model_len": 8_192, "num_gpu_blocks_override": 80}
"""So few blocks that the warm-up uses all of them, as an engine does that has run for a while."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Return random tokens; prompts of different seeds share no prefix."""
    draw = random.Random(seed)
    return [draw.randrange(10, vllm_model.VOCABULARY) for _ in range(tokens)]


def ready() -> bool:
    """Return whether vLLM is installed; if not, print how to get it."""
    if vllm_env.find() is None:
        print("   not run: real vLLM is not installed; `make test-vllm-env` gets it", flush=True)
        return False
    return True


def wait_attached(vllm: VllmProcess) -> None:
    """Wait until both sides of the connector have attached: vLLM does not wait, and earlier prompts are misses."""
    wait_until(
        lambda: all(side["connected"] for side in vllm.ask("client").values()), "attaching to the server"
    )


def stored(vllm: VllmProcess) -> bool:
    """Return whether all stores of an engine have ended."""
    vllm.ask("idle_steps", n=1)
    return not vllm.ask("stores")["in_flight"]


def forgotten(vllm: VllmProcess) -> bool:
    """Empty vLLM's own cache; return whether it is empty."""
    vllm.ask("idle_steps", n=1)
    return bool(vllm.ask("reset_prefix_cache"))


def store_all(
    model: Path, state: Path, server: ServerProcess, prompts: list[list[int]]
) -> tuple[list[list[int]], dict[str, int]]:
    """Compute and store all prompts; return their answers, and what L1 holds: records and bytes, of which tails."""
    answers = []
    with VllmProcess(model, state, extra=server.connector_config(), options=OPTIONS) as vllm:
        wait_attached(vllm)
        for tokens in prompts:
            answers.append(vllm.generate(tokens, max_tokens=4)["tokens"])
        wait_until(lambda: stored(vllm), "storing the prompts")
        vllm.quit()
    pool = server.get("/v1/status")["pool"]
    tails = pool["tails"]
    record_bytes = max(one["extent_bytes"] for one in pool["classes"])
    chunks = pool["entries"]["ready"] - tails["entries"]
    return answers, {
        "record_bytes": record_bytes,
        "records": pool["entries"]["ready"],
        "tails": tails["entries"],
        "chunk_bytes": chunks * record_bytes,
        "tail_bytes": tails["record_bytes"],
        "tail_extent_bytes": tails["extent_bytes"],
    }


class Hits(NamedTuple):
    """Medians of a prompt in one engine, in seconds to the first token, and the tokens that our hit had."""

    tokens: int
    hit_tokens: int
    hit_s: float
    own_s: float
    copy_s: float
    """A bare copy of the hit's bytes."""

    @property
    def ratio(self) -> float:
        """Our hit against vLLM's own."""
        return self.hit_s / self.own_s

    @property
    def floor(self) -> float:
        """A hit that costs nothing but its copy, against vLLM's own."""
        return (self.own_s + self.copy_s) / self.own_s


class Memory:
    """Buffers of one prompt's size at most, for bare copies."""

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._source = memoryview(bytearray(b"\1") * (LONGEST * token_bytes))
        self._target = memoryview(bytearray(len(self._source)))

    def copy_s(self, tokens: int) -> float:
        """Copy the KV of so many tokens; return the seconds."""
        n = tokens * self._token_bytes
        begun_s = time.perf_counter()
        self._target[:n] = self._source[:n]
        return time.perf_counter() - begun_s


def measure(vllm: VllmProcess, memory: Memory, tokens: list[int], answer: list[int], *, tails: bool) -> Hits:
    """Measure our hits of a prompt and vLLM's own, in turns.

    Raises RuntimeError if a hit gives other tokens or, with `tails`, is shorter than vLLM's own.
    """
    ours, own, copies = [], [], []
    hit_tokens = 0
    for _ in range(REPEATS):
        wait_until(lambda: forgotten(vllm), "emptying vLLM's cache")
        hit = vllm.generate(tokens, max_tokens=4)
        again = vllm.generate(tokens, max_tokens=4)
        if tails and hit["cached_tokens"] < again["cached_tokens"]:
            raise RuntimeError(
                f"{len(tokens)} tokens: {hit['cached_tokens']} hit, vLLM's own cache has {again['cached_tokens']}"
            )
        if not hit["tokens"] == again["tokens"] == answer:
            raise RuntimeError(f"{len(tokens)} tokens: a hit gave other tokens than the cold prompt")
        ours.append(hit["ttft_s"])
        own.append(again["ttft_s"])
        hit_tokens = hit["cached_tokens"]
        copies.append(memory.copy_s(hit_tokens))
    medians = (median_spread(seconds)[0] for seconds in (ours, own, copies))
    return Hits(len(tokens), hit_tokens, *medians)


def measure_all(
    model: Path,
    state: Path,
    server: ServerProcess,
    memory: Memory,
    prompts: list[list[int]],
    answers: list[list[int]],
    *,
    tails: bool,
) -> list[Hits]:
    """Measure all prompts in a new engine, which uses tails or does not."""
    more = {} if tails else {"kvstrata.save_unfull_chunk": False}
    rows = []
    with VllmProcess(model, state, extra=server.connector_config(**more), options=OPTIONS) as vllm:
        wait_attached(vllm)
        for number in range(3):
            vllm.generate(prompt(1_000 + number, LONGEST), max_tokens=4)
        for tokens, answer in zip(prompts, answers, strict=True):
            row = measure(vllm, memory, tokens, answer, tails=tails)
            rows.append(row)
            print(
                f"   {row.tokens:5} tokens, {row.hit_tokens:5} hit: {row.hit_s * 1e3:6.1f} ms, own "
                f"{row.own_s * 1e3:6.1f} ms, {row.ratio:.2f} ×, floor {row.floor:.2f} ×"
                f"{'' if tails else ', without tails'}",
                flush=True,
            )
        vllm.quit()
    return rows


def run() -> list[dict[str, Any]]:
    """Measure the figure; without vLLM there is none."""
    if not ready():
        return []
    model = vllm_model.ensure_model(SMALL_MODEL)
    seed = int(os.environ.get(SEED, 0)) or random.randrange(1, 10_000)
    draw = random.Random(seed)
    lengths = sorted(draw.randrange(SHORTEST, LONGEST) for _ in range(LENGTHS))
    print(f"   seed {seed}, lengths {lengths}", flush=True)
    prompts = [prompt(number, length) for number, length in enumerate(lengths)]
    with (
        scratch("ttft") as folder,
        ServerProcess(folder / "server", l1_mb=1_024, chunk_tokens=CHUNK_TOKENS) as server,
    ):
        server.start()
        answers, held = store_all(model, folder / "cold", server, prompts)
        memory = Memory(held["record_bytes"] // CHUNK_TOKENS)
        rows = measure_all(model, folder / "hits", server, memory, prompts, answers, tails=True)
        without = measure_all(model, folder / "without", server, memory, prompts, answers, tails=False)
    ratio, ratio_spread = median_spread([row.ratio for row in rows])
    plain_ratio, plain_spread = median_spread([row.ratio for row in without])
    floor, floor_spread = median_spread([row.floor for row in rows])
    value, spread = median_spread([row.hit_s for row in rows])
    mb = 1e6 * len(lengths)
    return [
        figure(
            "vllm_hit_ttft",
            value=value,
            unit="s",
            ratio=ratio,
            target=f"≤ {TARGET} × vLLM's own prefix hit, worst ≤ {WORST} ×",
            ok=ratio <= TARGET and ratio_spread[1] <= WORST,
            spread=spread,
            ratio_to="vLLM's own prefix hit in the same process",
            ratio_spread=ratio_spread,
            floor_ratio=floor,
            floor_spread=floor_spread,
            seed=seed,
            ratio_without_tails=plain_ratio,
            ratio_spread_without_tails=plain_spread,
            lengths=[row._asdict() for row in rows],
            records_per_prompt=held["records"] / len(lengths),
            records_per_prompt_without_tails=(held["records"] - held["tails"]) / len(lengths),
            mb_per_prompt=(held["chunk_bytes"] + held["tail_bytes"]) / mb,
            mb_per_prompt_in_l1=(held["chunk_bytes"] + held["tail_extent_bytes"]) / mb,
            mb_per_prompt_without_tails=held["chunk_bytes"] / mb,
        )
    ]


MISS_TARGET = 1.03
CPU_TARGET = 0.01
PAIRS = sized(20, 2)
STUDENT_T = 2.093
"""The 97.5 % quantile of Student's t-distribution for PAIRS - 1 degrees of freedom."""
WARM_UPS = 2
PROMPT_TOKENS = sized(6_000, 600)
NEW_TOKENS = 8
SETTLE_S = 0.2
"""Pause between two prompts, so that the stores of one do not run_vllm_miss_overhead into the time of the other."""


def run_vllm_miss_overhead() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    model = vllm_model.ensure_model(MODEL)
    times: dict[str, list[float]] = {"with": [], "without": []}
    cpu_shares: list[float] = []
    with (
        scratch("miss") as folder,
        ServerProcess(folder / "server", l1_mb=1024, chunk_tokens=CHUNK_TOKENS) as server,
    ):
        server.start()
        with (
            VllmProcess(model, folder / "with", extra=server.connector_config()) as with_connector,
            VllmProcess(model, folder / "without", extra=None) as without,
        ):
            sides = {"with": with_connector, "without": without}
            for number in range(-WARM_UPS, PAIRS):
                tokens: dict[str, list[int]] = {}
                for name in ("with", "without") if number % 2 else ("without", "with"):
                    if name == "with":
                        with_connector.ask("take_calls")
                    done = sides[name].generate(prompt(5000 + number, PROMPT_TOKENS), max_tokens=NEW_TOKENS)
                    tokens[name] = done["tokens"]
                    if done["cached_tokens"]:
                        raise RuntimeError(f"{done['cached_tokens']} tokens of a new prompt were cached")
                    if number >= 0:
                        times[name].append(done["wall_s"])
                        if name == "with":
                            cpu_shares.append(with_connector.ask("take_calls")["cpu_s"] / done["wall_s"])
                    time.sleep(SETTLE_S)
                if tokens["with"] != tokens["without"]:
                    raise RuntimeError("the connector changed the tokens")
            stats = with_connector.ask("client")
            with_connector.quit()
            without.quit()
    stored = stats["worker"].get("store_stored_chunks", 0)
    wanted = (PAIRS + WARM_UPS) * (PROMPT_TOKENS // CHUNK_TOKENS)
    if stored != wanted:
        raise RuntimeError(
            f"{stored} of {wanted} chunks were stored, so the time does not include all stores"
        )
    logs = [math.log(a / b) for a, b in zip(times["with"], times["without"], strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(PAIRS)
    interval = [math.exp(mean - STUDENT_T * error), math.exp(mean + STUDENT_T * error)]
    ratio = math.exp(mean)
    return [
        figure(
            "vllm_miss_overhead",
            value=ratio,
            unit="×",
            ratio=ratio,
            target=f"lower end of the 95 % interval ≤ {MISS_TARGET}",
            ok=interval[0] <= MISS_TARGET,
            spread=interval,
            ratio_to=f"vLLM without a connector, median {statistics.median(times['without']):.2f} s",
            median_ratio=math.exp(statistics.median(logs)),
            pairs=PAIRS,
            with_s=statistics.median(times["with"]),
        ),
        compared(
            "vllm_miss_cpu",
            [100 * share for share in cpu_shares],
            "% of the request",
            "the request's wall clock time",
            100.0,
            most=CPU_TARGET,
        ),
    ]
