"""Hosts on one machine: network namespaces, each with an address and a link to one switch; a link can be slow or cut.

The namespaces lie inside a user namespace of their own, so root is not needed.  Each namespace ends with the process
that holds it, and the holding processes end with this process.  Processes of a host see the files of all hosts, but
only their own host's network.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.harness import child
from tests.harness.child import Child
from tests.harness.http_read import read

NET = "10.73.0"
_SAY_AND_WAIT = ("sh", "-c", "echo made; exec cat")
_NEEDED = (
    "ip link add one0 type veth peer name two0",
    "ip link add three0 type bridge",
    "tc qdisc add dev one0 root tbf rate 1mbit burst 9k latency 1s",
)
BURST_BYTES = 32 << 10
SENDS_BYTES = 256 << 10
"""Bound of a connection's send buffer: the kernel sends these bytes even after the process has ended."""


def why_not() -> str:
    """Return why this machine permits no such network; empty when it does."""
    try:
        done = subprocess.run(
            ["unshare", "-Urn", "sh", "-c", " && ".join(_NEEDED)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except FileNotFoundError as error:
        return f"{error}; to install: apt-get install util-linux iproute2"
    return (
        ""
        if done.returncode == 0
        else f"this machine permits no network of namespaces: {done.stderr.strip()}"
    )


class Host:
    """One network namespace. Processes of this host are started with the command `under`."""

    def __init__(self, log: Path, number: int, hub: Host | None = None) -> None:
        self.address = f"{NET}.{number}"
        self._hub = hub
        self._port = f"port{number}"
        command = ["unshare", "-Urn"] if hub is None else [*hub.under, "unshare", "-n"]
        self._holder = subprocess.Popen(
            [*command, *_SAY_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._stack = contextlib.ExitStack()
        try:
            self._stack.callback(self._end)
            assert self._holder.stdout is not None
            self._holder.stdout.readline()
            if hub is None:
                self.ip("link", "add", "switch", "type", "bridge")
                self._up("switch")
            else:
                peer = ("name", "eth0", "netns", str(self._holder.pid))
                hub.ip("link", "add", self._port, "type", "veth", "peer", *peer)
                hub.ip("link", "set", self._port, "master", "switch", "up")
                self._up("eth0")
                limits = f"4096 65536 {SENDS_BYTES}"
                self._run("sh", "-c", f"echo {limits} > /proc/sys/net/ipv4/tcp_wmem")
            self.ip("link", "set", "lo", "up")
            self._reader = self._stack.enter_context(
                Child("tests.harness.network", under=self.under, log=log)
            )
        except BaseException:
            self._stack.close()
            raise

    @property
    def under(self) -> tuple[str, ...]:
        """The command that runs another command on this host."""
        return ("nsenter", "--preserve-credentials", "-U", "-n", "-t", str(self._holder.pid))

    def http(self, url: str, *, body: Any = None, method: str = "", token: str | None = None) -> bytes:
        """Make an HTTP request from this host, see `http_read.read`. Raises ChildError."""
        content: str = self._reader.ask("read", url=url, body=body, method=method, token=token)
        return content.encode()

    def ip(self, *arguments: str) -> None:
        self._run("ip", *arguments)

    def cut(self) -> None:
        """Cut the host's link: packets in both directions are lost without an error."""
        assert self._hub is not None
        self._hub.ip("link", "set", self._port, "down")

    def mend(self) -> None:
        assert self._hub is not None
        self._hub.ip("link", "set", self._port, "up")

    def slow(self, bytes_per_s: int) -> None:
        """Bound the host's rate of sending, until `fast`."""
        shape = ("rate", f"{8 * bytes_per_s}bit", "burst", str(BURST_BYTES), "latency", "1s")
        self._run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)

    def fast(self) -> None:
        self._run("tc", "qdisc", "delete", "dev", "eth0", "root")

    def sent_bytes(self) -> int:
        """Return the bytes that the host has sent over its link."""
        for line in Path(f"/proc/{self._holder.pid}/net/dev").read_text().splitlines():
            name, _, counts = line.strip().partition(":")
            if name == "eth0":
                return int(counts.split()[8])
        raise AssertionError("no eth0")

    def close(self) -> None:
        """Remove the host from the network; its processes run on but reach nothing."""
        self._stack.close()

    def _up(self, device: str) -> None:
        self.ip("address", "add", f"{self.address}/24", "dev", device)
        self.ip("link", "set", device, "up")

    def _run(self, *command: str) -> None:
        done = subprocess.run([*self.under, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def _end(self) -> None:
        self._holder.kill()
        self._holder.communicate()


class Network:
    """`n_hosts` hosts and a hub, which has the switch and is a host too."""

    def __init__(self, folder: Path, n_hosts: int) -> None:
        self._log = folder / "network.log"
        self._n_hosts = n_hosts
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.hub = Host(self._log, 1)
            stack.callback(self.hub.close)
            self.hosts: Sequence[Host] = [
                Host(self._log, 2 + number, self.hub) for number in range(self._n_hosts)
            ]
            for host in self.hosts:
                stack.callback(host.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


if __name__ == "__main__":
    child.serve({"read": lambda **request: read(**request).decode()})
