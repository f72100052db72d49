"""Adapters that another user tries to add to a running server: it gains no file, no variable, no code and no KV.

The attacker has another uid and, what is worse, the admin's token.  It runs a Redis of its own that keeps all it hears.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS
from tests.harness.server_process import ServerProcess

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None,
        reason="only root can run a process as another user, by setpriv",
    ),
]

TOKEN = "secret-of-the-admin-0123"
KEY = "-----BEGIN OPENSSH PRIVATE KEY----- b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ"
OTHER_UID = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
ASK = """
import json, sys, urllib.error, urllib.request
url, token, body = sys.argv[1:]
request = urllib.request.Request(url + "/v1/l2/adapters", body.encode(), {"Content-Type": "application/json"})
request.add_header("Authorization", "Bearer " + token)
try:
    with urllib.request.urlopen(request, timeout=300) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.load(error)]))
"""


class Listener:
    """A server of the attacker that answers every command with OK and keeps what it hears."""

    def __init__(self) -> None:
        self.heard = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                taken, _ = self._socket.accept()
                with taken:
                    while part := taken.recv(65536):
                        self.heard += part
                        taken.sendall(b"+OK\r\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def fake_redis() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A private file of the server's user."""
    path = tmp_path / "id_ed25519"
    path.touch(mode=0o600)
    path.write_text(KEY)
    return path


@contextlib.contextmanager
def serving(tmp_path: Path, **settings: str) -> Iterator[ServerProcess]:
    """A server without L2, which the admin's token opens."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    environment = {**os.environ, **settings, "KVSTRATA_HTTP_TOKEN_FILE": str(token), "MY_SECRET": KEY}
    with ServerProcess(
        tmp_path / "server", l1_mb=16, chunk_tokens=CHUNK_TOKENS, environment=environment
    ) as server:
        server.start()
        yield server


def tried(server: ServerProcess, adapter: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    """Status and answer when the other user asks for the adapter."""
    url = f"http://127.0.0.1:{server.ready['http_port']}"
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    body = json.dumps({"adapter": adapter, **more})
    done = subprocess.run(
        [*OTHER_UID, python, "-I", "-c", ASK, url, TOKEN, body],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    status, answer = json.loads(done.stdout)
    return status, answer


def listed(server: ServerProcess) -> list[Any]:
    url = f"http://127.0.0.1:{server.ready['http_port']}/v1/l2/adapters"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return list(json.load(answer)["adapters"])


def refused(server: ServerProcess, adapter: Any, *says: str, code: int = 403, **more: Any) -> None:
    status, answer = tried(server, adapter, **more)
    assert status == code and all(text in answer["message"] for text in says), answer
    assert KEY[:20] not in json.dumps(answer)
    assert listed(server) == []


def test_an_added_directory_lies_below_a_root_and_is_empty_or_ours(tmp_path, key_file):
    roots = tmp_path / "roots"
    foreign, outside = roots / "foreign", tmp_path / "outside"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("years of work")
    outside.mkdir()
    (roots / "link").symlink_to(outside)
    shared = roots / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    theirs = roots / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)

    def disk(path: str) -> dict[str, Any]:
        return {"type": "disk", "base_path": path, "capacity_gb": 0.1}

    with serving(tmp_path, KVSTRATA_L2_RUNTIME_ROOTS=json.dumps([str(roots)])) as server:
        for path, code, *says in (
            (str(outside), 403, "lies below none of the folders", "l2.runtime.roots: add '"),
            (str(tmp_path / "roots2"), 403, "lies below none of the folders"),
            (f"{roots}/a/../../outside", 400, "adapter.base_path: ", "without `..`"),
            (f"{roots}/a\0b", 400, "adapter.base_path: ", "unprintable characters"),
            ("relative/path", 400, "must be an absolute path"),
            (f"{roots}/link", 403, "a symbolic link leads from"),
            (f"{roots}/link/deeper", 403, "a symbolic link leads from"),
            (str(foreign), 403, "is neither empty nor a tier"),
            (str(roots), 403, "is neither empty nor a tier"),
            (f"{foreign}/thesis.txt", 400, "must be a folder"),
            (f"{shared}/new", 403, "other users can replace"),
            (f"{theirs}/new", 403, "other users can replace"),
        ):
            refused(server, disk(path), *says, code=code)
            refused(server, {**disk(path), "type": "fs"}, *says, code=code)
        assert sorted(path.name for path in roots.iterdir()) == ["foreign", "link", "shared", "theirs"]
        assert list(outside.iterdir()) == [] and len(list(foreign.iterdir())) == 1
        status, row = tried(server, disk(f"{roots}/new/log"))
        assert status == 201, row
        status, answer = tried(server, disk(f"{roots}/new/log/inner"))
        assert status == 403 and "holds a tier, which may not contain another" in answer["message"]


def test_by_default_folders_below_the_cache_are_all_that_can_be_added(tmp_path, fake_redis, key_file):
    adapters = (
        ({"type": "resp", "host": "127.0.0.1", "port": fake_redis.port}, 403, "l2.runtime.types: add 'resp'"),
        ({"type": "resp", "password_file": str(key_file)}, 403, "names the place of a secret"),
        (
            {"type": "plugin", "module_path": "os", "class_name": "system", "adapter_params": {}},
            403,
            ".type: ",
        ),
        ({"type": "peer", "controllers": ["tcp://127.0.0.1:1"]}, 400, ".type: "),
        ({"type": "fs", "base_path": str(tmp_path / "l2")}, 403, "l2.runtime.roots: add"),
    )
    with serving(tmp_path) as server:
        for adapter, code, says in adapters:
            refused(server, adapter, says, code=code)
        inside = str(server.folder / "cache" / "kvstrata" / "more")
        status, row = tried(server, {"type": "fs", "base_path": inside})
        assert (status, row["entry"]["base_path"]) == (201, inside)
    assert fake_redis.heard == b""
