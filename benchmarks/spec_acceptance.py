"""`spec_acceptance_eagle`, `spec_acceptance_ngram`: accepted draft tokens after a hit of ours, against a cold prompt.

Real vLLM on the CPU, float32, with a small model and an EAGLE draft that imitates it (`vllm_model.drafted_model`), or
with n-grams, and then with vLLM's dummy weights, whose answers repeat themselves.  Prompts are drawn by a seed
(`BENCH_SEED`, drawn and printed if not set).  Three engines answer each:

- `cold`, `own`: an engine without kvstrata, first cold and then from vLLM's own prefix cache,
- `stored`, `ours`: an engine that computes and stores the prompt, and another process that hits it in L1.

Then come branches: each begins with all whole chunks of a prompt, and goes on with another token right behind them.
They are answered by the engine without kvstrata (`branch_cold`), by the second process (`branch`), and by the first,
from what the second has stored (`branch_again`).

The value is the share of draft tokens that were accepted in `ours` and both branches, the ratio is that to the share of
the cold prompts.  All answers must have the same tokens as the cold ones.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

from benchmarks.common import figure, scratch, sized, wait_until
from benchmarks.vllm_hit_ttft import SEED, forgotten, ready, stored, wait_attached
from tests.harness import vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess

CHUNK_TOKENS, BLOCK_TOKENS = 64, 32
"""So small that each position of a prompt weighs in what the draft proposes."""
PROMPTS = sized(40, 4)
METHODS = sized(("eagle", "ngram"), ("eagle",))
"""vLLM compiles its search for n-grams when an engine starts, which takes longer than all else."""
ANSWER_TOKENS = 32
DRAFT_TOKENS = 3
TARGET = 0.99
COLD_OF = {
    "own": "cold",
    "stored": "cold",
    "ours": "cold",
    "branch": "branch_cold",
    "branch_again": "branch_cold",
}
"""Each way with a cache, and the way of the same prompts without any."""
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 1_024,
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": 640,
    "disable_log_stats": False,
}


class Way:
    """What one way of answering the prompts gave."""

    def __init__(self) -> None:
        self.answers: list[list[int]] = []
        self.hit_tokens: list[int] = []
        self.drafted = self.accepted = 0

    def add(self, vllm: VllmProcess, prompt: list[int]) -> None:
        """Answer one prompt, and count its draft tokens."""
        vllm.ask("drafts")
        answer = vllm.generate(prompt, max_tokens=ANSWER_TOKENS)
        counts = vllm.ask("drafts")
        self.answers.append(answer["tokens"])
        self.hit_tokens.append(answer["cached_tokens"])
        self.drafted += counts["draft_tokens"]
        self.accepted += counts["accepted_tokens"]

    @property
    def acceptance(self) -> float:
        """Accepted draft tokens of all."""
        return self.accepted / max(1, self.drafted)


def make_prompts(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of two to six chunks, and for each the branch that leaves it behind its last whole chunk."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(10, vllm_model.VOCABULARY) for _ in range(count)]

    prompts, branches = [], []
    for _ in range(PROMPTS):
        # One token behind a whole block: vLLM pads it with placeholders, and counts these as drafted.
        chunks, rest = draw.randrange(2, 6), draw.randrange(2, BLOCK_TOKENS) + draw.choice((0, BLOCK_TOKENS))
        shared = tokens(chunks * CHUNK_TOKENS)
        prompts.append(shared + tokens(rest))
        branches.append(shared + tokens(rest))
    return prompts, branches


def measure(folder: Path, model: Path, options: dict[str, Any], seed: int) -> dict[str, Way]:
    """Answer all prompts in all ways; the ways by name."""
    prompts, branches = make_prompts(seed)
    ways = {name: Way() for name in (*COLD_OF, *COLD_OF.values())}

    def answer(way: str, vllm: VllmProcess, asked: list[list[int]]) -> None:
        for prompt in asked:
            ways[way].add(vllm, prompt)
        if vllm is not plain:
            wait_until(lambda: stored(vllm), "storing the prompts")
        if way != "cold":
            wait_until(lambda: forgotten(vllm), "emptying vLLM's cache")

    with VllmProcess(model, folder / "plain", extra=None, options=options) as plain:
        for way, asked in (("cold", prompts), ("own", prompts), ("branch_cold", branches)):
            answer(way, plain, asked)
        plain.quit()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(folder / "server", l1_mb=192, chunk_tokens=CHUNK_TOKENS))
        server.start()
        first, second = (
            stack.enter_context(
                VllmProcess(
                    model,
                    folder / name,
                    extra=server.connector_config(**{"kvstrata.chunk_size": CHUNK_TOKENS}),
                    options=options,
                )
            )
            for name in ("first", "second")
        )
        for vllm in (first, second):
            wait_attached(vllm)
            vllm.generate([5, 6, 7])  # the first request waits for the workers' report of their weights
        answer("stored", first, prompts)
        answer("ours", second, prompts)
        answer("branch", second, branches)
        answer("branch_again", first, branches)
        first.quit()
        second.quit()
    return ways


def figure_of(name: str, ways: dict[str, Way], seed: int) -> dict[str, Any]:
    """The figure of one kind of drafts. Raises RuntimeError if an answer has other tokens than the cold one."""
    for way, found in ways.items():
        print(
            f"   {way:12} {found.accepted:5} of {found.drafted:5} accepted, {found.acceptance:.4f}; "
            f"{sum(found.hit_tokens) / len(found.hit_tokens):.1f} tokens of a prompt hit",
            flush=True,
        )
        if found.answers != ways[COLD_OF.get(way, way)].answers:
            raise RuntimeError(f"{name}: {way} gave other tokens than the cold prompts")
    warm = ("ours", "branch", "branch_again")
    shares = []
    for kind in ([COLD_OF[way] for way in warm], warm):
        drafted = sum(ways[way].drafted for way in kind)
        shares.append(sum(ways[way].accepted for way in kind) / max(1, drafted))
    ratio = shares[1] / shares[0] if shares[0] else 1.0
    return figure(
        name,
        value=shares[1],
        unit="of the draft tokens",
        ratio=ratio,
        ratio_to="the share of cold prompts",
        target=f"≥ {TARGET} × the share of cold prompts",
        ok=ratio >= TARGET,
        seed=seed,
        ways={way: found.acceptance for way, found in ways.items()},
        hit_tokens={way: sum(found.hit_tokens) for way, found in ways.items()},
    )


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    seed = int(os.environ.get(SEED, 0)) or random.randrange(1, 10_000)
    print(f"   seed {seed}", flush=True)
    model = vllm_model.ensure_model(vllm_model.DRAFTED)
    settings = {
        "eagle": ({"model": str(model / vllm_model.DRAFT)}, {}),
        "ngram": ({"prompt_lookup_max": 3}, {"load_format": "dummy"}),
    }
    figures = []
    with scratch("spec-acceptance") as folder:
        for method in METHODS:
            print(f"   {method}", flush=True)
            draft, more = settings[method]
            speculative = {"method": method, "num_speculative_tokens": DRAFT_TOKENS, **draft}
            options = {**OPTIONS, **more, "speculative_config": speculative}
            ways = measure(folder / method, model, options, seed)
            figures.append(figure_of(f"spec_acceptance_{method}", ways, seed))
    return figures
