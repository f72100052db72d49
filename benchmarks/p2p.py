"""Our transfer engines against bare NIXL: 64 x 1 MiB out of another process's memory, in turns, in one run.

Each side is a pair of processes over shared memory of their own, with the transports that each chooses by itself, and
once more over tcp alone.  Sketch: 64 MiB at 10 GB/s of a copy by the kernel are 7 ms; over tcp on the loopback at
1 GB/s 67 ms.  Our engines' times go from the call on an event loop's thread to its answer there and back.
"""

from __future__ import annotations

import os
import signal
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import figure, median_spread, scratch, sized
from tests.harness import fetch_wheels
from tests.harness.child import Child

MIB = 1 << 20
ITEMS = sized(64, 4)
WARM_UP, SETS, ROUNDS, READS = sized((2, 5, 3, 3), (1, 1, 1, 1))
TARGETS = {"nixl": 0.9, "ucx": 1.0}
BYTES = ITEMS * MIB
READ = [[0, i * MIB, 0, i * MIB, MIB] for i in range(ITEMS)]


class Pair:
    """An owner and a reader of one engine."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, environment: dict[str, str]) -> None:
        log = folder / f"{name}.log"
        self.owner, self.reader = (
            stack.enter_context(Child("benchmarks.p2p_reader", name, log=log, environment=environment))
            for _ in range(2)
        )
        metadata = self.owner.ask("open", lengths=[BYTES], seed=7)
        self.reader.ask("open", lengths=[BYTES], seed=0)
        self.reader.ask("connect", peer="owner", metadata=metadata)
        self.read(WARM_UP)
        self.transports: str = self.reader.ask("transports", peer="owner")
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """To both: what is not measured is stopped, since NIXL's progress threads never rest."""
        self.owner.signal(number)
        self.reader.signal(number)

    def take_turn(self) -> float:
        """GB/s."""
        self.signal(signal.SIGCONT)
        try:
            self.read(WARM_UP)
            return self.read(READS)
        finally:
            self.signal(signal.SIGSTOP)

    def read(self, times: int) -> float:
        """GB/s, the median of so many."""
        return BYTES / statistics.median(self.reader.ask("time_read", items=READ, times=times)) / 1e9


def measure(environment: dict[str, str]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """GB/s of each round by engine, taking turns; and what transports were used.

    The threads of some pairs of processes get along better than those of others, for as long as they live: the median
    is over several of each.
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
    """The figures."""
    environment = fetch_wheels.environment(fetch_wheels.NIXL)
    default, transports = measure(environment)
    tcp, _ = measure({**environment, "UCX_TLS": "tcp"})
    figures = []
    for name, target in TARGETS.items():
        value, spread = median_spread(default[name])
        ratio = statistics.median(
            ours / bare for ours, bare in zip(default[name], default["bare"], strict=True)
        )
        figures.append(
            figure(
                f"p2p_{name}",
                value=value,
                unit="GB/s",
                ratio=ratio,
                ratio_to="bare NIXL's UCX backend doing the same, round by round",
                target=f">= {target} x",
                ok=ratio >= target,
                spread=spread,
                bare_gb_s=statistics.median(default["bare"]),
                transports=transports[name]
                or "NIXL does not say; UCX_TLS is " + os.environ.get("UCX_TLS", "all"),
                tcp_gb_s=statistics.median(tcp[name]),
                tcp_bare_gb_s=statistics.median(tcp["bare"]),
                not_run="RDMA",
            )
        )
    return figures
