"""A real etcd on free ports: the program on PATH, or Debian's, unpacked into the cache folder."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.daemon import Daemon
from tests.tools import fetch_debian


def ensure() -> tuple[str, dict[str, str]]:
    """Return the program and the environment variables it needs. Raises Unavailable."""
    return fetch_debian.program("etcd", ["etcd-server"])


ROOT_PASSWORD = "root password of the tests"


class EtcdServer(Daemon):
    """An etcd cluster of one server, whose data lie in `folder` and survive its end.

    With `tls`, a folder of `redis_server.certificates`, clients speak TLS and show a certificate of the same authority.
    A client's certificate names no user of etcd (no `--client-cert-auth`): with that flag etcd's JSON gateway refuses
    certificates that have a name.
    """

    def __init__(self, folder: Path, *, tls: Path | None = None) -> None:
        self.folder = folder
        self._tls = tls
        self._root_token = ""
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / "etcd.log", 2)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.address}"

    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        program, environment = ensure()
        peers = f"http://127.0.0.1:{self.ports[1]}"
        command = [
            *(program, "--name", "only", "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"only={peers}", "--log-level", "warn"),
        ]
        if self._tls is not None:
            files = {"cert": "server.crt", "key": "server.key", "trusted-ca": "ca.crt"}
            command += [
                part for name, file in files.items() for part in (f"--{name}-file", str(self._tls / file))
            ]
        return command, environment

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1, context=self._context()) as answer:
                return b'"true"' in answer.read()
        except (OSError, urllib.error.URLError):
            return False

    def _context(self) -> ssl.SSLContext | None:
        if self._tls is None:
            return None
        context = ssl.create_default_context(cafile=str(self._tls / "ca.crt"))
        context.load_cert_chain(self._tls / "server.crt", self._tls / "server.key")
        return context

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Call etcd's JSON gateway at a path below /v3/; return its answer. Raises urllib.error.HTTPError."""
        headers = {"Authorization": self._root_token} if self._root_token else {}
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30, context=self._context()) as answer:
            told: dict[str, Any] = json.load(answer)
            return told

    def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write a key with the rights of an administrator."""
        self.ask("kv/put", key=_base64(key), value=_base64(value), lease=lease)

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the gateway's answer about a key: value, revisions and lease; None for an absent key."""
        [found] = self.ask("kv/range", key=_base64(key)).get("kvs", [None])
        return None if found is None else dict(found)

    def delete(self, key: str, end: str = "") -> None:
        """Remove a key, or all keys from it up to `end`."""
        self.ask("kv/deleterange", key=_base64(key), range_end=_base64(end))

    def add_user(self, user: str, password: str) -> None:
        """Add a user without rights. The first user switches authentication on."""
        if not self._root_token:
            self.ask("auth/role/add", name="root")
            self.ask("auth/user/add", name="root", password=ROOT_PASSWORD)
            self.ask("auth/user/grant", user="root", role="root")
            self.ask("auth/enable")
            self._root_token = self.ask("auth/authenticate", name="root", password=ROOT_PASSWORD)["token"]
        self.ask("auth/user/add", name=user, password=password)

    def grant(self, user: str, prefix: str) -> None:
        """Let a user read and write all keys that begin with `prefix`."""
        self.ask("auth/role/add", name=user)
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        self.ask("auth/role/grant", name=user,
                 perm={"permType": "READWRITE", "key": _base64(prefix), "range_end": _base64(end)})  # fmt: skip
        self.ask("auth/user/grant", user=user, role=user)

    def controllers_settings(self, folder: Path, ttl_s: int) -> str:
        """Add a user for controllers; returns their settings as YAML. The password is written into `folder`."""
        password = folder / "etcd-password"
        password.touch(0o600)
        password.write_text("of the controllers")
        self.add_user("kv", "of the controllers")
        self.grant("kv", "kvstrata/")
        fields = {"endpoints": [self.address], "ttl_s": ttl_s, "user": "kv", "password_file": str(password)}
        return json.dumps({"etcd": fields})


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
