"""A child process that is asked by JSON lines on its stdin and answers on its stdout.

The child is a module with `serve(handlers)`; besides replies it may print events at any time.  Whatever
happens, `Child` leaves no process behind.
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
from types import TracebackType
from typing import Any, Self

from tests.harness.signals import send

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 60.0
"""A child that says nothing for so long has failed; no test waits for this."""


class ChildError(Exception):
    """The child answered with an error: a KvstrataError's code, or the class name of another exception."""

    def __init__(self, code: str, message: str, field: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field


class ChildEnded(Exception):
    """The child closed its stdout; the message holds the end of its stderr."""


class Child:
    """`python -m module arguments`, after an optional command that it runs under (`unshare …`, `setpriv
    …`).
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        under: Sequence[str] = (),
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self._log = log
        self._buffer = b""
        with open(log, "ab") as stderr:
            self._process = subprocess.Popen(
                [*under, sys.executable, "-m", module, *arguments],
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
        """The handler's result. Raises ChildError when it raised, ChildEnded when the process is gone."""
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
        """The oldest event of that name not taken yet, waiting for it if need be."""
        while True:
            for index, event in enumerate(self.events):
                if event["event"] == name:
                    return self.events.pop(index)
            line = self._line()
            assert "event" in line, line
            self.events.append(line)

    def signal(self, number: int) -> None:
        """Sends a signal to the child itself (not to the command it runs under)."""
        send(self.outer_pid(), number)

    def outer_pid(self) -> int:
        """The child's pid as this process sees it; `pid` is what the child sees itself."""
        pid = self._process.pid
        while True:  # the command it runs under may have forked
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if not children or b"unshare" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
            pid = int(children[0])

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def finish(self) -> int:
        """Ends stdin, which asks the child to end in order; its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.wait()

    def wait(self) -> int:
        """Waits for the process to end by itself; its exit status."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """In the child: prints an event."""
    _print({"event": event, **values})


def answer(line: bytes, handlers: dict[str, Callable[..., Any]]) -> None:
    """In the child: calls the handler that a line asks for and prints its result or its error."""
    request = json.loads(line)
    try:
        reply = handlers[request.pop("op")](**request)
    except Exception as error:
        code = getattr(error, "code", type(error).__name__)
        _print({"error": code, "message": str(error), "field": getattr(error, "field", "")})
    else:
        _print({"reply": reply})


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """In the child: answers until stdin ends."""
    tell("started", pid=os.getpid())
    for line in sys.stdin.buffer:
        answer(line, handlers)


def _print(value: dict[str, Any]) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")
