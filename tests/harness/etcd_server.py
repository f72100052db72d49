"""A real etcd on free ports: Debian's, unpacked into the cache folder, or the one in PATH."""

from __future__ import annotations

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness import fetch_debian
from tests.harness.daemon import Daemon, Unavailable

PACKAGE = "etcd-server"


def ensure() -> tuple[str, dict[str, str]]:
    """The program and the variables it needs. Raises Unavailable."""
    try:
        root = fetch_debian.ensure([PACKAGE])
        return str(root / "usr/bin/etcd"), fetch_debian.environment(root)
    except fetch_debian.Unavailable as error:
        installed = shutil.which("etcd")
        if installed is None:
            raise Unavailable(str(error)) from None
        return installed, dict(os.environ)


class EtcdServer(Daemon):
    """One member, alone in its cluster, whose data lie in `folder` and outlive it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / "etcd.log", 2)

    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        program, environment = ensure()
        clients, peers = (f"http://127.0.0.1:{port}" for port in self.ports)
        return [
            *(program, "--name", "only", "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"only={peers}", "--log-level", "warn"),
        ], environment

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (OSError, urllib.error.URLError):
            return False
