"""Act 3: two servers, one after the other, that share a remote tier and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.child import Child
from tests.harness.server_process import ServerProcess
from tests.tools import remotes
from tests.tools.demo.prompts import HIT_TOKENS, NEW_TOKENS, begin_vllm, prompts
from tests.tools.demo.servers import (
    CHUNK_TOKENS,
    L1_MB,
    fitting_l1_mb,
    loaded_chunks,
    stored_chunks,
    wait_for,
)
from tests.tools.demo.table import Table, say

CASES_3 = ("first server, cold", "second server, which never computed it")


def act_3(folder: Path, table: Table, size: str, name: str, *, with_vllm: bool) -> None:
    """Two servers, one after the other, that have nothing in common but a remote tier."""
    say(f"Two servers that share {name} and nothing else: each has an L1 of its own, and the first is gone before "
        "the second starts")  # fmt: skip
    l1_mb = fitting_l1_mb(L1_MB, 160)
    with remotes.tier(name, folder) as tier:
        for number in (0, 1):
            with ServerProcess(
                folder / f"server-{number}",
                l1_mb=l1_mb,
                l2="embedded",
                flags=("--l2-adapter", json.dumps(tier.entry)),
                environment=tier.environment,
            ) as server:
                server.start()
                play = _remote_vllm if with_vllm else _remote_client
                play(folder, table, server, number, size)
                loaded = loaded_chunks(server)
                table.rows[-1]["ok"] &= loaded > 0 if number else loaded == 0
                if number == 0:
                    wait_for(lambda server=server: _put_chunks(server) >= stored_chunks(server) > 0,
                             f"not everything was put to {name}")  # fmt: skip
                server.stop()


def _remote_vllm(folder: Path, table: Table, server: ServerProcess, number: int, size: str) -> None:
    prompt, warm_up = prompts()
    # Only chunks that are loaded within this time are hits, so a slow machine gets more than enough.
    settings = {"kvstrata.lookup_timeout_ms": 30_000}
    with begin_vllm(size, folder / f"vllm-{number}", server, warm_up, **settings) as vllm:
        result = vllm.generate(prompt, max_tokens=NEW_TOKENS)
        cached = result["cached_tokens"] or 0
        first = next((row for row in table.rows if row["case"] == CASES_3[0]), None)
        equal = first is None or result["tokens"] == first["tokens"]
        table.add(
            CASES_3[number],
            3,
            ok=equal and cached == (HIT_TOKENS if number else 0),
            ttft_s=round(result["ttft_s"], 3),
            cached_tokens=cached,
            tokens_equal=equal,
            tokens=result["tokens"],
        )
        if number == 0:
            wait_for(lambda: stored_chunks(server) >= HIT_TOKENS // CHUNK_TOKENS, "the prompt was not stored")
        vllm.quit()


def _remote_client(folder: Path, table: Table, server: ServerProcess, number: int, size: str) -> None:
    chunks = 2
    with Child(
        "tests.harness.load_client",
        str(server.socket_dir),
        str(chunks),
        "1",
        log=folder / f"client-{number}.log",
    ) as client:
        wait_for(lambda: client.ask("connected"), "a client did not attach")
        if number == 0:
            stored = client.ask("store", seed=3, chunks=chunks)
            table.add(CASES_3[0], 3, ok=set(stored["outcomes"]) == {"stored"}, cached_tokens=0)
        else:
            found = client.ask("retrieve", seed=3, chunks=chunks)
            whole = found.get("chunks") == chunks and found["equal"]
            table.add(CASES_3[1], 3, ok=whole, cached_tokens=chunks * CHUNK_TOKENS, bytes_equal=whole)


def _put_chunks(server: ServerProcess) -> int:
    (adapter,) = server.get("/v1/status")["l2_store"]["adapters"].values()
    return int(adapter["outcomes"].get("stored", 0))
