"""The parts that `make soak` and `make chaos` share: the command line, the journal, the verdict."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tools.provision import ROOT

ENTRIES_SHOWN = 20


class Journal:
    """Counts and failures of a run, and a line in a file for each event. Any thread may use it."""

    def __init__(self, path: Path, seed: int, minutes: float) -> None:
        self.seed = seed
        self.minutes = minutes
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.numbers: dict[str, Any] = {}
        self.begin()
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def begin(self) -> None:
        """Start the time; called when the servers under test are running."""
        self._begun_s = time.monotonic()
        self._ends_s = self._begun_s + 60 * self.minutes

    @property
    def over(self) -> bool:
        return bool(self.failures) or time.monotonic() >= self._ends_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def note(self, what: str, **more: Any) -> None:
        with self._lock:
            self.counts[what] += 1
            self._file.write(json.dumps({"at_s": round(self.elapsed_s, 3), "what": what, **more}) + "\n")
            self._file.flush()

    def add(self, what: str, count: int) -> None:
        """Add to a count, without a line in the file."""
        with self._lock:
            self.counts[what] += count

    def fail(self, what: str) -> None:
        self.note("failure", message=what)
        with self._lock:
            self.failures.append(what)

    def close(self) -> None:
        self._file.close()

    def verdict(self) -> dict[str, Any]:
        return {
            "passed": not self.failures,
            "seed": self.seed,
            "minutes": round(self.elapsed_s / 60, 2),
            "counts": dict(sorted(self.counts.items())),
            "numbers": self.numbers,
            "failures": self.failures,
        }


def command(name: str, description: str, run: Callable[[Journal, random.Random], None]) -> int:
    """Run an ordeal; exit status 0 when it passed. The verdict goes to build/NAME/verdict.json."""
    parser = argparse.ArgumentParser(
        prog=f"make {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="seed of all random choices (default: a new one)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / name, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.minutes <= 0:
        parser.error(f"--minutes: {arguments.minutes:g}, must be greater than 0")
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    journal = Journal(arguments.out / "journal.jsonl", seed, arguments.minutes)
    print(f"{name}: seed {seed}, {arguments.minutes:g} minutes, journal in {arguments.out}", flush=True)
    try:
        run(journal, random.Random(seed))
    except KeyboardInterrupt:
        journal.fail("interrupted")
    finally:
        journal.close()
    found = journal.verdict()
    (arguments.out / "verdict.json").write_text(json.dumps(found, indent=1) + "\n")
    for what, count in [*found["counts"].items(), *found["numbers"].items()]:
        print(f"  {what:<32}{count}")
    for failure in journal.failures[:ENTRIES_SHOWN]:
        print(f"  FAILED: {failure}", file=sys.stderr)
    print(f"{name}: {'passed' if found['passed'] else 'FAILED'} (seed {seed})", flush=True)
    return 0 if found["passed"] else 1
