"""`groups_bytes_gemma3`, `groups_bytes_gpt_oss`, `groups_snapshots_qwen3_next`: what is stored of models with groups.

Real vLLM on the CPU with a small model of each family answers prompts and stores them.  Their lengths are drawn by a
seed, which is printed (SEED=… sets it); they share no beginning, and are computed in pieces of 512 tokens.

`groups_bytes_…` compares the bytes that L1 has given for each prompt, headers and padding included, with those that a
hit at its end needs: all whole chunks of full attention, and of each window the blocks of its last tokens.  vLLM's own
`KVCacheConfig` tells the layers, their bytes and the windows.  `all_layers` is what an engine would store that keeps
all tokens of all layers, as vLLM does without its hybrid KV cache manager.

`groups_snapshots_…` counts, for each request, the states that were stored of a group; the figure is the greatest count.

Then come as many branches: prompts that begin as an earlier one, up to a drawn place, and go on in another way.  Where
the two part, a window or a state is stored too, for the next prompt with that beginning.  The target of the states
applies to branches as well.  Their bytes are reported only (`ratio_branches`), against what hits at the ends of all
prompts need, so that each window where two prompts part counts as unneeded.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from benchmarks.common import STORES, figure, median_spread, scratch, sized, wait_until
from benchmarks.vllm_hit_ttft import ready
from tests.harness import vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess

PROMPTS = sized(10, 1)
TOKENS = sized((600, 3_500), (900, 1_200))
"""Shortest and longest prompt."""
L1_MB = sized(768, 128)
OPTIONS = {"max_num_batched_tokens": 512, "max_model_len": 4_096, "num_gpu_blocks_override": 160}
TARGET_BYTES = 1.15
TARGET_SNAPSHOTS = 2


class Served:
    """One family's engine, and what storing each of its prompts took."""

    def __init__(self, family: str, folder: Path, seed: int) -> None:
        draw = random.Random(f"{family} {seed}")

        def tokens(count: int) -> list[int]:
            return [draw.randrange(3, vllm_model.VOCABULARY) for _ in range(count)]

        self.prompts = [tokens(draw.randrange(*TOKENS)) for _ in range(PROMPTS)]
        self.branches = []
        for _ in range(PROMPTS):
            whole = draw.choice(self.prompts)
            length = draw.randrange(*TOKENS)
            shared = draw.randrange(TOKENS[0] // 2, min(length, len(whole)))
            self.branches.append(whole[:shared] + tokens(length - shared))
        self.used_bytes: list[int] = []
        """Bytes of L1 that each prompt has taken; first the prompts, then the branches."""
        self.stored: list[list[int]] = []
        """For each prompt, the chunks that each group has stored."""
        with ServerProcess(folder / f"server-{family}", l1_mb=L1_MB) as server:
            server.start()
            options = {"dtype": vllm_model.dtype_of(family), "enable_prefix_caching": True, **OPTIONS}
            with VllmProcess(
                vllm_model.ensure_model(family),
                folder / f"vllm-{family}",
                extra=server.connector_config(),
                options=options,
            ) as vllm:
                wait_until(lambda: bool(vllm.ask("connected")), "all groups are attached")
                vllm.generate(
                    [5, 6, 7]
                )  # the first request waits for a step in which the worker reports its weights
                self.groups: list[dict[str, Any]] = vllm.ask("kv_groups")
                self.chunk_tokens = int(vllm.ask("chunk_tokens"))
                self._serve(server, vllm)
                vllm.quit()

    def _serve(self, server: ServerProcess, vllm: VllmProcess) -> None:
        used, stored = 0, [0] * len(self.groups)
        for prompt in self.prompts + self.branches:
            for left in reversed(range(STORES)):
                given_up = not_stored(vllm.ask("stores"))
                vllm.generate(prompt, max_tokens=4)
                wait_until(lambda: no_store_left(vllm), "all stores have ended")
                found = vllm.ask("stores")
                if not_stored(found) == given_up:
                    break
                if not left:
                    raise RuntimeError(f"a prompt could not be stored: {found['outcomes']}")
                # The server was silent for a moment: what vLLM computes again is stored again.
                wait_until(lambda: bool(vllm.ask("reset_prefix_cache")), "vLLM forgets its blocks")
            now = int(server.get("/v1/status")["pool"]["used_bytes"])
            self.used_bytes.append(now - used)
            self.stored.append([new - old for new, old in zip(found["stored"], stored, strict=True)])
            used, stored = now, found["stored"]

    def needed(self) -> list[int]:
        """The bytes that a hit at the end of each prompt needs, without those that an earlier prompt's hit needs."""
        seen: set[tuple[int, tuple[int, ...]]] = set()
        needed = []
        for prompt in self.prompts + self.branches:
            whole = len(prompt) // self.chunk_tokens
            end = (len(prompt) - 1) // self.chunk_tokens * self.chunk_tokens
            total = 0
            for number, group in enumerate(self.groups):
                block, block_bytes = group["block_tokens"], group["block_bytes"]
                if group["window"]:
                    first = max(0, end - group["window"]) // block
                    blocks = range(first, end // block)
                else:
                    blocks = range(whole * self.chunk_tokens // block)
                keys = {(number, tuple(prompt[: (i + 1) * block])) for i in blocks} - seen
                seen |= keys
                total += len(keys) * block_bytes
            needed.append(total)
        return needed

    def all_layers_bytes(self) -> int:
        """The bytes of all layers for all whole chunks of the prompts without a shared beginning."""
        chunk_bytes = sum(
            group["block_bytes"] * self.chunk_tokens // group["block_tokens"] for group in self.groups
        )
        return sum(len(prompt) // self.chunk_tokens for prompt in self.prompts) * chunk_bytes


def not_stored(found: dict[str, Any]) -> int:
    """The chunks that the server did not take."""
    return sum(count for outcome, count in found["outcomes"].items() if outcome not in ("stored", "present"))


def no_store_left(vllm: VllmProcess) -> bool:
    """Whether all stores have an outcome; an idle step brings the worker's reports to the scheduler."""
    vllm.ask("idle_steps", n=1)
    return not vllm.ask("stores")["in_flight"]


def bytes_figure(served: Served, name: str) -> dict[str, Any]:
    """The figure of a family with windows."""
    used, needed = served.used_bytes, served.needed()
    first, tokens = slice(PROMPTS), sum(map(len, served.prompts))
    ratio = sum(used[first]) / sum(needed[first])
    _, ratio_spread = median_spread([a / b for a, b in zip(used[first], needed[first], strict=True)])
    return figure(
        name,
        value=sum(used[first]) / tokens,
        unit="bytes a token",
        ratio=ratio,
        ratio_to=f"what a hit at the prompt's end needs, {sum(needed[first]) / tokens:.0f} bytes a token",
        target=f"≤ {TARGET_BYTES} × what a hit at the prompt's end needs",
        ok=ratio <= TARGET_BYTES,
        ratio_spread=ratio_spread,
        all_layers=served.all_layers_bytes() / sum(needed[first]),
        ratio_branches=sum(used[PROMPTS:]) / max(1, sum(needed[PROMPTS:])),
    )


def snapshots_figure(served: Served, name: str) -> dict[str, Any]:
    """The figure of a family with states."""
    states = [number for number, group in enumerate(served.groups) if group["kind"] == "MambaSpec"]
    counts = [max(of_prompt[number] for number in states) for of_prompt in served.stored]
    chunks = [len(prompt) // served.chunk_tokens for prompt in served.prompts]
    return figure(
        name,
        value=float(max(counts)),
        unit="states a request",
        ratio=sum(counts[:PROMPTS]) / sum(chunks),
        ratio_to=f"a state for each chunk of {served.chunk_tokens} tokens",
        target=f"≤ {TARGET_SNAPSHOTS}",
        ok=max(counts) <= TARGET_SNAPSHOTS,
        spread=[min(counts), max(counts)],
        mean=sum(counts[:PROMPTS]) / PROMPTS,
        mean_branches=sum(counts[PROMPTS:]) / PROMPTS,
    )


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    seed = int(os.environ.get("SEED") or random.randrange(10_000))
    print(f"   seed {seed}", flush=True)
    figures = []
    with scratch("groups-bytes") as folder:
        for family, what in (("gemma3", "bytes"), ("gpt-oss", "bytes"), ("qwen3-next", "snapshots")):
            served = Served(family, folder, seed)
            name = f"groups_{what}_{family.replace('-', '_')}"
            make = bytes_figure if what == "bytes" else snapshots_figure
            figures.append(make(served, name))
            shown = {
                key: value for key, value in figures[-1].items() if key.startswith(("ratio_", "all", "mean"))
            }
            print(f"   {name}: {shown}", flush=True)
    return figures
