"""Fetches packages from PyPI into the cache folder, each set into a folder of its own that goes onto PYTHONPATH.

Nothing is installed, and dependencies that the packages declare are not fetched. Only the standard library is used.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.tools import provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps

COMPLETE = ".complete"
UCX = ("libucx-cu13==1.22.0",)
"""UCX's headers and libraries. Its support of CUDA is a separate plugin, so CUDA's own packages are not needed."""
NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1", "numpy>=1.26")
"""All that NIXL's UCX backend needs; the dependencies that the packages declare would take 5.9 GB."""

NVCC = (
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-nvvm==13.5.37",
)
"""The packages that `pip install nvidia-cuda-nvcc nvidia-cuda-cccl` installs."""


class Unavailable(Exception):
    """The packages cannot be had here; the message says why and which line installs them."""


def ensure(requirements: Sequence[str], *, python: Path | str = sys.executable) -> Path:
    """The folder with the packages, fetched on the first call. Raises Unavailable."""
    name = requirements[0].replace("==", "-")
    folder = provision.cache_root() / f"{name}-cp{sys.version_info.major}{sys.version_info.minor}"
    if (folder / COMPLETE).exists():
        return folder
    waiting = f"waiting for another process that fetches {requirements[0]}"
    with provision.exclusive(folder.with_name(folder.name + ".lock"), waiting):
        if (folder / COMPLETE).exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        steps = Steps(ROOT / "build" / f"{name.partition('-')[0]}-setup.log")
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        try:
            with steps.step(f"fetch {', '.join(requirements)}"):
                steps.run(
                    [*install, "--target", folder, *requirements],
                    attempts=DOWNLOAD_ATTEMPTS,
                    environment=provision.download_environment(),
                )
        except StepFailed as error:
            what = f"{', '.join(requirements)} could not be fetched"
            raise Unavailable(
                f"{what}; to install: pip install --no-deps {' '.join(requirements)}\n{error}"
            ) from None
        finally:
            steps.close()
        (folder / COMPLETE).touch()
    return folder


def environment(requirements: Sequence[str]) -> dict[str, str]:
    """Variables for a process that uses the packages. Raises Unavailable."""
    inherited = os.environ.get("PYTHONPATH")
    path = [str(ensure(requirements)), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
