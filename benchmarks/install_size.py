"""`install_size` and `import`: what the server costs on disk and what its modules cost to import.

The ratio of install_size is to the size of the wheels' interpreter-only venv in the same run; that of an import is
to starting the bare interpreter.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import figure

ROOT = Path(__file__).resolve().parents[1]
INSTALL_TARGET_MB = 200
IMPORT_TARGET_S = 0.3
REPEATS = 7


def size_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def install_size() -> list[dict[str, Any]]:
    """A fresh venv with nothing but the server."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-install-") as scratch:
        venv = Path(scratch) / "venv"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        empty = size_bytes(venv)
        subprocess.run([venv / "bin/pip", "install", "-q", str(ROOT)], check=True)
        full = size_bytes(venv)
        subprocess.run(
            [venv / "bin/lmcache-server", "--check"], check=True, stdout=subprocess.DEVNULL, cwd=scratch
        )
    value = full / 1e6
    return [
        figure(
            "install_size",
            value=value,
            unit="MB",
            ratio=full / empty,
            target=f"≤ {INSTALL_TARGET_MB} MB",
            ok=value <= INSTALL_TARGET_MB,
        )
    ]


def import_seconds(module: str) -> list[float]:
    """Wall seconds of fresh interpreters that import a module, the interpreter's own start included."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}" if module else "pass"], check=True)
        seconds.append(time.perf_counter() - started)
    return seconds


def imports() -> list[dict[str, Any]]:
    """Import of server and client, less the start of the bare interpreter."""
    bare = sorted(import_seconds(""))[REPEATS // 2]
    figures = []
    for name, module in (("import_server", "kvstrata.service.server"), ("import_client", "kvstrata.client")):
        seconds = sorted(import_seconds(module))
        value = seconds[REPEATS // 2] - bare
        figures.append(
            figure(
                name,
                value=value,
                unit="s",
                ratio=value / bare,
                target=f"≤ {IMPORT_TARGET_S} s",
                ok=value <= IMPORT_TARGET_S,
                spread=[seconds[0] - bare, seconds[-1] - bare],
            )
        )
    return figures


def run() -> list[dict[str, Any]]:
    """Both."""
    return imports() + install_size()
