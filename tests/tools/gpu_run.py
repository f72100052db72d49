"""`make gpu`: the tests and figures that need an NVIDIA GPU, without a network. Run it with that machine's Python.

Each stage ends within 8 minutes (`ARGS="--seconds 200"`: sooner) and can be started by itself (`make gpu STAGE=2`):

1. the compiled modules and the tests marked `gpu`
2. `kvstrata doctor` and the figures of the pinned pool
3. the figures of the copies
4. the figures of the engine simulator

The machine needs Python 3.11 to 3.13, a compiler, nvcc, the driver, and CuPy for the figures of stages 3 and 4. Other
Python packages that it lacks travel as wheels: `make gpu-pack` on a machine with a network fills build/gpu-pack, from
which this command takes them. Nothing is installed outside build/.

The results go to the folder $OUT, else to build/gpu: gpu-N.json for each stage, and gpu.md for all that were run, the
failures first. The exit status is 1 when a test failed, a figure could not be measured or a stage ran out of time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
TAIL_LINES = 40


class Failure(NamedTuple):
    """A test, a figure or a step that failed."""

    what: str
    message: str


class Outcome(NamedTuple):
    """The results of one stage."""

    failures: list[Failure]
    figures: dict[str, dict[str, Any]]
    """By name, as in build/bench.json."""
    notes: list[str]
    """How many tests passed, which were skipped and why, and the lines of `kvstrata doctor`."""


class Stage(NamedTuple):
    title: str
    run: Callable[[float], Outcome]
    """Takes the moment (monotonic seconds) at which the stage must have ended."""


def main() -> int:
    """Command line."""
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
    PYTEST_ARGUMENTS.extend(arguments.pytest.split())
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for number in [arguments.stage] if arguments.stage else STAGES:
        failed |= run_stage(number, out, arguments.seconds)
    print((out / "gpu.md").read_text())
    return int(failed)


def run_stage(number: int, out: Path, most_s: float = STAGE_S) -> bool:
    """Runs a stage, for `most_s` at most, and writes gpu-N.json and gpu.md; returns whether something failed."""
    stage = STAGES[number]
    begun_s = time.monotonic()
    end_s = begun_s + most_s - INTERRUPT_S
    print(f"== stage {number}: {stage.title}", flush=True)
    failures = prepare(end_s)
    outcome = Outcome([], {}, []) if failures else stage.run(end_s)
    failures += outcome.failures
    found = {
        "stage": number,
        "title": stage.title,
        "took_s": round(time.monotonic() - begun_s, 1),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "failures": [failure._asdict() for failure in failures],
        "figures": outcome.figures,
        "notes": outcome.notes,
    }
    (out / f"gpu-{number}.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "gpu.md").write_text(page(sorted(out.glob("gpu-[0-9].json"))))
    print(f"   {len(failures)} failures, {len(outcome.figures)} figures, {found['took_s']:.0f} s", flush=True)
    return bool(failures)


def page(results: Iterable[Path]) -> str:
    """The Markdown page of all stages that were run: failures first, then figures, then notes."""
    stages = [json.loads(path.read_text()) for path in results]
    lines = ["# Results of `make gpu`", ""]
    for found in stages:
        lines.append(
            f"- Stage {found['stage']}, {found['title']}: {len(found['failures'])} failures, "
            f"{len(found['figures'])} figures, {found['took_s']:.0f} s, Python {found['python']}"
        )
    lines += ["", "## Failures", ""]
    for found in stages:
        for failure in found["failures"]:
            lines += [f"### {failure['what']}", "", "```", failure["message"].rstrip(), "```", ""]
    if not any(found["failures"] for found in stages):
        lines += ["None.", ""]
    lines += ["## Figures", "", "| name | value | ratio | to | target | met |", "|---|---|---|---|---|---|"]
    for found in stages:
        for name, figure in sorted(found["figures"].items()):
            cells = [
                f"{figure['value']:.3g} {figure['unit']}",
                f"{figure['ratio']:.3g}",
                str(figure.get("ratio_to", "")),
                str(figure["target"]),
                "yes" if figure["ok"] else "**no**",
            ]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += ["", "## Notes", ""]
    lines += [f"- {note}" for found in stages for note in found["notes"]]
    return "\n".join(lines).rstrip() + "\n"


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


def prepare(end_s: float) -> list[Failure]:
    """Unpacks the wheels and compiles the modules, unless they are current; returns what stands in the way."""
    wheels = sorted(PACK.glob("**/*.whl"))
    stamp = SITE / ".wheels"
    names = "\n".join(wheel.name for wheel in wheels)
    if wheels and not (stamp.exists() and stamp.read_text() == names):
        shutil.rmtree(SITE, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        done = run([*install, "--no-compile", "--target", SITE, *wheels], end_s)
        if done.failure:
            return [Failure("install the wheels of build/gpu-pack", done.failure)]
        stamp.write_text(names)
    probe = f"from importlib.util import find_spec as f; print(*(n for n in {NEEDED!r} if not f(n)))"
    missing = run([sys.executable, "-c", probe], end_s).output.split()
    if missing:
        return [
            Failure(
                "packages are missing",
                f"{sys.executable} has no {', '.join(missing)}. With a network: `make gpu-pack "
                f"GPU_PYTHON={platform.python_version().rpartition('.')[0]}`, then bring build/gpu-pack here.",
            )
        ]
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = run(build, end_s, KVSTRATA_CUDA="require", KVSTRATA_UCX="off")
    if done.failure:
        return [Failure("compile the native modules", done.failure)]
    METADATA.mkdir(parents=True, exist_ok=True)  # it names the types of L2 adapters
    done = run([sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(METADATA)], end_s)
    return [Failure("write the package's metadata", done.failure)] if done.failure else []


class Done(NamedTuple):
    output: str
    failure: str
    """Empty if the command ended well, otherwise its status and its last lines."""
    timed_out: bool = False


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
        return Done(output, f"not ended when the stage's time was over\n{tail(output)}", True)
    return Done(output, f"exit status {process.returncode}\n{tail(output)}" if process.returncode else "")


def tail(output: str) -> str:
    """The last lines."""
    return "\n".join(output.rstrip().splitlines()[-TAIL_LINES:])


PYTEST_ARGUMENTS: list[str] = []


def tests(end_s: float) -> Outcome:
    """The tests marked `gpu`."""
    report = ROOT / "build" / "gpu-tests.xml"
    report.unlink(missing_ok=True)
    workers = min(4, os.cpu_count() or 1)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", str(workers), "-q", f"--junitxml={report}"]
    done = run([*command, *TESTS, *PYTEST_ARGUMENTS], end_s)
    if not report.exists():
        return Outcome([Failure("the tests marked `gpu`", done.failure or tail(done.output))], {}, [])
    failures, skipped, passed = [], [], 0
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [one for one in case if one.tag in ("failure", "error")]
        left_out = case.find("skipped")
        failures += [Failure(name, tail(one.text or one.get("message") or "")) for one in bad]
        if left_out is not None:
            skipped.append(f"{name} was skipped: {left_out.get('message')}")
        passed += not bad and left_out is None
    if done.failure and (done.timed_out or not failures):
        failures.append(Failure("the tests marked `gpu`", done.failure))
    if not passed and not failures:
        failures.append(Failure("the tests marked `gpu`", "none of them ran:\n" + "\n".join(skipped[:3])))
    return Outcome(failures, {}, [f"{passed} tests marked `gpu` passed", *skipped])


def doctor(end_s: float) -> list[str]:
    """The lines of `kvstrata doctor` about GPUs."""
    done = run([sys.executable, "-m", "kvstrata", "doctor"], end_s)
    return [line.strip() for line in done.output.splitlines() if "GPU" in line or "NUMA" in line]


def figures(*names: str) -> Callable[[float], Outcome]:
    """A stage that runs these benchmarks."""

    def stage(end_s: float) -> Outcome:
        notes = doctor(end_s) if "gpu_pool" in names else []
        failures, found = [], {}
        for name in names:
            started_s = time.time()
            done = run([sys.executable, "-m", "benchmarks.run", name], end_s)
            if done.failure:
                failures.append(Failure(f"the benchmark {name}", done.failure))
                continue
            results = ROOT / "build" / "bench.json"
            if results.stat().st_mtime >= started_s:
                merged = json.loads(results.read_text())
                found |= {
                    key: value for key, value in merged.items() if key.startswith("gpu_") and key not in found
                }
        return Outcome(failures, found, notes)

    return stage


STAGES = {
    1: Stage("tests marked `gpu`", tests),
    2: Stage("doctor, pinned pool", figures("gpu_pool")),
    3: Stage("copies", figures("gpu_copies")),
    4: Stage("engine simulator", figures("gpu_engine")),
}


if __name__ == "__main__":
    raise SystemExit(main())
