"""Act 4: a controller and two instances, the second of which hits chunks that the first has computed."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from tests.harness import cache_engine
from tests.harness.cluster import Cluster
from tests.tools.demo.act_clients import open_clients, retrieve, store
from tests.tools.demo.common import (
    CHUNK_TOKENS,
    HIT_TOKENS,
    L1_MB,
    NEW_TOKENS,
    PROMPT_TOKENS,
    Table,
    begin_vllm,
    fitting_l1_mb,
    prompts,
    say,
    stored_chunks,
    wait_for,
)

CASES_4 = (
    "first instance, cold",
    "second instance, which never computed it",
    "second instance again, from its own L1",
    "first instance killed (SIGKILL): another prompt of it, computed",
)


def act_4(folder: Path, table: Table, size: str, *, with_vllm: bool, keep: bool) -> None:
    """A cluster, whose instances hit each other's chunks."""
    say("A controller and two instances: the first one's L1 serves the second one")
    l1_mb = fitting_l1_mb(L1_MB, 160)
    # Long, as for vLLM's lookups below: an owner that gets no core for a moment must not cause a miss.
    settings = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "3000"}
    with Cluster(folder, l1_mb=l1_mb, n_servers=2, settings=settings) as cluster:
        say(f"  controller ready, dashboard at {cluster.controller.dashboard_link()}")
        if with_vllm:
            _cluster_vllm(folder, table, cluster, size)
        else:
            _cluster_clients(folder, table, cluster)
        if keep:
            if with_vllm:
                cluster.servers[0].start()  # it was killed; its L1 is still there
            say(
                f"  The dashboard stays at {cluster.controller.url}/ until Ctrl-C. To log in, open the link of"
            )
            say(f"  kvstrata ctl --url {cluster.controller.url} cluster dashboard-link")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()


def _cluster_vllm(folder: Path, table: Table, cluster: Cluster, size: str) -> None:
    prompt, warm_up = prompts()
    other = list(reversed(prompt))
    first_server, second_server = cluster.servers
    chunks = HIT_TOKENS // CHUNK_TOKENS
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                # Only chunks that are loaded within this time are hits, so a slow machine gets more than enough.
                begin_vllm(
                    size, folder / f"vllm-{at}", server, warm, **{"kvstrata.lookup_timeout_ms": 30_000}
                )
            )
            for at, (server, warm) in enumerate(
                ((first_server, warm_up), (second_server, list(reversed(warm_up))))
            )
        )
        expected: list[int] = []

        def row(case: int, result: dict[str, Any], least: int, *, ok: bool = True) -> None:
            cached = result["cached_tokens"] or 0
            equal = not expected or result["tokens"] == expected
            table.add(
                CASES_4[case],
                4,
                ok=ok and equal and least <= cached <= (PROMPT_TOKENS if least else 0),
                ttft_s=round(result["ttft_s"], 3),
                cached_tokens=cached,
                tokens_equal=equal,
            )
            say(
                f"  {CASES_4[case]}: first token after {result['ttft_s']:.3f} s, {cached} tokens from a cache"
            )

        cold = first.generate(prompt, max_tokens=NEW_TOKENS)
        expected = cold["tokens"]
        row(0, cold, 0)
        of_other = first.generate(other, max_tokens=NEW_TOKENS)
        wait_for(lambda: stored_chunks(first_server) >= 2 * chunks, "the prompts were not stored")
        cluster.until_known(0)
        read = second.generate(prompt, max_tokens=NEW_TOKENS)
        row(1, read, HIT_TOKENS, ok=cluster.peer_records(1) >= chunks)
        second.ask("reset_prefix_cache")
        row(2, second.generate(prompt, max_tokens=NEW_TOKENS), HIT_TOKENS)
        first_server.kill()
        expected = of_other["tokens"]
        row(3, second.generate(other, max_tokens=NEW_TOKENS), 0)
        for vllm in (first, second):
            vllm.quit()


def _cluster_clients(folder: Path, table: Table, cluster: Cluster) -> None:
    chunks = 2
    with contextlib.ExitStack() as stack:
        clients = open_clients(stack, folder, cluster.servers, chunks)
        stored = store(clients[0], chunks, 3)
        table.add(CASES_4[0], 4, ok=set(stored["outcomes"]) == {"stored"}, cached_tokens=0)
        cluster.until_known(0)
        for case in (1, 2):
            whole = retrieve(clients[1], chunks, 3)["chunks"] == chunks
            read = cluster.peer_records(1) == chunks
            table.add(
                CASES_4[case],
                4,
                ok=whole and read,
                cached_tokens=chunks * cache_engine.CHUNK_TOKENS,
                bytes_equal=whole,
            )
