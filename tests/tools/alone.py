"""Runs the tests that failed once more, each with nothing beside it: what fails alone too has failed.

`make test` calls it with pytest's exit status.  Tests with real processes wait for engines and servers that share two
cores with those of other tests; one that fails there and passes alone is named, and is worth a look, but does not
fail the run.  A test that starts no process has no such excuse, nor have many failures at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 8
"""Failed tests that a busy machine can explain, at most."""
EXCUSED = ("tests/conformance/", "tests/fault/", "tests/gpu/", "tests/integration/", "tests/vllm/")
"""Where the tests with real processes are."""
TESTS_FAILED = 1
"""pytest's exit status after a whole run in which a test failed."""


def main(status: int, *options: str) -> int:
    """Exit status of the run, whose pytest ended with `status` and noted the failed tests in its cache."""
    if status != TESTS_FAILED:
        return status
    failed = list(json.loads(Path(".pytest_cache/v/cache/lastfailed").read_text()))
    if not 0 < len(failed) <= MOST or not all(name.startswith(EXCUSED) for name in failed):
        return status
    print(f"\n{len(failed)} tests failed beside others; each runs once more, alone", flush=True)
    ended = [
        subprocess.run([sys.executable, "-m", "pytest", "-n0", *options, name], check=False)
        for name in failed
    ]
    again = max(done.returncode for done in ended)
    if not again:
        print("failed beside other tests, and passed alone:", *failed, sep="\n  ", flush=True)
    return again


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
