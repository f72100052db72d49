"""`make setup`: brings `.venv` up to date with the sources. Run it with the Python that .venv shall have.

Before any download it checks the compiler, Python's headers, the venv module, disk and memory. If something is
missing, it prints one line that installs all of it, and ends with exit status 2. Then it prints one line for each step
and keeps the whole output in `build/setup.log`; a failed step ends it with exit status 1. A step is skipped if the
contents of the files that it works from have not changed, so a second run takes well under a second.

`--only packages` makes .venv and installs packages, which is all that ruff, mypy and clang-format need. `--only built`
compiles nothing where compiled modules are there already, whatever they were made from: enough to import the package.

Only the standard library is used, and Python 3.11 or newer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import locked, provision
from tests.tools.provision import ROOT, StepFailed, Steps

SUPPORTED_MINORS = (11, 12, 13)
MINIMUM_DISK_BYTES = 2 * 1024**3
MINIMUM_MEMORY_BYTES = 2 * 1024**3
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
METADATA = ROOT / "build" / "metadata"
STAMP = VENV / ".kvstrata-setup.json"
BUILD_VARIABLES = (
    *("CXX", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "KVSTRATA_WERROR"),
    *("KVSTRATA_CUDA", "CUDA_HOME"),
)
LOCK = locked.lock_path("test")
"""BUILD_TOOLS and what pyproject.toml declares, as versions with hashes (`make lock`)."""
BUILD_TOOLS = ("pip>=24", "setuptools>=77", "wheel", "cython>=3.1", "build")

# Needs C++20 with its library, threads, and the sanitizers of the C++ tests.
COMPILER_PROBE = """
#include <bit>
#include <span>
#include <thread>
int main(int argc, char**) {
    std::jthread worker([] {});
    return std::span<int>(&argc, 1).size() == 1 && std::has_single_bit(1u) ? 0 : 1;
}
"""


def missing_packages(compiles: bool) -> list[str]:
    """The packages that must be installed first, under their names in this system's package tool."""
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    apt, dnf = [], []
    if compiles and not compiler_works():
        apt += ["g++", "libc6-dev"]
        dnf += ["gcc-c++", "libasan", "libubsan", "libtsan"]
    if shutil.which("make") is None:
        apt.append("make")
        dnf.append("make")
    if compiles and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        apt.append(f"{minor}-dev")
        dnf.append(f"{minor}-devel")
    if not venv_works():
        apt.append(f"{minor}-venv")
        dnf.append(minor)
    return dnf if shutil.which("dnf") and not shutil.which("apt-get") else apt


def compiler_works() -> bool:
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(COMPILER_PROBE)
        for flags in ([], ["-fsanitize=address,undefined"], ["-fsanitize=thread"]):
            command = [*compiler, "-std=c++20", *flags, "-pthread", str(source), "-o", f"{folder}/probe"]
            if subprocess.run(command, capture_output=True, check=False).returncode != 0:
                return False
    return True


def venv_works() -> bool:
    """Whether this Python can make an environment with pip; Debian ships the part for that separately."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


def install_line(packages: list[str]) -> str:
    sudo = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        return f"{sudo}apt-get update && {sudo}apt-get install -y {' '.join(packages)}"
    if shutil.which("dnf"):
        return f"{sudo}dnf install -y {' '.join(packages)}"
    return f"install, under the names your system gives them: {' '.join(packages)}"


def check_machine(compiles: bool) -> list[str]:
    """The problems that prevent a setup, a sentence each; the line that installs missing packages comes first."""
    problems = []
    if sys.version_info[:2] not in {(3, minor) for minor in SUPPORTED_MINORS}:
        problems.append(
            f"Python {sys.version.split()[0]} is not supported: make PYTHON=python3.11 (or 3.12, 3.13)"
        )
    packages = missing_packages(compiles)
    if packages:
        problems.append(install_line(packages))
    free = provision.free_disk_bytes(ROOT)
    if free < MINIMUM_DISK_BYTES:
        problems.append(f"free some disk: {ROOT} has {free / 2**30:.1f} GiB and a setup needs 2 GiB")
    memory = provision.available_memory_bytes()
    if memory < MINIMUM_MEMORY_BYTES:
        problems.append(f"free some memory: {memory / 2**30:.1f} GiB are available and a setup needs 2 GiB")
    return problems


def digest_of(paths: Iterable[Path], *extra: str) -> str:
    """A digest of names and contents, so that a touched but unchanged file counts as unchanged."""
    digest = hashlib.sha256()
    for text in extra:
        digest.update(text.encode() + b"\0")
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def native_sources() -> list[Path]:
    folders = ("ext/core/include", "ext/core/src", "ext/cython", "ext/cuda", "ext/envoy", "ext/make")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = [path for path in found if path.suffix != ".pyc"]
    return [ROOT / "setup.py", *found, *(ROOT / "ext/core/tests/support").glob("pool_validation.*")]


def native_modules_present() -> bool:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    names = ["cuda", *(source.stem for source in (ROOT / "ext" / "cython").glob("*.pyx"))]
    return all((ROOT / "src" / "kvstrata" / "native" / f"{name}{suffix}").exists() for name in names)


def venv_is_usable() -> bool:
    """Whether .venv is a whole environment of this very Python, made at this very place."""
    probe = "import pip, sys; print(sys.version, sys.base_prefix, sys.prefix)"
    try:
        done = subprocess.run([VENV_PYTHON, "-c", probe], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.strip() == f"{sys.version} {sys.base_prefix} {VENV}"


def wanted_state() -> dict[str, str]:
    """For each step, a text or digest of all its inputs; the step is due when that has changed."""
    python = f"{sys.implementation.cache_tag} {sys.version} {sys.base_prefix}"
    variables = [f"{name}={os.environ.get(name, '')}" for name in BUILD_VARIABLES]
    metadata = [ROOT / "pyproject.toml", ROOT / "src/kvstrata/__init__.py"]
    return {
        "environment": f"{python} {VENV}",
        "packages": digest_of([LOCK], python),
        "native": digest_of(native_sources(), python, *variables, str(nvcc_found())),
        "install": digest_of(metadata, python, str(ROOT)),
    }


def nvcc_found() -> bool:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    packaged = VENV.glob("lib/python*/site-packages/nvidia/*/bin/nvcc")
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists() or any(packaged)


def declared_requirements() -> list[str]:
    with open(ROOT / "pyproject.toml", "rb") as source:
        project = tomllib.load(source)["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["test"], *extras["lint"]]


def read_stamp() -> dict[str, str]:
    try:
        stamp = json.loads(STAMP.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and VENV_PYTHON.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("packages", "built"))
    only = parser.parse_args().only
    start_s = time.monotonic()
    with provision.exclusive(ROOT / "build" / ".setup.lock", "waiting for another setup in this clone"):
        wanted, done = wanted_state(), read_stamp()
        if not native_modules_present():
            done.pop("native", None)
        if not METADATA.exists():
            done.pop("install", None)
        if only == "packages":
            wanted = {step: wanted[step] for step in ("environment", "packages")}
        elif only == "built" and "native" in done:
            wanted |= {step: done[step] for step in ("native",) if step in done}
        if due(wanted, done):
            problems = check_machine("native" in due(wanted, done))
            if problems:
                print("\n".join(problems))
                return 2
            steps = Steps(ROOT / "build" / "setup.log")
            try:
                bring_up_to_date(steps, wanted, done)
            except StepFailed as error:
                print(error, file=sys.stderr)
                return 1
            finally:
                steps.close()
    version = ".".join(str(part) for part in sys.version_info[:3])
    print(f"[{time.monotonic() - start_s:6.1f} s] ready: .venv with Python {version}", file=sys.stderr)
    return 0


def due(wanted: dict[str, str], done: dict[str, str]) -> list[str]:
    """The steps to do. A new environment makes all later steps necessary."""
    again = done.get("environment") != wanted["environment"]
    return [step for step, made_from in wanted.items() if again or done.get(step) != made_from]


def bring_up_to_date(steps: Steps, wanted: dict[str, str], done: dict[str, str]) -> None:
    """Does the steps whose inputs changed, in order, and notes each one as soon as it is done."""
    environment = provision.download_environment()

    def finished(step: str) -> None:
        done[step] = wanted[step]
        STAMP.write_text(json.dumps(done))

    if "environment" in due(wanted, done):
        done.clear()
        if not venv_is_usable():
            with steps.step("create .venv"):
                locked.make_environment(steps, VENV)
        finished("environment")
    if "packages" in due(wanted, done):
        locked.installer()
        with steps.step(f"install packages ({locked.download_mb('test')} MB)"):
            locked.install(steps, LOCK, python=VENV_PYTHON)
        finished("packages")
    if "native" in due(wanted, done):
        sources = sum(path.suffix in (".cpp", ".cu", ".pyx") for path in native_sources())
        with steps.step(f"compile the native modules ({sources} sources)"):
            output = steps.run([VENV_PYTHON, "setup.py", "build_ext", "--inplace"], environment=environment)
            steps.run([VENV_PYTHON, "-m", "tests.harness.validation"], environment=environment)
        for line in output.splitlines():
            if line.startswith("cuda:"):
                print(f"             {line}", file=sys.stderr)
        finished("native")
    if "install" in due(wanted, done):
        with steps.step("install kvstrata in place"):
            pip_install = [VENV_PYTHON, "-m", "pip", "install", "--quiet"]
            steps.run(
                [*pip_install, "--no-build-isolation", "--no-deps", "--editable", "."],
                environment=environment,
            )
            # The package's metadata alone, for a Python that takes the package from src (see vllm_env.py).
            METADATA.mkdir(parents=True, exist_ok=True)
            steps.run([VENV_PYTHON, "setup.py", "egg_info", "--egg-base", METADATA], environment=environment)
        finished("install")


if __name__ == "__main__":
    sys.exit(main())
