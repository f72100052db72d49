"""Prompts, and the vLLM that gets them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.harness import vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess
from tests.tools import provision
from tests.tools.demo.servers import CHUNK_TOKENS
from tests.tools.demo.table import say

MODEL, PROMPT_TOKENS, NEW_TOKENS = "160m", 3_000, 16
HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
ENGINE_BYTES = 4 << 30


def prompts() -> tuple[list[int], list[int]]:
    """The prompt, and one to warm up with."""
    draw = random.Random(7)
    prompt, warm_up = ([draw.randrange(3, 32_000) for _ in range(n)] for n in (PROMPT_TOKENS, 300))
    return prompt, warm_up


@contextlib.contextmanager
def begin_vllm(
    name: str, folder: Path, server: ServerProcess, warm_up: list[int], **settings: Any
) -> Iterator[VllmProcess]:
    """vLLM with the model of this name, warmed up."""
    model = vllm_model.ensure_model(name)
    options = {"dtype": vllm_model.dtype_of(name), "max_num_batched_tokens": HIT_TOKENS}
    with VllmProcess(
        model, folder, extra=server.connector_config(**settings), options=options, processes=True
    ) as vllm:
        say(f"  vLLM started in {vllm.start_s:.0f} s")
        vllm.generate(warm_up, max_tokens=4)
        yield vllm


@contextlib.contextmanager
def begin_all(
    name: str, folders: Sequence[Path], server: ServerProcess, warm_up: list[int]
) -> Iterator[list[VllmProcess]]:
    """One such vLLM for each folder. They start at the same time if there is memory for that."""
    at_once = len(folders) if provision.available_memory_bytes() >= ENGINE_BYTES * len(folders) else 1
    with contextlib.ExitStack() as stack:

        def enter(folder: Path) -> VllmProcess:
            begun = begin_vllm(name, folder, server, warm_up)
            vllm = begun.__enter__()
            stack.push(begun.__exit__)
            return vllm

        with ThreadPoolExecutor(at_once) as pool:
            engines = list(pool.map(enter, folders))
        yield engines
