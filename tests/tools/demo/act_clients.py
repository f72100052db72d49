"""Act 1: a server and clients without an engine."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.cache_engine import CHUNK_TOKENS
from tests.harness.child import Child
from tests.harness.server_process import ServerProcess
from tests.tools.demo.servers import fitting_l1_mb, wait_for
from tests.tools.demo.table import Table, Wrong, say

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
        clients = [
            stack.enter_context(
                Child(
                    "tests.harness.load_client", str(server.socket_dir), str(each), str(number),
                    log=folder / f"client-{number}.log",
                )
            )
            for number in range(1, CLIENTS + 1)
        ]  # fmt: skip
        for client in clients:
            wait_for(lambda client=client: client.ask("connected"), "a client did not attach")
        stores = together(clients, lambda client, at: client.ask("store", seed=at, chunks=each))
        row_of_copies(table, f"store, {CLIENTS} processes", each, stores, equal=None)
        problem = [s["outcomes"] for s in stores if set(s["outcomes"]) != {"stored"}]
        if problem:
            raise Wrong(f"a store was refused: {problem}")

        def of_neighbour(client: Child, at: int) -> Any:
            return client.ask("retrieve", seed=(at + 1) % CLIENTS, chunks=each)

        row_of_copies(table, "retrieve what another process stored", each, together(clients, of_neighbour))
        server.kill()
        say("  server killed (SIGKILL)")
        ready = server.start()
        say(f"  server back in {ready['ready_s']} s, pool {'adopted' if ready['adopted'] else 'NEW'}")
        for client in clients:
            wait_for(lambda client=client: client.ask("connected"), "a client did not attach again")
        row_of_copies(table, "retrieve after SIGKILL and restart", each, together(clients, of_neighbour))


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
        equal = complete and all(r["equal"] for r in results)
    rates = [r["bytes"] / r["seconds"] / 1e9 for r in results if r["seconds"]]
    table.add(
        case,
        1,
        ok=complete and equal is not False,
        cached_tokens=chunks * CHUNK_TOKENS,
        bytes_equal=equal,
        gb_per_s=round(statistics.median(rates), 2) if rates else None,
    )
