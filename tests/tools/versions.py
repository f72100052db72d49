"""Runs the connector in every supported version of vLLM, and lets engines of unlike versions read each other's records.

    make test-versions               every version
    make test-versions VERSIONS="0.30.0 0.32.0"

All engines that run for real use one server, one after another: each computes and stores prompts, hits them, hits them
again after a SIGKILL of the server, and then hits the prompts that the earlier versions have stored.  Tokens must be
those that were computed without a hit.  At the end, an engine with blocks of another size, whose layout facts differ,
must hit nothing.  Versions without a wheel for a CPU are checked by their Python (`tests/vllm/test_versions.py`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.server_process import ServerProcess
from tests.tools import vllm_python
from tests.tools.families import Family, Way, draw_lengths
from tests.tools.provision import ROOT

MODEL = "19m"
OTHER_BLOCKS = {"block_size": 64}


def run_for_real(versions: Sequence[str], lengths: Sequence[int], folder: Path) -> Iterator[tuple[str, Way]]:
    """(version, how one way of hitting went), as each ends. Raises AssertionError if storing changes the tokens."""
    with ServerProcess(folder / "server", l1_mb=256) as server:
        server.start()
        stored: list[tuple[str, Family]] = []
        for version in versions:
            in_front = vllm_python.on_path(version)
            family = Family(MODEL, lengths, folder / version, seed=version, in_front=in_front)
            with family.engine(server) as vllm:
                family.compute(vllm)
                yield version, family.load(vllm, "its own records")
                server.kill()
                server.start()
                yield version, family.load(vllm, "after a SIGKILL of the server")
                for other, prompts in stored:
                    yield version, prompts.load(vllm, f"records of {other}")
            stored.append((version, family))
        last = versions[-1]
        family = Family(
            MODEL, lengths, folder / "other", in_front=vllm_python.on_path(last), options=OTHER_BLOCKS
        )
        with family.engine(server) as vllm:
            for other, prompts in stored:
                yield last, prompts.load(vllm, f"records of {other}, with other facts")


def as_it_should(way: Way) -> bool:
    """Whether all prompts were hit with the same tokens; with other facts, whether none was hit at all."""
    if not way.name.endswith("with other facts"):
        return way.good
    return way.prompts == way.same_tokens == len(way.wrong) > 0 and all(
        ": 0 hit," in text for text in way.wrong
    )


def run_python(version: str) -> tuple[bool, str]:
    """Run the checks that need only this version's Python; returns whether all pass, and pytest's summary."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/vllm/test_versions.py", "-k", version]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, vllm_python.EVERY: "all"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    return done.returncode == 0, lines[-1] if lines else done.stderr[-500:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = (*vllm_python.CPU, *vllm_python.PYTHON_ONLY)
    parser.add_argument("versions", nargs="*", default=[], help=f"of {', '.join(every)}; default: all")
    parser.add_argument("--lengths", type=int, default=3, help="number of prompts of each version")
    parser.add_argument("--seed", type=int, default=2026, help="of the lengths")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.versions) - set(every)):
        parser.error(f"versions: {', '.join(unknown)}: must be of {', '.join(every)}")
    wanted = arguments.versions or every
    bad = 0
    for version in wanted:
        good, summary = run_python(version)
        bad += not good
        print(f"{version:8} {'checks of its Python':46} {summary}", flush=True)
    real = [version for version in vllm_python.CPU if version in wanted]
    if real:
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            for version, way in run_for_real(
                real, draw_lengths(arguments.lengths, arguments.seed), Path(folder)
            ):
                good = as_it_should(way)
                bad += not good
                print(
                    f"{version:8} {way.name:46} {way.prompts} prompts, {way.whole_hits} hit all whole chunks, "
                    f"{way.same_tokens} with the same tokens"
                    + "".join(f"\n    {text}" for text in way.wrong if not good),
                    flush=True,
                )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
