"""Act 1: a server and clients without an engine."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.harness.cache_engine import CHUNK_TOKENS
from tests.harness.child import Child
from tests.harness.server_process import ServerProcess
from tests.tools.demo.common import Table, Wrong, fitting_l1_mb, say

CLIENTS = 3


def act_1(folder: Path, table: Table) -> None:
    """Server and clients without an engine."""
    # All clients hold leases at once, and leases may cover half of the pool.
    l1_mb = fitting_l1_mb(pool_mb(2), pool_mb(1))
    each = 2 if l1_mb >= pool_mb(2) else 1
    say(
        f"Act 1: lmcache-server with {l1_mb} MB of shared memory, {CLIENTS} client processes, "
        f"chunks as large as those of Llama 8B (32 MiB)"
    )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(folder / "act1", l1_mb=l1_mb, l2="embedded"))
        ready = server.start()
        say(f"  server ready in {ready['ready_s']} s, pid {ready['pid']}")
        clients = open_clients(stack, folder, [server] * CLIENTS, each)
        stores = together(clients, lambda client, at: store(client, each, at))
        row_of_copies(table, f"store, {CLIENTS} processes", each, stores, equal=None)
        problem = [s["outcomes"] for s in stores if set(s["outcomes"]) != {"stored"}]
        if problem:
            raise Wrong(f"a store was refused: {problem}")

        def of_neighbour(client: Child, at: int) -> Any:
            return retrieve(client, each, (at + 1) % CLIENTS)

        row_of_copies(table, "retrieve what another process stored", each, together(clients, of_neighbour))
        server.kill()
        say("  server killed (SIGKILL)")
        ready = server.start()
        say(f"  server back in {ready['ready_s']} s, pool {'adopted' if ready['adopted'] else 'NEW'}")
        for client in clients:
            client.ask("connect")
        row_of_copies(table, "retrieve after SIGKILL and restart", each, together(clients, of_neighbour))


def open_clients(
    stack: contextlib.ExitStack, folder: Path, servers: Sequence[ServerProcess], chunks: int
) -> list[Child]:
    """An attached client process for each of these servers, with blocks for chunks of 32 MiB."""
    clients = []
    for number, server in enumerate(servers, 1):
        client = Child("tests.harness.cache_engine", log=folder / f"client-{number}.log")
        clients.append(stack.enter_context(client))
        client.ask(
            "start", socket_dir=str(server.socket_dir), group=f"client {number}".ljust(16, "."),
            model="llama-8b-shape", layers=32, block_bytes=512 << 10, num_blocks=4 * (chunks + 1),
        )  # fmt: skip
    for client in clients:
        client.ask("connect")
    return clients


def store(client: Child, chunks: int, seed: int) -> dict[str, Any]:
    return {"outcomes": client.ask("store", n_chunks=chunks, seed=seed), **client.ask("copied")}


def retrieve(client: Child, chunks: int, seed: int) -> dict[str, Any]:
    """Load a prompt into one client. Raises ChildError for a wrong byte."""
    return {"chunks": client.ask("hit", n_chunks=chunks, seed=seed), **client.ask("copied")}


def pool_mb(chunks_each: int) -> int:
    """MB of a pool for this many chunks of 32 MiB for each client, and a little more."""
    return 2 * 32 * CLIENTS * chunks_each + 32


def together(clients: list[Child], ask: Callable[[Child, int], Any]) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(ask, clients, range(len(clients))))


def row_of_copies(table: Table, case: str, each: int, results: list[Any], equal: bool | None = True) -> None:
    """Adds a row of act 1, made from the results of all clients."""
    chunks = sum(r.get("chunks", each) for r in results)
    complete = chunks == CLIENTS * each
    if equal is not None:
        equal = complete
    rates = [r["bytes"] / r["seconds"] / 1e9 for r in results if r["seconds"]]
    table.add(
        case,
        1,
        ok=complete and equal is not False,
        cached_tokens=chunks * CHUNK_TOKENS,
        bytes_equal=equal,
        gb_per_s=round(statistics.median(rates), 2) if rates else None,
    )
