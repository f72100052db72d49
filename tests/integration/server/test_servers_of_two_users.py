"""Tenants that do not trust each other run as two users with a server each: neither reaches the other's L1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.memory.segment_files import EXTENTS, INDEX, SESSIONS_LOCK
from tests.harness.cache_engine import CHUNK_TOKENS
from tests.harness.server_process import ServerProcess

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become two other users"
    ),
]

UIDS = {"blue": 64_001, "green": 64_002}
# An engine of one tenant uses its own server, then tries every way to the other one.
ENGINE = """
import os, socket, sys
from pathlib import Path
from tests.harness.cache_engine import CacheEngine, prompt
own, theirs, segment, server, *names = sys.argv[1:]
def attach(folder):
    with CacheEngine(Path(folder)) as engine:
        engine.connect()
        return engine.stored(prompt(2)), engine.hit(prompt(2))
def connect(name, kind):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.connect(f"{theirs}/{name}")
assert attach(own) == (["stored"] * 2, 2)
ways = {
    "rpc": lambda: connect("rpc.sock", socket.SOCK_STREAM),
    **{name: (lambda name=name: os.open(f"{segment}/{name}", os.O_RDONLY)) for name in names},
    "descriptors": lambda: os.listdir(f"/proc/{server}/fd"),
    "memory": lambda: os.open(f"/proc/{server}/mem", os.O_RDONLY),
    "signal": lambda: os.kill(int(server), 9),
}
for way, go in ways.items():
    try:
        go()
    except PermissionError:
        continue
    sys.exit(f"{way} is open to uid {os.getuid()}")
"""


def as_user(uid: int) -> tuple[str, ...]:
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")


class OfUser:
    """Stands for a host in `ServerProcess`: commands run here, as this user."""

    def __init__(self, uid: int) -> None:
        self.under = as_user(uid)


def test_neither_engine_reaches_the_other_tenants_pool() -> None:
    servers: dict[str, ServerProcess] = {}
    try:
        for name, uid in UIDS.items():
            folder = Path(f"/tmp/kvstrata-run-{os.getpid()}-{name}")
            folder.mkdir(mode=0o700)  # not below tmp_path, which other users cannot enter
            os.chown(folder, uid, uid)
            server = ServerProcess(
                folder,
                l1_mb=64,
                chunk_tokens=CHUNK_TOKENS,
                host=OfUser(uid),  # type: ignore[arg-type]
            )
            servers[name] = server
            server.start()
        for name, other in (("blue", "green"), ("green", "blue")):
            own, theirs = servers[name], servers[other]
            places = (own.socket_dir, theirs.socket_dir, theirs.segment_dir, theirs.ready["pid"])
            arguments = [*map(str, places), INDEX, EXTENTS, SESSIONS_LOCK]
            ran = subprocess.run(
                [
                    *as_user(UIDS[name]),
                    sys.executable,
                    "-c",
                    ENGINE,
                    *map(str, arguments),
                    INDEX,
                    EXTENTS,
                    SESSIONS_LOCK,
                ],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert ran.returncode == 0, ran.stderr
    finally:
        for server in servers.values():
            server.close()
            shutil.rmtree(server.folder)
