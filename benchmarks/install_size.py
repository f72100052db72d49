"""`install_size`, `import_server`, `import_client`: bytes that the server takes on disk, and seconds of imports.

Sketch: the wheels of seven libraries that the server needs, and two megabytes of compiled modules.  `install_size` is
compared with a venv that holds only pip, made in the same run; an import is compared with a start of the bare
interpreter.  The server is installed from a copy of the files that git knows, so nothing built in place is counted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, figure, median_spread, scratch, sized

INSTALL_TARGET_MB = 200
IMPORT_TARGET_S = 0.3
REPEATS = sized(7, 1)
BUILT: list[str] = sized([], ["build/native/core-*", "build/cython", "build/temp.*", "build/lib.*"])
"""Folders of this checkout that `--small` uses in place of compiling again."""


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def copy_sources(target: Path) -> None:
    """Copy the files that a fresh clone would hold, with uncommitted changes."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def succeed(command: list[Any]) -> None:
    """Run a command. Raises RuntimeError with its output when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}")


def install_size() -> list[dict[str, Any]]:
    """Measure a fresh venv that holds only pip and the server."""
    with scratch("install") as folder:
        venv = folder / "venv"
        copy_sources(folder / "sources")
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        empty = size_bytes(venv)
        for built in [path for pattern in BUILT for path in ROOT.glob(pattern)]:
            shutil.copytree(built, folder / "sources" / built.relative_to(ROOT))
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        succeed([*build, "-w", folder, folder / "sources"])
        [wheel] = folder.glob("*.whl")
        succeed([venv / "bin/pip", "install", "-q", wheel])
        full = size_bytes(venv)
        subprocess.run(
            [venv / "bin/lmcache-server", "--check"], check=True, stdout=subprocess.DEVNULL, cwd=folder
        )
        packages = sorted((venv / "lib").glob("python3*/site-packages/*"), key=size_bytes, reverse=True)
        largest = {path.name: round(size_bytes(path) / 1e6, 1) for path in packages[:6] if path.is_dir()}
    value = full / 1e6
    return [
        figure(
            "install_size",
            value=value,
            unit="MB",
            ratio=full / empty,
            target=f"≤ {INSTALL_TARGET_MB} MB",
            ok=value <= INSTALL_TARGET_MB,
            ratio_to=f"a venv that holds only pip, {empty / 1e6:.0f} MB",
            largest_mb=largest,
        )
    ]


def import_seconds(module: str) -> list[float]:
    """Return the wall seconds of fresh interpreters that import a module ("": none), their start included."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}" if module else "pass"], check=True)
        seconds.append(time.perf_counter() - started)
    return seconds


def imports() -> list[dict[str, Any]]:
    """Measure the import of server and client, less the start of the bare interpreter."""
    import_seconds("kvstrata.server.process")  # a warm-up: it reads the files for the first time
    bare = median_spread(import_seconds(""))[0]
    figures = []
    for name, module in (("import_server", "kvstrata.server.process"), ("import_client", "kvstrata.client")):
        value, spread = median_spread([seconds - bare for seconds in import_seconds(module)])
        figures.append(
            figure(
                name,
                value=value,
                unit="s",
                ratio=(value + bare) / bare,
                target=f"≤ {IMPORT_TARGET_S} s",
                ok=value <= IMPORT_TARGET_S,
                spread=spread,
                ratio_to=f"starting the bare interpreter, {bare:.3f} s",
            )
        )
    return figures


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    return imports() + install_size()
