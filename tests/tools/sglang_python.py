"""SGLang's published wheel with the few packages that its hierarchical cache imports, in the cache folder.

It goes onto PYTHONPATH in front of the environment of `vllm_env.py`, which has torch for the CPU and most of what
SGLang imports.  None of SGLang's kernels is there: its host pools, storages and the storage threads of its cache
controller run, a model does not.

    python tests/tools/sglang_python.py     fetch it, unless it is there, and print its folder
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps

VERSION = "0.5.23"
REQUIREMENTS = (
    f"sglang=={VERSION}",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "orjson==3.13.0",
    "torchvision==0.28.0",
    "traitlets==5.16.1",
)
"""Some 50 MB. torchvision is the release for the environment's torch; of its kernels none is used."""
COMPLETE = ".complete"


class Unavailable(Exception):
    """SGLang's Python cannot be had here; the message says why."""


def folder() -> Path:
    """Where it lies, for this minor version of Python."""
    return provision.cache_root() / f"sglang-{VERSION}-cp{sys.version_info.major}{sys.version_info.minor}"


def find() -> Path | None:
    """The folder, None if it was not fetched."""
    return folder() if (folder() / COMPLETE).exists() else None


def ensure() -> Path:
    """The folder, fetched on the first call. Raises Unavailable. Several processes may call this at once."""
    target = folder()
    with provision.exclusive(target.with_name(target.name + ".lock"), "waiting for another process"):
        if (target / COMPLETE).exists():
            return target
        shutil.rmtree(target, ignore_errors=True)
        steps = Steps(ROOT / "build" / "sglang-setup.log")
        try:
            with steps.step(f"fetch the Python of SGLang {VERSION}"):
                install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"]
                steps.run(
                    [*install, "--only-binary=:all:", "--target", target, *REQUIREMENTS],
                    attempts=DOWNLOAD_ATTEMPTS,
                    environment=provision.download_environment(),
                )
        except (StepFailed, OSError) as error:
            raise Unavailable(f"the Python of SGLang {VERSION} could not be fetched: {error}") from None
        finally:
            steps.close()
        (target / COMPLETE).touch()
    return target


if __name__ == "__main__":
    try:
        print(ensure())
    except Unavailable as unavailable:
        sys.exit(str(unavailable))
