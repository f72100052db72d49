"""The connector of probe_connector.cpp, compiled against the installed headers, as an adapter."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from kvstrata.cli import native_include_dir
from kvstrata.tiers.native_adapter import NativeAdapter


def compile_probe(folder: Path) -> Path:
    """The module, in this folder."""
    module = folder / "probe.so"
    includes = [f"-I{native_include_dir()}", f"-I{sysconfig.get_paths()['include']}"]
    source = Path(__file__).with_name("probe_connector.cpp")
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    done = subprocess.run(
        [*command, *includes, str(source), "-o", str(module)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return module


def probe_adapter(module: str, drains: bool) -> NativeAdapter:
    """The adapter of a module that `compile_probe` made."""
    loader = importlib.machinery.ExtensionFileLoader("probe", module)
    spec = importlib.util.spec_from_file_location("probe", module, loader=loader)
    assert spec is not None
    probe: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(probe)
    return NativeAdapter(probe.connector(drains), name="probe")


def entry_of(module: Path, isolation: str) -> dict[str, Any]:
    parameters = {"module": str(module), "drains": False}
    place = {"module_path": __name__, "class_name": "probe_adapter", "adapter_params": parameters}
    return {"type": "plugin", **place, "isolation": isolation}
