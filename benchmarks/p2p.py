"""`p2p_ucx`, `p2p_nixl`: reads of 64 × 1 MiB of another process's memory by our transfer engines, against bare NIXL.

Each engine has a pair of processes, each with shared memory of its own; the pairs take turns, first with the transports
that each engine chooses by itself, then over tcp alone.  Our engines are timed from the call on an event loop's thread
to its answer on that thread.

Sketch: 64 MiB take 7 ms at 10 GB/s, the speed of the kernel's copy; over tcp on the loopback, at 1 GB/s, 67 ms.
"""

from __future__ import annotations

import os
import signal
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import compared, scratch, sized
from tests.harness.child import Child
from tests.tools import fetch_wheels

MIB = 1 << 20
ITEMS = sized(64, 4)
WARM_UP, SETS, ROUNDS, READS = sized((2, 5, 3, 3), (1, 1, 1, 1))
TARGETS = {"nixl": 0.9, "ucx": 1.0}
BYTES = ITEMS * MIB
READ = [[i * MIB, i * MIB, MIB] for i in range(ITEMS)]


class Pair:
    """An owner and a reader that use one transfer engine."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, environment: dict[str, str]) -> None:
        log = folder / f"{name}.log"
        self.owner, self.reader = (
            stack.enter_context(Child("benchmarks.p2p_reader", name, log=log, environment=environment))
            for _ in range(2)
        )
        metadata = self.owner.ask("open", length=BYTES, seed=7)
        self.reader.ask("open", length=BYTES, seed=0)
        self.reader.ask("connect", peer="owner", metadata=metadata)
        self.read(WARM_UP)
        self.transports: str = self.reader.ask("transports", peer="owner")
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """Send a signal to both; a pair is stopped while another one is measured, since NIXL's threads never rest."""
        self.owner.signal(number)
        self.reader.signal(number)

    def take_turn(self) -> float:
        """Let the pair run, read, and stop it again; return GB/s."""
        self.signal(signal.SIGCONT)
        try:
            self.read(WARM_UP)
            return self.read(READS)
        finally:
            self.signal(signal.SIGSTOP)

    def read(self, times: int) -> float:
        """Return the median GB/s of `times` reads."""
        return BYTES / statistics.median(self.reader.ask("time_read", items=READ, times=times)) / 1e9


def measure(environment: dict[str, str]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the GB/s of each round by engine, and the transports that were used.

    The speed of NIXL differs from one pair of processes to another for as long as they live, so the rounds use several
    pairs of each engine.
    """
    rounds: dict[str, list[float]] = {name: [] for name in ("bare", *TARGETS)}
    transports: dict[str, str] = {}
    for _ in range(SETS):
        with scratch("p2p") as folder, ExitStack() as stack:
            pairs = {name: Pair(stack, folder, name, environment) for name in rounds}
            for _ in range(ROUNDS):
                for name, pair in pairs.items():
                    rounds[name].append(pair.take_turn())
            transports = {name: pair.transports for name, pair in pairs.items()}
    return rounds, transports


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    environment = fetch_wheels.environment(fetch_wheels.NIXL)
    default, transports = measure(environment)
    tcp, _ = measure({**environment, "UCX_TLS": "tcp"})
    return [
        compared(
            f"p2p_{name}",
            default[name],
            "GB/s",
            "bare NIXL's UCX backend doing the same, round by round",
            default["bare"],
            least=target,
            transports=transports[name]
            or "NIXL does not say; UCX_TLS is " + os.environ.get("UCX_TLS", "all"),
            tcp_gb_s=statistics.median(tcp[name]),
            tcp_bare_gb_s=statistics.median(tcp["bare"]),
            not_run="RDMA",
        )
        for name, target in TARGETS.items()
    ]
