"""Cython in one process for all modules of a build: the declarations that modules share are read once.

python translator.py     reads a command line of Cython, as a JSON list, from each line of standard input, and
                         answers on standard output with a JSON list: whether it succeeded, and the text it printed
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Translator:
    """Starts the process with the first command. Thread-safe; commands run one at a time. The caller closes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()

    def run(self, arguments: Sequence[str]) -> tuple[bool, str]:
        """Runs `cython ARGUMENTS`; returns whether it succeeded, and what it printed."""
        with self._turn:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, __file__],
                    cwd=self._folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            try:
                print(json.dumps([*arguments]), file=process.stdin, flush=True)
                answer: Any = json.loads(process.stdout.readline() or '[false, "cython ended"]')
            except BrokenPipeError:
                answer = [False, "cython ended"]
            return answer[0], answer[1]

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def serve() -> None:
    from Cython.Compiler.Main import main

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        sys.argv = ["cython", *json.loads(line)]
        with tempfile.TemporaryFile("w+") as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            try:
                main(command_line=1)
                succeeded = True
            except SystemExit as end:
                succeeded = not end.code
            sys.stdout.flush()
            sys.stderr.flush()
            printed.seek(0)
            print(json.dumps([succeeded, printed.read()]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
