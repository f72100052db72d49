"""`make soak MINUTES=`: runs one server for a long time, with clients that come and go, and measures its growth.

A real server with the embedded disk log, capped so that it evicts. Clients attach, store prompts that share prefixes,
ask for old ones, compare each loaded byte, and leave; a second tier is paused and resumed. Once in a while the
server's memory, descriptors, threads and log are measured. The growth is that from the end of the run's first quarter
to its end. The run fails

- when one byte is wrong or a request never ends;
- when the server's anonymous memory has grown by more than `ANONYMOUS_BYTES` a session;
- when the server has more descriptors or threads than before, with as many clients attached;
- when the server's log has grown by more than `LOG_BYTES` a session;
- when this process, which runs the clients, has more descriptors or threads than before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata.cli import asking
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually
from tests.harness.open_files import open_files
from tests.harness.server_process import ServerProcess
from tests.tools.provision import ROOT

L1_MB = 32
MOST_CLIENTS = 6
MOST_CHUNKS = 32
CONVERSATIONS = 40
SAMPLE_EVERY_S = 5.0
ANONYMOUS_BYTES = 512
LOG_BYTES = 64
SLACK = 2
"""Descriptors and threads that may be there for a moment."""
SLACK_BYTES = 16 << 20
"""Allowed growth of anonymous memory whatever the number of sessions: the index of L2, bounded by L2's capacity."""
LOG_SLACK_BYTES = 64 << 10
"""Pausing and resuming the tier is logged."""


class Journal:
    """Counts and failures of a run, and a line in a file for each event."""

    def __init__(self, path: Path, seed: int, minutes: float) -> None:
        self.seed = seed
        self.minutes = minutes
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.numbers: dict[str, Any] = {}
        self.begin()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self.close = self._file.close

    def begin(self) -> None:
        """Start the time; called when the server under test is running."""
        self._begun_s = time.monotonic()

    @property
    def over(self) -> bool:
        return bool(self.failures) or self.elapsed_s >= 60 * self.minutes

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def note(self, what: str, **more: Any) -> None:
        self.counts[what] += 1
        self._file.write(json.dumps({"at_s": round(self.elapsed_s, 3), "what": what, **more}) + "\n")
        self._file.flush()

    def fail(self, what: str) -> None:
        self.note("failure", message=what)
        self.failures.append(what)

    def verdict(self) -> dict[str, Any]:
        return {
            "passed": not self.failures,
            "seed": self.seed,
            "minutes": round(self.elapsed_s / 60, 2),
            "counts": dict(sorted(self.counts.items())),
            "numbers": self.numbers,
            "failures": self.failures,
        }


class Sample(NamedTuple):
    """Taken while no client is attached and the second tier is paused."""

    at_s: float
    sessions: int
    """So far."""
    anonymous_bytes: int
    descriptors: int
    """Without those of the disk log's files, whose number depends on the log's capacity."""
    threads: int
    log_bytes: int
    own_descriptors: int
    own_threads: int


def sample(journal: Journal, server: ServerProcess) -> Sample:
    """Take a sample. Collects garbage first, because a closed client's descriptors may wait for that."""
    gc.collect()
    status = Path(f"/proc/{server.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return Sample(
        at_s=round(journal.elapsed_s, 1),
        sessions=journal.counts["session"],
        anonymous_bytes=int(fields["RssAnon"].split()[0]) * 1024,
        descriptors=sum(not target.startswith(str(server.folder)) for target in open_files(server.pid)),
        threads=int(fields["Threads"]),
        log_bytes=server.log.stat().st_size,
        own_descriptors=len(os.listdir("/proc/self/fd")),
        own_threads=len(os.listdir("/proc/self/task")),
    )


def judge(samples: list[Sample]) -> list[str]:
    """Compare the last sample with the one at the end of the first quarter; return what has grown too much."""
    last = samples[-1]
    # Threads and caches come with the first sessions.
    first = next(one for one in samples if one is last or (one.at_s >= last.at_s / 4 and one.sessions))
    sessions = max(1, last.sessions - first.sessions)
    failures = []
    for name, per_session, slack in (
        ("anonymous_bytes", ANONYMOUS_BYTES, SLACK_BYTES),
        ("log_bytes", LOG_BYTES, LOG_SLACK_BYTES),
        ("descriptors", 0, SLACK),
        ("threads", 0, SLACK),
        ("own_descriptors", 0, SLACK),
        ("own_threads", 0, SLACK),
    ):
        grown = getattr(last, name) - getattr(first, name)
        allowed = slack + per_session * sessions
        if grown > allowed:
            failures.append(f"{name} grew by {grown} in {sessions} sessions; at most {allowed} is allowed")
    return failures


class Soak:
    """One server and the clients that are attached now."""

    def __init__(self, journal: Journal, draw: random.Random, server: ServerProcess, folder: Path) -> None:
        self._journal = journal
        self._draw = draw
        self._server = server
        self._folder = folder
        self._clients: list[CacheEngine] = []
        self._conversations: list[list[int]] = []
        self._next_token = 0
        self._paused = False
        self.samples: list[Sample] = []

    def run(self) -> None:
        steps = (
            (self._come, 4),
            (self._leave, 3),
            (self._store, 8),
            (self._ask, 12),
            (self._change_tiers, 1),
        )
        names, weights = zip(*steps, strict=True)
        due_s = 0.0
        try:
            while not self._journal.over:
                if self._journal.elapsed_s >= due_s:
                    self._measure()
                    due_s = self._journal.elapsed_s + SAMPLE_EVERY_S
                self._draw.choices(names, weights)[0]()
            if not self._journal.failures:
                self._measure()
        except AssertionError as error:
            self._journal.fail(str(error))
        finally:
            self._all_leave()

    def _measure(self) -> None:
        self._all_leave()
        if self._paused:
            self._change_tiers()
        eventually(
            "the server has let all sessions go",
            lambda: self._server.get("/v1/status")["sessions"]["attached"] == 0,
        )
        found = sample(self._journal, self._server)
        self.samples.append(found)
        self._journal.note("sample", **found._asdict())

    def _come(self) -> None:
        if len(self._clients) < MOST_CLIENTS:
            engine = CacheEngine(self._server.socket_dir, group=self._draw.randbytes(16), num_blocks=256)
            self._clients.append(engine.__enter__().connect())
            self._journal.counts["session"] += 1

    def _leave(self) -> None:
        if self._clients:
            self._clients.pop(self._draw.randrange(len(self._clients))).__exit__()

    def _all_leave(self) -> None:
        while self._clients:
            self._clients.pop().__exit__()

    def _store(self) -> None:
        """Store a new prompt, or an old one with more tokens at its end."""
        if not self._clients:
            return
        known = self._draw.choice(self._conversations) if self._conversations else []
        begin = known if self._draw.random() < 0.5 and len(known) < MOST_CHUNKS * CHUNK_TOKENS // 2 else []
        more = self._draw.randint(1, MOST_CHUNKS // 2) * CHUNK_TOKENS
        prompt = [*begin, *range(self._next_token, self._next_token + more)]
        self._next_token += more
        outcomes = self._draw.choice(self._clients).stored(prompt)
        self._journal.counts["chunks stored"] += outcomes.count("stored")
        self._conversations = [*self._conversations[1 - CONVERSATIONS :], prompt]

    def _ask(self) -> None:
        if self._clients and self._conversations:
            engine, prompt = self._draw.choice(self._clients), self._draw.choice(self._conversations)
            hit = engine.hit(prompt, sync=self._draw.random() < 0.5)
            self._journal.counts["chunks verified"] += hit

    def _change_tiers(self) -> None:
        self._paused = not self._paused
        path = f"/v1/l2/adapters/fs-1/{'pause' if self._paused else 'resume'}"
        asking.ask(self._server.url, asking.Ask(path, {}, "", timeout_s=60))
        self._journal.counts["tiers paused or resumed"] += 1


def run(journal: Journal, draw: random.Random) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstrata-soak-") as name:
        folder = Path(name)
        adapter = {"type": "disk", "base_path": str(folder / "disk"), "capacity_gb": 0.25}
        second = {"type": "fs", "base_path": str(folder / "second"), "capacity_gb": 0.05}
        flags = ("--l2-adapter", json.dumps(adapter), "--l2-adapter", json.dumps(second))
        with ServerProcess(
            folder, l1_mb=L1_MB, l2="embedded", chunk_tokens=CHUNK_TOKENS, flags=flags
        ).started() as server:
            journal.begin()
            soak = Soak(journal, draw, server, folder)
            soak.run()
            for failure in [] if journal.failures else judge(soak.samples):
                journal.fail(failure)
            if not journal.counts["chunks verified"]:
                journal.fail("nothing was hit, so nothing was tested")
            journal.numbers = {"first": soak.samples[0]._asdict(), "last": soak.samples[-1]._asdict()}
            if server.stop():
                journal.fail(f"the server ended with an error:\n{server.log_tail()}")


def command(name: str, says: str | None, run: Callable[[Journal, random.Random], None]) -> int:
    """Run `make NAME`. Exit status 0 when the run passed. The verdict goes to build/NAME/verdict.json."""
    parser = argparse.ArgumentParser(
        prog=f"make {name}", description=says, formatter_class=argparse.RawDescriptionHelpFormatter
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
    for failure in journal.failures:
        print(f"  FAILED: {failure}", file=sys.stderr)
    print(f"{name}: {'passed' if found['passed'] else 'FAILED'} (seed {seed})", flush=True)
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(command("soak", __doc__, run))
