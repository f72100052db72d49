"""A process that starts a holder and gives it three memfds to keep."""

from __future__ import annotations

import os
from pathlib import Path

from kvstrata.memory import holder_client, linux
from tests.harness.child import serve


def keep(path: str, words: list[str], start: bool) -> None:
    """Make a memfd of each word and hand them to the holder; with `start`, start a new holder first."""
    if start:
        holder_client.start(Path(path))
    fds = []
    for word in words:
        fd = linux.create_memfd("test")
        os.write(fd, word.encode())
        fds.append(fd)
    holder_client.keep(Path(path), fds)
    linux.close_all(fds)


if __name__ == "__main__":
    serve({"keep": keep})
