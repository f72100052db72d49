"""`pd_handover`: from the last step of an engine that prefills to the first token of the one that decodes, on one host.

Two simulated engines (the times of 8 billion parameters on one H100, 16 KiB of KV a token) at one server.  Each prompt
of 8,192 tokens is sent to the decoding engine, which waits for the other's promise, and to the prefilling one with one
token to generate.  The handover is the time between the two answers of one token.  Compared with the time until the
first token when one engine computes the prompt itself, in the same run.
"""

from __future__ import annotations

import concurrent.futures
import random
import time
from typing import Any

from benchmarks.common import figure, percentile, scratch, sized
from benchmarks.sibling_prefills import engine
from kvstrata.cli import asking
from tests.harness.server_process import ServerProcess

TOKENS = 8_192
FLAGS = "--kv-blocks 2000 --max-model-tokens 16384 --kv-token-bytes 16384"
LEARNS, ROUNDS = sized((12, 20), (9, 2))
MOST_S, STEP_S = 0.036, 0.008
"""What is allowed, and a decode step of the simulated engine."""


def ask(url: str, prompt: list[int], **transfer: int) -> tuple[float, int]:
    """When an answer of one token came, and how many tokens were not computed for it."""
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": transfer}
    reply: Any = asking.ask(url, asking.Ask("/v1/completions", body, timeout_s=120))
    return time.perf_counter(), int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def run() -> list[dict[str, Any]]:
    """Measure the figure."""
    draw = random.Random(7)
    handover_s, alone_s, split_s = [], [], []
    with (
        scratch("handover") as folder,
        ServerProcess(folder / "server", l1_mb=4_096).started() as server,
        engine(server, folder / "p.log", FLAGS) as prefilling,
        engine(server, folder / "d.log", FLAGS) as decoding,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        for number in range(LEARNS + ROUNDS):
            prompt = [draw.randrange(10, 30_000) for _ in range(TOKENS)]
            begun_s = time.perf_counter()
            waiting = pool.submit(ask, decoding, prompt, **{"kvstrata.wait_ms": 20_000})
            first_s, _ = ask(prefilling, prompt)
            answered_s, cached = waiting.result()
            if number >= LEARNS:
                assert cached > TOKENS // 2, "the decoding engine has computed the prompt"
                handover_s.append(answered_s - first_s)
                split_s.append(answered_s - begun_s)
                alone_s.append(first_s - begun_s)
        ends = server.get("/v1/status")["promises"]["waits"]
    median_s, ratio = percentile(handover_s, 0.5), percentile(split_s, 0.5) / percentile(alone_s, 0.5)
    return [
        figure(
            "pd_handover", value=1000 * median_s, unit="ms", ratio=ratio,
            ratio_to=f"the time to the first token of one engine ({1000 * percentile(alone_s, 0.5):.0f} ms)",
            target=f"<= {1000 * (MOST_S + STEP_S):.0f}", ok=median_s <= MOST_S + STEP_S,
            p90_ms=1000 * percentile(handover_s, 0.9), ends=ends,
        )
    ]  # fmt: skip
