"""Act 2: real vLLM on one server."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from tests.harness import vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess
from tests.tools.demo.common import (
    CHUNK_TOKENS,
    HIT_TOKENS,
    L1_MB,
    NEW_TOKENS,
    PROMPT_TOKENS,
    Table,
    begin_all,
    fitting_l1_mb,
    loaded_chunks,
    prompts,
    say,
    stored_chunks,
    wait_for,
)

RECOVERY_S = 20.0

CASES_2 = (
    "cold",
    "vLLM's own prefix cache (the floor)",
    "hit in a fresh vLLM process",
    "hit after SIGKILL of the server and restart",
    "hit from L2 after /dev/shm was wiped",
    "server stopped (SIGSTOP), computed",
    "hit after the server goes on (SIGCONT)",
)


def act_2(folder: Path, table: Table, size: str) -> None:
    """Real vLLM."""
    l1_mb = fitting_l1_mb(L1_MB, 160)
    kind = "a Llama of" if size in vllm_model.SIZES else "a small model of the family"
    say(f"Act 2: real vLLM on the CPU, {PROMPT_TOKENS} tokens of prompt, random weights, {kind} {size}")
    prompt, warm_up = prompts()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(folder / "act2", l1_mb=l1_mb, l2="embedded"))
        server.start()
        expected: list[int] = []

        def row(
            case: int, result: dict[str, Any], least: int, most: int = PROMPT_TOKENS, *, ok: bool = True
        ) -> None:
            equal = not expected or result["tokens"] == expected
            cached = result["cached_tokens"] or 0
            table.add(
                CASES_2[case],
                2,
                ok=ok and equal and least <= cached <= most,
                ttft_s=round(result["ttft_s"], 3),
                cached_tokens=cached,
                tokens_equal=equal,
            )
            say(
                f"  {CASES_2[case]}: first token after {result['ttft_s']:.3f} s, {cached} tokens from a cache"
            )

        folders = [folder / "vllm-1", folder / "vllm-2"]
        first, second = stack.enter_context(begin_all(size, folders, server, warm_up))
        n_sessions = sessions(server) // 2
        cold = first.generate(prompt, max_tokens=NEW_TOKENS)
        expected = cold["tokens"]
        row(0, cold, 0, 0)
        row(1, first.generate(prompt, max_tokens=NEW_TOKENS), HIT_TOKENS)
        wait_for(lambda: all_stored(server), "the prompt was not stored")
        first.quit()
        row(2, second.generate(prompt, max_tokens=NEW_TOKENS), HIT_TOKENS)
        server.kill()
        server.start()
        row(3, after_recovery(server, second, prompt, n_sessions), HIT_TOKENS)
        server.stop()  # an orderly end, which writes all chunks that wait for L2
        server.wipe_segment()
        server.start()
        from_l2 = after_recovery(server, second, prompt, n_sessions)
        row(4, from_l2, HIT_TOKENS, ok=loaded_chunks(server) >= HIT_TOKENS // CHUNK_TOKENS)
        with server.frozen():
            second.ask("reset_prefix_cache")
            row(5, second.generate(prompt, max_tokens=NEW_TOKENS), 0, 0)
        row(6, after_recovery(server, second, prompt, n_sessions), HIT_TOKENS)


def all_stored(server: ServerProcess) -> bool:
    """Whether the prompt is in L1 and no store is under way. An engine with several groups stores more than chunks."""
    before = stored_chunks(server)
    time.sleep(0.5)
    writing = server.get("/v1/status")["sessions"]["extents_being_written"]
    return HIT_TOKENS // CHUNK_TOKENS <= before == stored_chunks(server) and not writing


def sessions(server: ServerProcess) -> int:
    """The number of attached sessions: an engine has one for its scheduler, and one for each group of layers."""
    return int(server.get("/v1/status")["sessions"]["attached"])


def after_recovery(
    server: ServerProcess, vllm: VllmProcess, prompt: list[int], n_sessions: int
) -> dict[str, Any]:
    """Answers the prompt with vLLM's own cache emptied, once all sessions of the engine are attached again."""
    wait_for(lambda: sessions(server) >= n_sessions, "vLLM did not attach again", RECOVERY_S)
    begun_s = time.monotonic()
    while True:
        vllm.ask("reset_prefix_cache")
        result = vllm.generate(prompt, max_tokens=NEW_TOKENS)
        if result["cached_tokens"] or time.monotonic() - begun_s > RECOVERY_S:
            return result
