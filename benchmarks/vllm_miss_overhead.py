"""`vllm_miss_overhead`: the time that the connector adds to a prompt that is not cached, by its lookup and its store.

Real vLLM on the CPU, 160 M parameters, gets prompts of 6,000 tokens, each new.  Two processes stay warm, one with the
connector and a server, one without.  Both compute the same prompt, one after the other, in alternating order.  The
figure is the paired ratio of wall clock times with its 95 % interval.  `vllm_miss_cpu` is the share of a request's time
that the connector's methods take as CPU time in vLLM's step thread.

Sketch: 96 MB are gathered during the computation (10 ms of one core), and 23 hashes computed.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from benchmarks.common import figure, scratch, sized
from benchmarks.vllm_hit_ttft import CHUNK_TOKENS, MODEL, prompt, ready
from tests.harness import vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess

TARGET = 1.03
CPU_TARGET = 0.01
PAIRS = sized(20, 2)
STUDENT_T = 2.093
"""The 97.5 % quantile of Student's t-distribution for PAIRS - 1 degrees of freedom."""
WARM_UPS = 2
PROMPT_TOKENS = sized(6_000, 600)
NEW_TOKENS = 8
SETTLE_S = 0.2
"""Pause between two prompts, so that the stores of one do not run into the time of the other."""


def run() -> list[dict[str, Any]]:
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
    ratio, share = math.exp(mean), statistics.median(cpu_shares)
    return [
        figure(
            "vllm_miss_overhead",
            value=ratio,
            unit="×",
            ratio=ratio,
            target=f"lower end of the 95 % interval ≤ {TARGET}",
            ok=interval[0] <= TARGET,
            spread=interval,
            ratio_to=f"vLLM without a connector, median {statistics.median(times['without']):.2f} s",
            median_ratio=math.exp(statistics.median(logs)),
            pairs=PAIRS,
            with_s=statistics.median(times["with"]),
        ),
        figure(
            "vllm_miss_cpu",
            value=share * 100,
            unit="% of the request",
            ratio=share,
            target=f"≤ {CPU_TARGET:.0%}",
            ok=share <= CPU_TARGET,
            spread=[min(cpu_shares) * 100, max(cpu_shares) * 100],
            ratio_to="the request's wall clock time",
        ),
    ]
