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
import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "build" / "gpu-pack"
METADATA = ROOT / "build" / "metadata"
SITE = ROOT / "build" / f"gpu-site-{sys.implementation.cache_tag}"
STAGE_S = 480.0
INTERRUPT_S = 15.0
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", nargs="?", type=int, choices=STAGES, help="one stage; all without it")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="more arguments for pytest, in one word")
    parser.add_argument(
        "--seconds",
        type=float,
        default=STAGE_S,
        metavar="S",
        help="the most that a stage takes (%(default).0f)",
    )
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for number in [arguments.stage] if arguments.stage else STAGES:
        more = arguments.pytest.split() if number == 1 else []
        failed |= run_stage(number, out, arguments.seconds, more)
    return int(failed)


def run_stage(number: int, out: Path, most_s: float = STAGE_S, more: Sequence[str] = ()) -> bool:
    """Runs a stage, for `most_s` at most; returns whether something failed."""
    end_s = time.monotonic() + most_s - INTERRUPT_S
    print(f"== stage {number}", flush=True)
    if wrong := prepare(end_s):
        text, failed = wrong, True
    else:
        done = run([sys.executable, *STAGES[number], *more], end_s)
        text, failed = done.output + done.failure, bool(done.failure)
    (out / f"gpu-{number}.txt").write_text(text + "\n")
    figures = ROOT / "build" / "bench.json"
    if number > 1 and figures.exists():
        shutil.copy(figures, out)
    print(text, flush=True)
    return failed


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


def prepare(end_s: float) -> str:
    """Unpacks the wheels and compiles the modules, unless they are current; returns what stands in the way."""
    wheels = sorted(PACK.glob("**/*.whl"))
    stamp = SITE / ".wheels"
    names = "\n".join(wheel.name for wheel in wheels)
    if wheels and not (stamp.exists() and stamp.read_text() == names):
        shutil.rmtree(SITE, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        done = run([*install, "--no-compile", "--target", SITE, *wheels], end_s)
        if done.failure:
            return f"the wheels of build/gpu-pack cannot be installed: {done.output}"
        stamp.write_text(names)
    probe = f"from importlib.util import find_spec as f; print(*(n for n in {NEEDED!r} if not f(n)))"
    missing = run([sys.executable, "-c", probe], end_s).output.split()
    if missing:
        return (
            f"{sys.executable} has no {', '.join(missing)}. With a network: `make gpu-pack "
            f"GPU_PYTHON={platform.python_version().rpartition('.')[0]}`, then bring build/gpu-pack here."
        )
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = run(build, end_s, KVSTRATA_CUDA="require")
    if done.failure:
        return f"the native modules cannot be compiled: {done.output}"
    METADATA.mkdir(parents=True, exist_ok=True)  # it names the types of L2 adapters
    done = run([sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(METADATA)], end_s)
    return f"the package's metadata cannot be written: {done.output}" if done.failure else ""


class Done(NamedTuple):
    output: str
    failure: str
    """Empty if the command ended well."""


def run(command: Sequence[str | Path], end_s: float, **variables: str) -> Done:
    """Runs a command of a stage; kills the processes that are left of it when the stage's time is over."""
    words = [os.fspath(word) for word in command]
    print(f"   $ {' '.join(words)[:160]}", flush=True)
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**environment(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        # pytest writes its report when it is interrupted.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Done(output, "not ended when the stage's time was over")
    return Done(output, f"exit status {process.returncode}" if process.returncode else "")


if __name__ == "__main__":
    raise SystemExit(main())
