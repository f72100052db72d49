"""The Python of another version of vLLM, for checks that need neither its compiled parts nor a model.

It goes onto PYTHONPATH in front of the environment of `vllm_env.py`, which has the packages that vLLM imports.
Only the standard library is used.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps

COMPLETE = ".complete"
KEPT = (".py", ".json", "METADATA", "entry_points.txt")
"""Endings of the files that are kept: 54 MB of a wheel of 336 MB."""


class Unavailable(Exception):
    """This version of vLLM cannot be had here; the message says why."""


def ensure(version: str) -> Path:
    """The folder with vLLM's Python of this version, fetched on the first call. Raises Unavailable.

    Safe to call from several processes at once: one fetches, the others wait for it.
    """
    folder = provision.cache_root() / f"vllm-{version}-python"
    if (folder / COMPLETE).exists():
        return folder
    waiting = f"waiting for another process that fetches vLLM {version}"
    with provision.exclusive(folder.with_name(folder.name + ".lock"), waiting):
        if (folder / COMPLETE).exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        steps = Steps(ROOT / "build" / "vllm-setup.log")
        try:
            with (
                steps.step(f"fetch the Python of vLLM {version}"),
                tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
            ):
                download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
                steps.run(
                    [*download, "--only-binary=:all:", "--dest", scratch, f"vllm=={version}"],
                    attempts=DOWNLOAD_ATTEMPTS,
                    environment=provision.download_environment(),
                )
                [wheel] = Path(scratch).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(folder, [name for name in archive.namelist() if name.endswith(KEPT)])
        except (StepFailed, OSError, zipfile.BadZipFile) as error:
            raise Unavailable(f"the Python of vLLM {version} could not be fetched: {error}") from None
        finally:
            steps.close()
        (folder / COMPLETE).touch()
    return folder
