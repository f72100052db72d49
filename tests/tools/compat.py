"""`make compat WITH=commit`: checks that this checkout and an older one understand each other's messages and formats.

The commit is cloned and set up in a temporary folder (`--clone` names one that is set up already). Then

- a server of each commit serves clients of the other one: prompts stored by either are retrieved by both;
- a server of one commit is killed (SIGKILL), and a server of the other commit takes over its pool and then, when the
  pool was removed, its disk log; this happens in both directions.

Prompt lengths and contents are random; every retrieved byte is compared. The exit status is 0 when all steps passed; it
is 1 when a step failed, which is then named.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.child import ROOT, Child
from tests.harness.server_process import ServerProcess, sweep

L1_MB = 512
MOST_CHUNKS = 5
PROMPTS = 3
WAIT_S = 60.0


class Differs(Exception):
    """The two commits do not understand each other; the message names the step."""


def set_up(commit: str, folder: Path) -> Path:
    """Clone this repository at a commit, with its environment; return the clone."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", commit], check=True)
    subprocess.run(["make", "-C", str(clone), "setup"], check=True)
    return clone


class Meeting:
    """A server and clients of two checkouts, and the prompts stored so far."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder = folder
        self.draw = draw
        self.prompts: dict[int, int] = {}
        """Chunks of each prompt by its seed."""
        self._group = 0

    def server(self, clone: Path) -> ServerProcess:
        """Make a server with a pool and a disk log, without starting it."""
        return ServerProcess(self.folder, l1_mb=L1_MB, l2="embedded", python=clone / ".venv/bin/python")

    @contextmanager
    def client(self, server: ServerProcess, clone: Path) -> Iterator[Child]:
        """Run an attached client process until the end of the block."""
        self._group += 1
        log = self.folder / f"client-{self._group}.log"
        arguments = (str(server.socket_dir), str(MOST_CHUNKS), str(self._group))
        with Child("tests.harness.load_client", *arguments, log=log, clone=clone) as child:
            wait_for(lambda: child.ask("connected"), "a client was not served")
            yield child
            child.finish()

    def store(self, client: Child, step: str) -> None:
        """Store prompts of random lengths."""
        for _ in range(PROMPTS):
            seed, chunks = self.draw.randrange(1 << 30), self.draw.randint(1, MOST_CHUNKS)
            outcomes = client.ask("store", seed=seed, chunks=chunks)["outcomes"]
            if set(outcomes) != {"stored"}:
                raise Differs(f"{step}: a store ended with {outcomes}")
            self.prompts[seed] = chunks

    def retrieve_all(self, client: Child, step: str) -> None:
        """Retrieve every prompt stored so far and compare all bytes."""
        for seed, chunks in self.prompts.items():
            found = client.ask("retrieve", seed=seed, chunks=chunks)
            if found["chunks"] != chunks or not found["equal"]:
                raise Differs(f"{step}: {chunks} chunks of prompt {seed} were stored; retrieved: {found}")
        print(f"ok  {step}: {len(self.prompts)} prompts, {sum(self.prompts.values())} chunks", flush=True)


def wait_for(holds: Any, problem: str) -> None:
    """Wait until `holds()` is true. Raises Differs, with `problem` as its message, after `WAIT_S`."""
    give_up_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > give_up_s:
            raise Differs(problem)
        time.sleep(0.05)


def put_chunks(server: ServerProcess) -> int:
    """Return how many chunks the disk log has stored."""
    (adapter,) = server.get("/v1/status")["l2_store"]["adapters"].values()
    return int(adapter["outcomes"].get("stored", 0))


def serve_each_other(meeting: Meeting, clones: dict[str, Path]) -> None:
    """Let clients of both commits use a server of each commit."""
    for name, clone in clones.items():
        meeting.prompts.clear()
        with meeting.server(clone) as server:
            server.start()
            for storing, of in clones.items():
                with meeting.client(server, of) as client:
                    meeting.store(client, f"{storing} client stores to {name} server")
            for reading, of in clones.items():
                with meeting.client(server, of) as client:
                    meeting.retrieve_all(client, f"{reading} client, {name} server, prompts of both")


def take_over(meeting: Meeting, before: tuple[str, Path], after: tuple[str, Path]) -> None:
    """Let a server of the other commit adopt the pool of a killed server, and then open its disk log."""
    meeting.prompts.clear()
    first = meeting.server(before[1])
    second = meeting.server(after[1])
    second.socket_dir, second.segment_dir = first.socket_dir, first.segment_dir
    # The same command line, port included: the default disk log lies in a folder that is named after it.
    second._flags, second._environment, second.port = first._flags, first._environment, first.port
    try:
        first.start()
        with meeting.client(first, before[1]) as client:
            meeting.store(client, f"{before[0]} server")
        wait_for(lambda: put_chunks(first) == sum(meeting.prompts.values()), "the disk log did not store all")
        first.kill()
        if not second.start()["adopted"]:
            raise Differs(f"{after[0]} server did not adopt the pool of a killed {before[0]} server")
        with meeting.client(second, after[1]) as client:
            meeting.retrieve_all(client, f"{after[0]} server adopts the pool of a killed {before[0]} server")
        second.kill()
        second.wipe_segment()
        second.start()
        with meeting.client(second, after[1]) as client:
            meeting.retrieve_all(client, f"{after[0]} server opens the disk log of {before[0]}")
    finally:
        second.close()
        first.close()


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--commit", help="the older commit; cloned and set up in a temporary folder")
    wanted.add_argument("--clone", type=Path, help="a checkout of it that is set up already")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    sweep()
    print(f"seed {options.seed}")
    folder = Path(tempfile.mkdtemp(prefix="compat-", dir=ROOT / "build"))
    try:
        clone = options.clone.resolve() if options.clone else set_up(options.commit, folder)
        clones = {"this": ROOT, "older": clone}
        draw = random.Random(options.seed)
        serve_each_other(Meeting(folder, draw), clones)
        this, older = clones.items()
        take_over(Meeting(folder / "forward", draw), older, this)
        take_over(Meeting(folder / "back", draw), this, older)
    except Differs as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
