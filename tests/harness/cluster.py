"""A controller and servers that read from each other, as processes of this machine.

With a `Network` the controller runs on the network's hub and each server on one of its hosts, with the keys that
addresses off loopback need.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Self

import zmq

from tests.harness.cache_engine import eventually
from tests.harness.controller_process import ControllerProcess
from tests.harness.network import Network
from tests.harness.server_process import ServerProcess


def key_files(folder: Path) -> tuple[Path, Path]:
    """Write the key files of the controller and of its members; return their paths."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    folder.mkdir(parents=True, exist_ok=True)
    controllers, members = folder / "controller.keys", folder / "members.keys"
    listed = f"secret {secret}\nclient {public}\ngateway {public}\n"
    for path, text in ((controllers, listed), (members, f"secret {secret}\n")):
        path.touch(0o600)
        path.write_text(text)
    return controllers, members


class Cluster:
    """A controller and its members, which run inside the `with` block.

    `flags`, `settings` (environment variables) and `l2` go to every ServerProcess.
    The network has a host for each server and belongs to the caller.
    """

    def __init__(
        self,
        folder: Path,
        *,
        l1_mb: int,
        n_servers: int = 2,
        chunk_tokens: int = 256,
        l2: str = "none",
        flags: tuple[str, ...] = (),
        settings: dict[str, str] | None = None,
        controller_flags: tuple[str, ...] = ("--heartbeat-s", "1"),
        network: Network | None = None,
    ) -> None:
        self._network = network
        self._address, hub, key_flags = "127.0.0.1", None, ()
        if network is not None:
            self._address, hub = network.hub.address, network.hub
            controllers, members = key_files(folder)
            controller_flags += ("--monitor-host", self._address, "--curve-secret-file", str(controllers))
            key_flags = ("--cluster-curve-file", str(members))
        self.controller = ControllerProcess(folder / "controller", flags=controller_flags, host=hub)
        self._folder = folder
        self._arguments: dict[str, Any] = {
            "l1_mb": l1_mb,
            "chunk_tokens": chunk_tokens,
            "l2": l2,
            "environment": {**os.environ, **(settings or {})},
        }
        self._flags = (*flags, *key_flags)
        self._n_servers = n_servers
        self._stack = contextlib.ExitStack()
        self.servers: list[ServerProcess] = []

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.enter_context(self.controller)
            for number in range(self._n_servers):
                host = None if self._network is None else self._network.hosts[number]
                server = ServerProcess(
                    self._folder / f"server-{number}",
                    flags=(
                        *("--controller-url", f"tcp://{self._address}:{self.controller.ports['reply']}"),
                        *("--instance-id", f"instance-{number}"),
                        *(() if host is None else ("--p2p-listen", f"{host.address}:0")),
                        *self._flags,
                    ),
                    host=host,
                    **self._arguments,
                )
                self._stack.enter_context(server).start()
                self.servers.append(server)
            for number in range(self._n_servers):
                eventually("an instance is registered", lambda number=number: self.member(number))
                # Until HTTP answers, the server's start still takes CPU time.
                self.servers[number].get("/v1/status")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def member(self, number: int) -> dict[str, Any] | None:
        """Return the controller's row of an instance; None while the controller does not count it as a member."""
        rows = self.controller.ask("/v1/instances")["instances"]
        return next(
            (row for row in rows if row["id"] == f"instance-{number}" and row["state"] != "dead"), None
        )

    def until_known(self, number: int) -> None:
        """Wait until the controller knows all chunks that an instance has in L1."""
        status = self.servers[number].get("/v1/status")
        ready = int(status["pool"]["entries"]["ready"])
        eventually("the controller knows the chunks", lambda: self.known(number) >= ready)

    def known(self, number: int) -> int:
        """Return how many chunks of an instance's L1 the controller knows."""
        row = self.member(number)
        return 0 if row is None else int(row["keys"].get("l1", 0))

    def peer_records(self, number: int) -> int:
        """Return how many records an instance without another L2 has read from its peers."""
        counts = self.servers[number].get("/v1/status")["l2_prefetch"]["counts"]
        return int(counts.get("loaded", 0))
