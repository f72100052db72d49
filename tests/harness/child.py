"""A child process that takes requests as JSON lines on its stdin and answers on its stdout.

The child runs a module that calls `serve(handlers)`; besides replies the child may send events at any time.  Whatever
happens, the `with` block of a `Child` leaves no process behind.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.harness.signals import send

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 500.0
"""A child that has sent nothing for this time has failed; the child itself waits 120 s for an event at most."""


class ChildError(Exception):
    """The child answered with an error; `code` is a KvstrataError's code or the class name of another exception."""

    def __init__(self, code: str, message: str, field: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field


class ChildEnded(Exception):
    """The child closed its stdout; the message holds the end of its stderr."""


class Child:
    """A child that runs `python -m module arguments`, through the command `under` if given (`unshare …`, `setpriv …`).

    `python` is another Python than ours.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        under: Sequence[str] = (),
        log: Path,
        environment: Mapping[str, str] | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self._log = log
        self._buffer = b""
        with open(log, "ab") as stderr:
            self._process = subprocess.Popen(
                [*under, str(python), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        try:
            self.pid: int = self.event("started")["pid"]
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def ask(self, op: str, **arguments: Any) -> Any:
        """Return the handler's result. Raises ChildError when the handler raised, ChildEnded when the child ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildEnded(self._tail()) from error
        while True:
            line = self._line()
            if "event" in line:
                self.events.append(line)
            elif "error" in line:
                raise ChildError(line["error"], line["message"], line["field"])
            else:
                return line["reply"]

    def event(self, name: str) -> dict[str, Any]:
        """Take the oldest event of this name, and wait for it if none has come. Raises ChildEnded."""
        while True:
            for index, event in enumerate(self.events):
                if event["event"] == name:
                    return self.events.pop(index)
            line = self._line()
            assert "event" in line, line
            self.events.append(line)

    def signal(self, number: int) -> None:
        """Send a signal to the child itself, not to the command that it runs under."""
        send(self.outer_pid(), number)

    def outer_pid(self) -> int:
        """Return the child's pid in our PID namespace; `pid` is its pid in the child's namespace."""
        pid = self._process.pid
        while True:  # `unshare --fork` runs the child in a process of its own
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if not children or b"unshare" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
            pid = int(children[0])

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def finish(self) -> int:
        """Close the child's stdin, which asks it to end in order; return its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.wait()

    def wait(self) -> int:
        """Wait for the process to end by itself; return its exit status."""
        return self._process.wait(HANG_S)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], HANG_S)[0]:
                raise ChildEnded(f"no answer for {HANG_S} s\n{self._tail()}")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise ChildEnded(self._tail())
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


def tell(event: str, **values: Any) -> None:
    """Send an event to the parent (called in the child)."""
    _print({"event": event, **values})


def answer(line: bytes, handlers: dict[str, Callable[..., Any]]) -> None:
    """Call the handler that a line asks for and send its result or its error (called in the child)."""
    request = json.loads(line)
    try:
        reply = handlers[request.pop("op")](**request)
    except Exception as error:
        code = getattr(error, "code", type(error).__name__)
        _print({"error": code, "message": str(error), "field": getattr(error, "field", "")})
    else:
        _print({"reply": reply})


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """Answer until stdin ends (called in the child)."""
    tell("started", pid=os.getpid())
    for line in sys.stdin.buffer:
        answer(line, handlers)


def _print(value: dict[str, Any]) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")
