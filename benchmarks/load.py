"""`python -m benchmarks.load`: one client that keeps a server busy with lookups while something else is measured.

The client sends `--rate` lookups a second, of all chain keys in the file `--chain`, each followed by its release, to
the cache server, or the same frames to the bare echo.  A line on stdin names the target: `server`, `echo`, or `rest`
for neither.  Each line is answered with the number of lookups since the line before it.  The process ends when its
stdin is closed.  The client waits for each reply before it sends more, so a server that falls behind gets fewer
lookups.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.raw_session import Line, RawSession
from kvstrata.rpc import wire
from kvstrata.types import LayoutIdentity, Slice


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--socket-dir", type=Path, required=True)
    parser.add_argument("--echo", type=Path, required=True)
    parser.add_argument("--layout", required=True, help="LayoutIdentity as JSON")
    parser.add_argument("--slice", required=True, help="Slice as JSON")
    parser.add_argument("--facts", required=True, help="the facts behind its layout, as JSON")
    parser.add_argument("--chain", required=True, type=Path, help="file with the chain keys to look up")
    parser.add_argument("--rate", type=float, required=True)
    arguments = parser.parse_args()
    layout = msgspec.convert(json.loads(arguments.layout), LayoutIdentity)
    chain = arguments.chain.read_bytes()
    slice_ = msgspec.convert(json.loads(arguments.slice), Slice)
    session = RawSession(arguments.socket_dir, layout, slice_, json.loads(arguments.facts))
    echo = Line(arguments.echo, 10.0)
    stdin = sys.stdin.fileno()
    target: Line | None = None
    cycles = 0
    due_s = time.monotonic()
    os.write(1, b"ready\n")
    while True:
        wait_s = None if target is None else max(0.0, due_s - time.monotonic())
        if select.select([stdin], [], [], wait_s)[0]:
            line = os.read(stdin, 4096).decode()
            if not line:
                break
            target = {"server": session.socket, "echo": echo, "rest": None}[line.split()[-1]]
            os.write(1, f"{cycles}\n".encode())
            cycles = 0
            due_s = time.monotonic()
            continue
        assert target is not None
        target.send(session.lookup(chain))
        looked_up = session.last_seq
        reply = target.recv()
        if target is session.socket:
            found = wire.decode_reply(reply)
            assert isinstance(found, wire.LookupReply) and found.n_chunks == len(chain) // 32, found
        target.send(session.release(looked_up))
        target.recv()
        cycles += 1
        due_s = max(due_s + 1 / arguments.rate, time.monotonic() - 1.0)
    session.close()


if __name__ == "__main__":
    main()
