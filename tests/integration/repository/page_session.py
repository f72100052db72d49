"""Carries out commands of a page one after the other, where no other server runs, and prints what each printed as JSON.

Runs in a container (tests/harness/namespaces.py): a page's ports, folders and addresses are free there.

A server or controller goes on in the background; its output is what it has logged at the end of the session.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

READY_S, COMMAND_S = 60, 120
STAYS = ("lmcache-server", "lmcache-controller")
ADDRESSES = ("10.0.0.1", "10.0.0.2")
"""Addresses of this host on the pages."""


def main() -> None:
    """The commands are the arguments. PID in a command is the process of the newest server's ready line."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in ADDRESSES:
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    logs: dict[str, Path] = {}
    servers: list[subprocess.Popen[bytes]] = []
    said: dict[str, str] = {}
    for command in sys.argv[1:]:
        if command.startswith(STAYS) and "--check" not in command:
            logs[command] = log = Path(os.environ["HOME"]) / f"log-{len(logs)}"
            with log.open("wb") as output:
                servers.append(
                    subprocess.Popen(["sh", "-c", f"exec {command}"], stdout=output, stderr=output)
                )
            until_ready(log, servers[-1], 1, member="--controller-url" in command)
            continue
        newest = list(logs.values())[-1] if logs else None
        if newest is not None and command.startswith("kill "):
            subprocess.run(command.replace("PID", pids(newest)[-1]), shell=True, check=True)
            until_ready(newest, servers[-1], len(pids(newest)) + 1)
            continue
        done = subprocess.run(
            command,
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
        )
        said[command] = done.stdout if done.returncode == 0 else f"status {done.returncode}\n{done.stdout}"
    for server in reversed(servers):
        server.send_signal(signal.SIGTERM)
        server.wait()
    print(json.dumps({**said, **{command: log.read_text() for command, log in logs.items()}}))


def pids(log: Path) -> list[str]:
    return re.findall(r"kvstrata\.\w+ ready .*?\bpid=(\d+)", log.read_text())


def until_ready(log: Path, server: subprocess.Popen[bytes], times: int, *, member: bool = False) -> None:
    """Wait until the log says so often that the server is ready, and, for a `member`, that a controller knows it."""
    ends_s = time.monotonic() + READY_S
    while len(pids(log)) < times or (member and " member " not in log.read_text()):
        if server.poll() is not None or time.monotonic() > ends_s:
            raise SystemExit(f"{server.args} is not ready:\n{log.read_text()}")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
