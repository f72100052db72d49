"""`ping` and `ping_loaded`: how long a ping takes, against a bare ZMTP echo with the same loop and codec.

Server and echo are processes of their own, which the same code pings in turns.  Under load, 8 client processes
send server and echo the same frames at the same rate: lookups of a 128k-token prompt that is all in L1, each followed
by its release.

Sketch: two context switches and three system calls on either side; the echo does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    ROOT,
    chain_of,
    compared,
    engine_client,
    median_spread,
    percentile,
    scratch,
    sized,
    store_ended,
)
from benchmarks.echo import echo_server
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.rpc import wire
from kvstrata.types import LayoutIdentity, RequestIdentity
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess

TARGET = 1.5
REPEATS = sized(9, 1)
PINGS = sized(5_000, 100)
WARM_UP = sized(500, 10)
LOAD_CLIENTS = sized(8, 1)
LOAD_RATE = 25
"""Lookups that each client sends per second."""
LOAD_CHUNKS = 512
LAYOUT = LayoutIdentity(model="bench", kv_dtype="bf16", chunk_tokens=256)


def attached(socket_dir: Path) -> RpcClient:
    """A bare session at the server, without the client library."""
    blocks = PagedBlocks(layers=1, num_blocks=1, block_bytes=64)
    session = RpcClient(socket_dir, identity=LAYOUT, slice_held=blocks.slice(), facts=blocks.facts)
    session.attach()
    blocks.close()
    return session


def connected(folder: Path) -> RpcClient:
    """A connection to the echo in that folder."""
    echo = RpcClient(folder)
    echo.connect()
    return echo


def ping_seconds(socket: RpcClient, count: int) -> list[float]:
    """Return the seconds of `count` pings, one after another; a frame is made before its round trip is timed."""
    seconds = []
    for _ in range(count):
        data = wire.encode(wire.Ping(socket.next_seq()))
        started = time.perf_counter()
        socket.send_bytes(data)
        socket.receive_bytes()
        seconds.append(time.perf_counter() - started)
    return seconds


@contextlib.contextmanager
def load_clients(server: ServerProcess, echo: Path, chain: Path) -> Iterator[Any]:
    """Run clients (`main`); yield a function that points them at `server`, at `echo` or nowhere (`rest`)."""
    command = [
        *(sys.executable, "-m", "benchmarks.ping", "--rate", str(LOAD_RATE), "--chain", str(chain)),
        *("--socket-dir", str(server.socket_dir), "--echo", str(echo)),
    ]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, bufsize=0)
        for _ in range(LOAD_CLIENTS)
    ]

    def say(word: str) -> int:
        """Point the clients; return how many lookups they made since the last call."""
        total = 0
        for process in processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(word.encode() + b"\n")
        for process in processes:
            assert process.stdout is not None
            total += int(process.stdout.readline() or 0)
        return total

    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"a load client ended with status {process.wait()}")
        yield say
    finally:
        for process in processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait()
            process.stdout.close()


def compare(name: str, session: RpcClient, echo: RpcClient, point: Callable[[str], int]) -> dict[str, Any]:
    """Measure server and echo in turns; `point` switches the load."""
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    lookups = {"server": 0, "echo": 0}
    for repeat in range(REPEATS):
        # Server and echo also take turns in being first, so that changes of the machine's speed favour neither.
        for who in ("server", "echo") if repeat % 2 else ("echo", "server"):
            socket, taken = (session, ours) if who == "server" else (echo, bare)
            point(who)
            ping_seconds(socket, WARM_UP)
            taken.append(ping_seconds(socket, PINGS))
            lookups[who] += point("rest")
    return compared(
        name,
        [percentile(seconds, 0.5) * 1e6 for seconds in ours],
        "µs",
        "p50 of a bare ZMTP echo",
        [percentile(seconds, 0.5) * 1e6 for seconds in bare],
        most=TARGET,
        p99_us=median_spread([percentile(seconds, 0.99) * 1e6 for seconds in ours])[0],
        echo_p99_us=median_spread([percentile(seconds, 0.99) * 1e6 for seconds in bare])[0],
        load_lookups=lookups,
    )


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    blocks = PagedBlocks(layers=1, num_blocks=1, block_bytes=64)
    figures = []
    with scratch("ping") as folder, ServerProcess(folder, l1_mb=64, flags=("--no-http",)) as server:
        server.start()
        client = engine_client(server.socket_dir, server.port, blocks)
        identity = client.identity(RequestIdentity())
        chain = chain_of(identity.root, 0, LOAD_CHUNKS)
        store = partial(client.store, identity, b"", chain, blocks.plan, [[0]] * LOAD_CHUNKS)
        store_ended(client, store(), store)
        (folder / "chain").write_bytes(chain)
        echo_folder = server.socket_dir / "echo"
        echo_folder.mkdir()
        with echo_server(echo_folder / RPC_SOCKET):
            echo, session = connected(echo_folder), attached(server.socket_dir)
            figures.append(compare("ping", session, echo, lambda _: 0))
            with load_clients(server, echo_folder, folder / "chain") as point:
                figures.append(compare("ping_loaded", session, echo, point))
            session.goodbye()
            echo.close()
        client.close()
    blocks.close()
    return figures


def main() -> None:
    """Be one client that sends `--rate` lookups a second, each followed by its release, while a ping is measured.

    A line on stdin names the target: `server`, `echo`, or `rest` for neither.  Each line is answered with the number of
    lookups since the line before it.  The process ends when its stdin is closed.  The client waits for each reply
    before it sends more, so a server that falls behind gets fewer lookups.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-dir", type=Path, required=True)
    parser.add_argument("--echo", type=Path, required=True, help="folder of the echo's socket")
    parser.add_argument("--chain", required=True, type=Path, help="file with the chain keys to look up")
    parser.add_argument("--rate", type=float, required=True)
    arguments = parser.parse_args()
    chain = arguments.chain.read_bytes()
    session, echo = attached(arguments.socket_dir), connected(arguments.echo)
    identity = session.identify().identity_id
    stdin = sys.stdin.fileno()
    target: RpcClient | None = None
    cycles = 0
    due_s = time.monotonic()
    os.write(1, b"ready\n")
    while True:
        wait_s = None if target is None else max(0.0, due_s - time.monotonic())
        if select.select([stdin], [], [], wait_s)[0]:
            line = os.read(stdin, 4096).decode()
            if not line:
                break
            target = {"server": session, "echo": echo, "rest": None}[line.split()[-1]]
            os.write(1, f"{cycles}\n".encode())
            cycles = 0
            due_s = time.monotonic()
            continue
        assert target is not None
        request = session.lookup_request(identity, chain, deadline_ms=1000, request_id="bench")
        target.send_bytes(wire.encode(request))
        reply = target.receive_bytes()
        if target is session:
            found = wire.decode_reply(reply)
            assert isinstance(found, wire.LookupReply) and found.n_chunks == len(chain) // 32, found
        release = wire.Release(session.next_seq(), [(session.session, request.seq)])
        target.send_bytes(wire.encode(release))
        target.receive_bytes()
        cycles += 1
        due_s = max(due_s + 1 / arguments.rate, time.monotonic() - 1.0)
    session.goodbye()


if __name__ == "__main__":
    main()
