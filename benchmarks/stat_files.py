"""For lanes_hol: a native adapter over a directory, with durable puts and one stat a key for `exists`.

Its connector is benchmarks/native/stat_files.cpp, which is compiled into a module under build/ when it is first needed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.native_adapter import NativeAdapter

ROOT = Path(__file__).resolve().parents[1]
MODULE = ROOT / "build" / "native" / "bench" / f"stat_files{sysconfig.get_config_var('EXT_SUFFIX')}"


def module() -> Any:
    """Compile the connector's module unless it is up to date, and import it. Raises CalledProcessError."""
    source, target = "benchmarks/native/stat_files.cpp", str(MODULE.relative_to(ROOT))
    subprocess.run([sys.executable, "ext/make", "module", source, target], cwd=ROOT, check=True)
    spec = importlib.util.spec_from_file_location("stat_files", MODULE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class _OneQueue(Lanes):
    """Lanes that serve operations in the order in which they came: all operations go into one lane."""

    def submit_native(self, submit: Any, lane: Lane, *what: Any) -> Any:
        return super().submit_native(submit, Lane.PUT, *what)


def make(
    base_path: str, num_workers: int, per_op_workers: Mapping[str, int], first_come: bool
) -> NativeAdapter:
    """Make the adapter, not opened yet. With `first_come`, `num_workers` threads serve one queue, as without lanes."""
    capsule = module().connector(base_path)
    if first_come:
        return NativeAdapter(capsule, lanes=_OneQueue("first-come", per_op_workers={Lane.PUT: num_workers}))
    own = {Lane(name): count for name, count in per_op_workers.items()}
    return NativeAdapter(capsule, num_workers=num_workers, per_op_workers=own)
