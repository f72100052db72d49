"""`make gpu`: the tests and figures that need an NVIDIA GPU, without a network. Run it with that machine's Python.

Each stage ends within 8 minutes (`ARGS="--seconds 200"`: sooner) and can be started by itself (`make gpu STAGE=2`): the
compiled modules and the tests marked `gpu`, then the figures of the pinned pool and of the copies.

The machine needs Python 3.11 to 3.13, a compiler, nvcc, the driver, and CuPy for the figures of stage 3. Other
Python packages that it lacks travel as wheels: `make gpu-pack` on a machine with a network fills build/gpu-pack, from
which this command takes them. Nothing is installed outside build/.

What each stage printed goes to gpu-N.txt in $OUT, else in build/gpu, the figures to bench.json there. The exit
status is 1 when a test failed, a figure could not be measured or a stage ran out of time.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "build" / "gpu-pack"
METADATA = ROOT / "build" / "metadata"
SITE = ROOT / "build" / f"gpu-site-{sys.implementation.cache_tag}"
STAGE_S, INTERRUPT_S = 480.0, 15.0
TESTS = ("tests/gpu", "tests/integration/connectors/test_gpu_engine.py")
NEEDED = (
    *("msgspec", "zmq", "uvloop", "prometheus_client", "yaml", "fastapi", "uvicorn"),
    *("pytest", "pytest_asyncio", "xdist", "hypothesis", "httpx", "Cython", "setuptools"),
)
STAGES = {
    1: ["-m", "pytest", "-m", "gpu", "-n", str(min(4, os.cpu_count() or 1)), "-q", "-rs", *TESTS],
    2: ["-m", "benchmarks.run", "gpu_pool"],
    3: ["-m", "benchmarks.run", "gpu_copies"],
}
"""The arguments of Python in each stage."""


class StageFailed(Exception):
    """A command of a stage failed; the message has what it printed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", nargs="?", type=int, choices=STAGES, help="one stage; all without it")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="more arguments for pytest, in one word")
    most_s = "the most seconds that a stage takes (%(default).0f)"
    parser.add_argument("--seconds", type=float, default=STAGE_S, metavar="S", help=most_s)
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for number in [arguments.stage] if arguments.stage else STAGES:
        print(f"== stage {number}", flush=True)
        end_s = time.monotonic() + arguments.seconds - INTERRUPT_S
        try:
            prepare(end_s)
            more = arguments.pytest.split() if number == 1 else []
            text = run([sys.executable, *STAGES[number], *more], end_s)
        except StageFailed as error:
            text, failed = str(error), True
        (out / f"gpu-{number}.txt").write_text(text + "\n")
        figures = ROOT / "build" / "bench.json"
        if number > 1 and figures.exists():
            shutil.copy(figures, out)
        print(text, flush=True)
    return int(failed)


def environment() -> dict[str, str]:
    """The environment of a stage's processes: our sources and the packages of the wheels, no user site."""
    path = [str(ROOT / "src"), str(METADATA), str(ROOT), *([str(SITE)] if SITE.exists() else [])]
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])]),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def prepare(end_s: float) -> None:
    """Unpack the wheels and compile the modules, unless they are current. Raises StageFailed."""
    wheels = sorted(PACK.glob("*.whl"))
    stamp = SITE / ".wheels"
    names = "\n".join(wheel.name for wheel in wheels)
    if wheels and not (stamp.exists() and stamp.read_text() == names):
        shutil.rmtree(SITE, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        run([*install, "--no-compile", "--target", SITE, *wheels], end_s)
        stamp.write_text(names)
    probe = f"from importlib.util import find_spec as f; print(*(n for n in {NEEDED!r} if not f(n)))"
    if missing := run([sys.executable, "-c", probe], end_s).split():
        raise StageFailed(
            f"{sys.executable} has no {', '.join(missing)}. With a network: `make gpu-pack "
            f"GPU_PYTHON={platform.python_version().rpartition('.')[0]}`, then bring build/gpu-pack here."
        )
    setup = [sys.executable, "setup.py", "--quiet"]
    run([*setup, "build_ext", "--inplace"], end_s, KVSTRATA_CUDA="require")
    METADATA.mkdir(parents=True, exist_ok=True)  # it names the types of L2 adapters
    run([*setup, "egg_info", "--egg-base", METADATA], end_s)


def run(command: Sequence[str | Path], end_s: float, **variables: str) -> str:
    """Run a command of a stage; return what it prints. Raises StageFailed.

    When the stage's time is over, the command and all its processes are interrupted, so that pytest writes its report,
    and killed a little later.
    """
    print(f"   $ {' '.join(map(str, command))[:160]}", flush=True)
    left_s = max(1.0, end_s - time.monotonic())
    done = subprocess.run(
        ["timeout", "--signal=INT", f"--kill-after={INTERRUPT_S}", f"{left_s:.0f}", *command],
        cwd=ROOT,
        env={**environment(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise StageFailed(f"{done.stdout}exit status {done.returncode} (124: the stage's time was over)")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
