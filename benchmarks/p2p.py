"""`p2p_frames`: records sent by an owner's frames, against a bare loop over the same sockets and vectors.
`p2p_nixl`: reads of 64 × 1 MiB of another process's memory by our NIXL engine, against bare NIXL.

Each pair of processes takes turns with what it is compared with.  Frames go over a unix socket, tcp on the loopback,
and tcp over a veth pair between two network namespaces; 64 records of 1 MiB and 512 of 64 KiB, plain and sealed.

Sketch: 64 MiB over a unix socket take two copies of the kernel, 16 ms at 4 GB/s.
"""

from __future__ import annotations

import signal
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import compared, scratch, sized
from tests.harness.child import Child
from tests.harness.network import Network, why_not
from tests.tools import fetch_wheels

MIB = 1 << 20
ITEMS = sized(64, 4)
WARM_UP, SETS, ROUNDS, READS = sized((2, 5, 3, 3), (1, 1, 1, 1))
TARGETS = {"nixl": 0.9}
BYTES = ITEMS * MIB
SHAPES = {"64x1M": sized((64, MIB), (4, MIB)), "512x64K": sized((512, 64 << 10), (8, 64 << 10))}
PATHS = {"unix": (0.95, 0.5), "tcp": (0.9, 0.7), "veth": (0.9, None)}
"""Least share of the bare loop's rate, and most CPU seconds a GB, of owner and reader together."""
SEALED_SHARE = 0.6
FRAME_ROUNDS, FRAME_READS = sized((15, 3), (1, 1))
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


def measure(environment: dict[str, str]) -> dict[str, list[float]]:
    """Return the GB/s of each round by engine.

    The speed of NIXL differs from one pair of processes to another for as long as they live, so the rounds use several
    pairs of each engine.
    """
    rounds: dict[str, list[float]] = {name: [] for name in ("bare", *TARGETS)}
    for _ in range(SETS):
        with scratch("p2p") as folder, ExitStack() as stack:
            pairs = {name: Pair(stack, folder, name, environment) for name in rounds}
            for _ in range(ROUNDS):
                for name, pair in pairs.items():
                    rounds[name].append(pair.take_turn())
    return rounds


class Ends:
    """An owner and a reader of its records, over one path."""

    def __init__(self, stack: ExitStack, folder: Path, path: str, count: int, size: int) -> None:
        folder.mkdir()
        self.n_bytes, self.path = count * size, "tcp" if path == "veth" else path
        under: tuple[tuple[str, ...], ...] = ((), ())
        host = "127.0.0.1"
        if path == "veth":
            hosts = stack.enter_context(Network(folder, 2)).hosts
            under, host = tuple(one.under for one in hosts), hosts[0].address
        self.owner, self.reader = (
            stack.enter_context(Child("benchmarks.p2p_frames", log=folder / "log", under=one))
            for one in under
        )
        self.where = self.owner.ask("own", folder=str(folder), host=host, count=count, size=size)
        self.reader.ask("map", keys=self.where["keys"], length=self.where["length"])

    def read(self, how: str) -> tuple[float, float]:
        """Return GB/s and CPU seconds a GB of reads by `bare`, `plain` or `sealed`."""
        seal = how == "sealed"
        ticket = [] if how == "bare" else self.owner.ask("ticket", seal=seal)
        where = self.where["bare" if how == "bare" else "frames"][self.path]
        before_s = self.owner.ask("cpu")
        took, cpu_s = self.reader.ask("read", where=where, ticket=ticket, seal=seal, times=FRAME_READS)
        cpu_s += self.owner.ask("cpu") - before_s
        return self.n_bytes / min(took) / 1e9, cpu_s / (FRAME_READS * self.n_bytes / 1e9)


def frames_figures() -> list[dict[str, Any]]:
    """Measure the frames on each path that this machine has."""
    figures = []
    for path, (least, most_cpu_s) in PATHS.items():
        if path == "veth" and why_not():
            continue
        for shape, (count, size) in SHAPES.items():
            rates: dict[str, list[float]] = {how: [] for how in ("bare", "plain", "sealed")}
            cpu_s: dict[str, list[float]] = {how: [] for how in rates}
            with scratch("p2p") as folder, ExitStack() as stack:
                ends = Ends(stack, folder / "ends", path, count, size)
                for how in rates:
                    ends.read(how)
                for _ in range(FRAME_ROUNDS):
                    for how, found in rates.items():
                        rate, cpu = ends.read(how)
                        found.append(rate)
                        cpu_s[how].append(cpu)
            sealed = statistics.median(b / a for a, b in zip(rates["plain"], rates["sealed"], strict=True))
            bare_cpu, cpu, sealed_cpu = (statistics.median(cpu_s[how]) for how in rates)
            figures.append(
                compared(
                    f"p2p_frames_{path}_{shape}", rates["plain"], "GB/s", "a bare loop over the same sockets",
                    rates["bare"], least=least, ok=sealed >= SEALED_SHARE and cpu <= (most_cpu_s or cpu),
                    cpu_s_per_gb=cpu, bare_cpu_s_per_gb=bare_cpu, sealed_cpu_s_per_gb=sealed_cpu,
                    sealed_ratio=sealed, sealed_gb_s=statistics.median(rates["sealed"]),
                )
            )  # fmt: skip
    return figures


def run() -> list[dict[str, Any]]:
    """Measure the figures; those of NIXL where it can be had."""
    return [*frames_figures(), *nixl_figures()]


def nixl_figures() -> list[dict[str, Any]]:
    """Measure NIXL."""
    environment = fetch_wheels.environment(fetch_wheels.NIXL)
    default = measure(environment)
    tcp = measure({**environment, "UCX_TLS": "tcp"})
    return [
        compared(
            f"p2p_{name}",
            default[name],
            "GB/s",
            "bare NIXL's UCX backend doing the same, round by round",
            default["bare"],
            least=target,
            tcp_gb_s=statistics.median(tcp[name]),
            tcp_bare_gb_s=statistics.median(tcp["bare"]),
            not_run="RDMA",
        )
        for name, target in TARGETS.items()
    ]
