"""`vllm_hit_ttft`: time to first token of a prompt whose KV another process has stored, against vLLM's own prefix hit.

Real vLLM on the CPU, 160 M parameters, gets a prompt of 6,000 tokens (98 MB of KV).  Each repeat is a fresh vLLM
process that answers an unrelated warm-up prompt, the prompt (our hit), another warm-up prompt, and the prompt again,
which is then in vLLM's own cache.

Sketch: vLLM's time for a prompt in its own cache (112 tokens computed, one decoded), copies of 96 MB (5 ms where memory
does 20 GB/s), and the first touch of blocks that a fresh process has never used.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.common import figure, median_spread, scratch, sized, wait_until
from tests.harness import vllm_env, vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess

TARGET = 1.15
MODEL, PROMPT_TOKENS, CHUNK_TOKENS = sized(("160m", 6_000, 256), ("19m", 600, 256))
WARM_UP_TOKENS = sized(700, 300)
HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
REPEATS = sized(7, 1)


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
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


def fresh_process(
    model: Path, state: Path, server: ServerProcess, repeat: int
) -> tuple[float, float, list[int]]:
    """Return, from a new process, seconds to first token of our hit and of vLLM's own hit, and the answer's tokens."""
    with VllmProcess(model, state, extra=server.connector_config()) as vllm:
        wait_attached(vllm)
        vllm.generate(prompt(1000 + repeat, WARM_UP_TOKENS), max_tokens=1)
        ours = vllm.generate(prompt(0), max_tokens=4)
        vllm.generate(prompt(2000 + repeat, WARM_UP_TOKENS), max_tokens=1)
        own = vllm.generate(prompt(0), max_tokens=4)
        vllm.quit()
    for name, got in (("ours", ours), ("vLLM's own", own)):
        if got["cached_tokens"] != HIT_TOKENS:
            raise RuntimeError(f"{name}: {got['cached_tokens']} of {HIT_TOKENS} tokens were cached")
    if ours["tokens"] != own["tokens"]:
        raise RuntimeError("our hit and vLLM's own hit gave different tokens")
    return ours["ttft_s"], own["ttft_s"], ours["tokens"]


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    model = vllm_model.ensure_model(MODEL)
    ours, own = [], []
    with (
        scratch("ttft") as folder,
        ServerProcess(folder / "server", l1_mb=512, chunk_tokens=CHUNK_TOKENS) as server,
    ):
        server.start()
        with VllmProcess(model, folder / "cold", extra=server.connector_config()) as vllm:
            wait_attached(vllm)
            vllm.generate(prompt(999, WARM_UP_TOKENS), max_tokens=1)
            cold = vllm.generate(prompt(0), max_tokens=4)
            vllm.quit()
        for repeat in range(REPEATS):
            hit_s, own_s, tokens = fresh_process(model, folder / f"fresh-{repeat}", server, repeat)
            if tokens != cold["tokens"]:
                raise RuntimeError("a hit gave other tokens than the cold prompt")
            ours.append(hit_s)
            own.append(own_s)
    value, spread = median_spread(ours)
    floor, floor_spread = median_spread(own)
    ratio, ratio_spread = median_spread([hit / floor_s for hit, floor_s in zip(ours, own, strict=True)])
    return [
        figure(
            "vllm_hit_ttft",
            value=value,
            unit="s",
            ratio=ratio,
            target=f"≤ {TARGET} × vLLM's own prefix hit",
            ok=ratio <= TARGET,
            spread=spread,
            ratio_to=f"vLLM's own prefix hit in the same process, {floor:.3f} s ({floor_spread[0]:.3f}-"
            f"{floor_spread[1]:.3f})",
            ratio_spread=ratio_spread,
            cold_s=cold["ttft_s"],
            cached_tokens=HIT_TOKENS,
        )
    ]
