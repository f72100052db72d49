"""The parts that all commands which prepare an environment share: progress lines, a log, retries, folders, locks.

Only the standard library is used: this runs before anything is installed. Nothing outside the clone and the
cache folder is changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOWNLOAD_ATTEMPTS = 3
TAIL_LINES = 25
COMPLETE = ".complete"
"""The file that `made` writes last into a folder."""


class Unavailable(Exception):
    """What tests or benchmarks need cannot be had here; the message says why and, if it can be, what installs it."""


class StepFailed(Exception):
    """A command of a step failed for good; the message has the command, its last lines, and the log."""


def cache_root() -> Path:
    """The folder for files that all clones share: `$KVSTRATA_CACHE`, else a folder in the XDG cache folder."""
    named = os.environ.get("KVSTRATA_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "kvstrata"
    home = os.environ.get("HOME")
    if not home:
        # Without a home folder the clone itself is the one place that surely belongs to the caller.
        return ROOT / "build" / "cache"
    return Path(home) / ".cache" / "kvstrata"


def download_environment() -> dict[str, str]:
    """The environment for pip: its cache inside ours, no questions, no version check, no user site."""
    environment = dict(os.environ)
    environment.setdefault("PIP_CACHE_DIR", str(cache_root() / "pip"))
    environment.update(
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1",
        PIP_ROOT_USER_ACTION="ignore",
        PIP_RETRIES="5",
        PYTHONNOUSERSITE="1",
    )
    environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONHOME", None)
    return environment


@contextlib.contextmanager
def exclusive(lock_path: Path, waiting: str) -> Iterator[None]:
    """Holds an exclusive lock on `lock_path`; prints `waiting` when somebody else has it. The file stays."""
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with open(lock_path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


pause = time.sleep
"""Called between two attempts of a download. Tests replace this name alone, because subprocess sleeps too."""


class Steps:
    """Prints one line a step with the seconds it took and writes the output of every command to one log."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(log_path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by close)
        self._write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(sys.argv)}")

    def close(self) -> None:
        self._log.close()

    def _write(self, line: str) -> None:
        self._log.write(line + "\n")
        self._log.flush()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Times the body; the line appears when the body ends, whether well or not."""
        begin_s = time.monotonic()
        if sys.stderr.isatty():
            print(f"           {what} ...", end="\r", file=sys.stderr, flush=True)
        self._write(f"---- {what}")
        outcome = "FAILED: "
        try:
            yield
            outcome = ""
        finally:
            took = time.monotonic() - begin_s
            print(f"[{took:6.1f} s] {outcome}{what}    ", file=sys.stderr, flush=True)

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        attempts: int = 1,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        timeout_s: float = 3600.0,
    ) -> str:
        """Runs a command, logs and returns its output, and tries again where `attempts` allows.

        Raises StepFailed when the last attempt fails. Waits 2, 4, ... seconds between attempts.
        """
        words = [os.fspath(word) for word in command]
        tail = ""
        for attempt in range(1, attempts + 1):
            self._write(f"$ {shlex.join(words)}")
            try:
                done = subprocess.run(
                    words,
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    timeout=timeout_s,
                    check=False,
                )
                output, status = done.stdout, f"exit status {done.returncode}"
                if done.returncode == 0:
                    self._write(output)
                    return output
            except FileNotFoundError as error:
                output, status = "", str(error)
            except subprocess.TimeoutExpired as error:
                partial = error.stdout or b""
                output = partial.decode(errors="replace") if isinstance(partial, bytes) else partial
                status = f"stopped after {timeout_s:.0f} s"
            self._write(f"{output}({status}, attempt {attempt} of {attempts})")
            tail = "\n".join([*output.splitlines()[-TAIL_LINES:], f"({status})"])
            if attempt < attempts:
                pause(2**attempt)
        raise StepFailed(f"{shlex.join(words)}\n{tail}\nThe whole output is in {self._log_path}")


def made(folder: Path, what: str, make: Callable[[Steps], object], log: str) -> Path:
    """`folder`, which one process makes while others wait for it. Raises what `make` raises; the folder is then made
    anew by the next call."""
    complete = folder / COMPLETE
    if complete.exists():
        return folder
    with exclusive(folder.with_name(folder.name + ".lock"), f"waiting for another process: {what}"):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            steps = Steps(ROOT / "build" / log)
            try:
                with steps.step(what):
                    make(steps)
            finally:
                steps.close()
            complete.touch()
    return folder


def free_disk_bytes(path: Path) -> int:
    """Free bytes for this user on the file system that holds `path` or its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def available_memory_bytes() -> int:
    """The memory that this process tree may still use: the kernel's estimate, bounded by the cgroup's limit."""
    available = 0
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = Path(limit_path).read_text().strip()
            used = int(Path(used_path).read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            available = min(available, max(0, int(limit) - used))
    return available
