"""For lanes_hol: a native adapter over a directory whose `exists` is one stat a key and whose puts are durable.

ext/core/bench/stat_files.cpp is compiled into a module under build/ on the way.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstrata.storage.lanes import Lane, Lanes
from kvstrata.storage.native_adapter import NativeAdapter

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "ext" / "core" / "bench" / "stat_files.cpp"
MODULE = ROOT / "build" / "native" / "bench" / f"stat_files{sysconfig.get_config_var('EXT_SUFFIX')}"


def module() -> Any:
    """The compiled module, made where it is not current. Raises CalledProcessError."""
    if not MODULE.exists() or MODULE.stat().st_mtime_ns < SOURCE.stat().st_mtime_ns:
        MODULE.parent.mkdir(parents=True, exist_ok=True)
        include = [f"-I{ROOT / 'ext/core/include'}", f"-I{sysconfig.get_path('include')}"]
        subprocess.run(
            ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", *include, SOURCE, "-o", MODULE],
            check=True,
        )  # fmt: skip
    spec = importlib.util.spec_from_file_location("stat_files", MODULE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class _OneQueue(Lanes):
    """Serves first what came first: everything is one lane."""

    def number(self, lane: Lane) -> int:
        return super().number(Lane.PUT)


class _FirstCome(NativeAdapter):
    def __init__(self, capsule: object, num_workers: int) -> None:
        super().__init__(capsule)
        self._lanes = _OneQueue("first-come", per_op_workers={Lane.PUT: num_workers})


def make(
    base_path: str, num_workers: int, per_op_workers: Mapping[str, int], first_come: bool
) -> NativeAdapter:
    """Not open. With `first_come`, `num_workers` threads serve one queue, as without lanes."""
    capsule = module().connector(base_path)
    if first_come:
        return _FirstCome(capsule, num_workers)
    own = {Lane(name): count for name, count in per_op_workers.items()}
    return NativeAdapter(capsule, num_workers=num_workers, per_op_workers=own)
