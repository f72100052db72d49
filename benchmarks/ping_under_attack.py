"""`ping_under_attack`: an engine's longest ping while a stranger sends as fast as it can, for each shape of attack.

The stranger is a process of the same machine (`benchmarks.attacker`).  It takes CPU time from the server whatever it
sends, so each attack takes turns with a stranger that only keeps a core busy: the ratio says what the server adds.

Sketch: one turn of the server's loop takes at most 2 ms of messages in and handles others for at most 2 ms, and no step
of reading a body takes longer; so a ping waits some milliseconds, plus what the machine's scheduler adds.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.attacker import SHAPES
from benchmarks.common import ROOT, figure, percentile, scratch, sized
from benchmarks.ping import ping_seconds
from benchmarks.raw_session import RawSession
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.types import LayoutIdentity
from tests.harness.blocks import PagedBlocks
from tests.harness.server_process import ServerProcess

TARGET_MS = 20.0
TIMES_STRANGER = 1.5
TURN_S = sized(1.2, 0.05)
ROUNDS = sized(2, 1)
SPIN = "spin"


@contextlib.contextmanager
def stranger(shape: str, server: ServerProcess) -> Iterator[None]:
    """Run a stranger of this shape."""
    command = [sys.executable, "-m", "benchmarks.attacker", shape, str(server.socket_dir / RPC_SOCKET)]
    command += [server.url, str(server.ready["http_token_file"])]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            yield
            if process.poll() is not None:
                raise RuntimeError(f"the stranger ended with status {process.returncode}: {shape}")
        finally:
            process.kill()


def pings_for(session: RawSession, seconds: float) -> list[float]:
    """Return the seconds of pings, one after another, for so long."""
    taken: list[float] = []
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        taken += ping_seconds(session.socket, session.ping, 20)
    return taken


def run() -> list[dict[str, Any]]:
    """Measure the figure."""
    layout = LayoutIdentity(model="bench", kv_dtype="bf16", chunk_tokens=256)
    blocks = PagedBlocks(layers=1, num_blocks=1, block_bytes=64)
    found: dict[str, list[float]] = {shape: [] for shape in (*SHAPES, SPIN)}
    with scratch("attack") as folder, ServerProcess(folder, l1_mb=64) as server:
        server.start()
        session = RawSession(server.socket_dir, layout, blocks.slice(), blocks.facts)
        for _ in range(ROUNDS):
            for attack in SHAPES:
                for shape in (attack, SPIN):
                    with stranger(shape, server):
                        ping_seconds(session.socket, session.ping, 20)
                        time.sleep(TURN_S / 2)  # the stranger starts and finds its speed
                        found[shape] += pings_for(session, TURN_S)
        session.close()
    blocks.close()
    worst = {shape: 1000 * max(seconds) for shape, seconds in found.items()}
    p99 = {shape: 1000 * percentile(seconds, 0.99) for shape, seconds in found.items()}
    value = max(worst[shape] for shape in SHAPES)
    return [
        figure(
            "ping_under_attack",
            value=value,
            unit="ms",
            ratio=value / worst[SPIN],
            target=f"≤ {TARGET_MS:g} ms, or {TIMES_STRANGER} × the busy stranger",
            ok=value <= max(TARGET_MS, TIMES_STRANGER * worst[SPIN]),
            ratio_to=f"longest ping beside a stranger that only keeps a core busy, {worst[SPIN]:.1f} ms",
            worst_ms=worst,
            p99_ms=p99,
        )
    ]
