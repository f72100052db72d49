"""Real servers with one L2 tier, each in a folder of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.harness.server_process import ServerProcess


@contextlib.contextmanager
def l2_servers(folder: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Yield a function that starts servers with an `fs` adapter, or with the entry `adapter`. The end closes them."""
    started: list[ServerProcess] = []

    def starter(adapter: dict[str, Any] | None = None, l1_mb: int = 16, **arguments: Any) -> ServerProcess:
        own = folder / f"server{len(started)}"
        adapter = adapter or {"type": "fs", "base_path": str(own / "l2"), "capacity_gb": 1}
        flags = ("--l2-adapter", json.dumps(adapter), *arguments.pop("flags", ()))
        process = ServerProcess(own, l1_mb=l1_mb, l2="embedded", flags=flags, **arguments)
        started.append(process)
        process.start()
        return process

    try:
        yield starter
    finally:
        for process in started:
            process.close()
