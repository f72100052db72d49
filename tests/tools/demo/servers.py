"""Functions that all acts use for their servers: pool sizes that fit memory, waits, counts of chunks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.server_process import ServerProcess
from tests.tools.demo.table import Wrong

MAX_SHM_MB = 480
"""Below the 512 MB that the demo may take, with room for the index."""
L1_MB = 256
"""Size of L1 in all acts but the first."""
CHUNK_TOKENS = 256
WAIT_S = 60.0


def fitting_l1_mb(wanted_mb: int, least_mb: int) -> int:
    """Returns a pool size that fits memory. Raises Wrong if even the least size does not."""
    available = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    available_mb = int(available[1]) // 1024 if available else wanted_mb * 3
    size_mb = min(wanted_mb, MAX_SHM_MB, available_mb // 3)
    if size_mb < least_mb:
        raise Wrong(f"{available_mb} MB of memory are free; the demo needs {3 * least_mb}")
    return size_mb


def wait_for(condition: Callable[[], Any], failure: str, timeout_s: float = WAIT_S) -> None:
    """Waits until `condition()` is true. Raises Wrong."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise Wrong(f"{failure} within {timeout_s:.0f} s")
        time.sleep(0.02)


def stored_chunks(server: ServerProcess) -> int:
    """Chunks that are READY in L1."""
    return int(server.get("/v1/status")["pool"]["entries"]["ready"])


def loaded_chunks(server: ServerProcess) -> int:
    """Chunks that this server has loaded from L2."""
    return int(server.get("/v1/status")["l2_prefetch"]["counts"].get("loaded", 0))
