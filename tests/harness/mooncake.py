"""A real Mooncake cluster: a master on free ports, and a holder.

The holder is a client that lends the cluster its memory and reads and writes stored values without the adapter.  The
client's wheel and its libraries lie in the cache folder; nothing is installed.  Processes that use the cluster get
`environment()`, and adapter hosts inherit it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.harness import child
from tests.harness.daemon import Daemon, Unavailable
from tests.tools import fetch_debian, fetch_wheels

[REQUIREMENT] = fetch_wheels.MOONCAKE
LIBRARIES = ("libcurl4", "libibverbs1", "libnuma1")
INSTALL = f"to install: pip install {REQUIREMENT} && sudo apt-get install -y {' '.join(LIBRARIES)}"

# A published command line, for a machine with an RDMA network card.
PUBLISHED = (
    "--l1-size-gb 100 --eviction-policy LRU --l2-adapter"
    ' \'{"type":"mooncake_store","num_workers":4,"per_op_workers":{"lookup":1,"retrieve":1,"store":2},'
    '"preregister_l1_memory":true,"local_hostname":"node01","metadata_server":"http://localhost:8080/metadata",'
    '"master_server_addr":"localhost:50051","protocol":"rdma","rdma_devices":"mlx5_0",'
    '"global_segment_size":"3221225472"}\''
)


def ensure() -> Path:
    """Return the folder with the package `mooncake`; fetch it on the first call. Raises Unavailable."""
    folder = fetch_wheels.ensure(fetch_wheels.MOONCAKE)
    (folder / "mooncake" / "mooncake_master").chmod(0o755)
    return folder


def environment() -> dict[str, str]:
    """Return the environment of a process that uses the client or the master. Raises Unavailable."""
    variables = fetch_debian.environment(fetch_debian.ensure(LIBRARIES))
    inherited = os.environ.get("PYTHONPATH")
    folder = ensure()
    variables["PYTHONPATH"] = ":".join([str(folder), *([inherited] if inherited else [])])
    if reason := fetch_debian.why_not(str(folder / "mooncake" / "mooncake_master"), variables):
        raise Unavailable(f"{REQUIREMENT}: fetched, but does not start; {INSTALL}\n{reason}")
    return variables


class Master(Daemon):
    """A `mooncake_master` with its HTTP metadata server."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._flags = flags
        super().__init__(folder / "mooncake_master.log", 3)

    @property
    def metadata_server(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}/metadata"

    def setup(self, **more: Any) -> dict[str, Any]:
        """Return Mooncake's fields of an adapter's entry, for a client that lends no memory."""
        return {
            "local_hostname": "127.0.0.1",
            "metadata_server": self.metadata_server,
            "master_server_addr": self.address,
            "protocol": "tcp",
            "global_segment_size": "0",
            **more,
        }

    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        rpc_port, http_port, admin_port = self.ports
        command = [
            *(str(ensure() / "mooncake" / "mooncake_master"), "--logtostderr=true"),
            *("--rpc_address=127.0.0.1", f"--rpc_port={rpc_port}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={admin_port}"),
            *("--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1"),
            *(f"--http_metadata_server_port={http_port}", *self._flags),
        ]
        return command, environment()

    def _answers(self) -> bool:
        try:
            self.names()
            with contextlib.closing(socket.create_connection(("127.0.0.1", self.port), timeout=1)):
                return True
        except OSError:
            return False

    def names(self) -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/get_all_keys", timeout=10) as reply:
            return set(reply.read().decode().split())


class Holder:
    """A client in a process of its own that lends memory to the cluster and handles values by their names."""

    def __init__(self, folder: Path, master: Master, *, segment_mb: int = 256) -> None:
        setup = master.setup(global_segment_size=str(segment_mb << 20))
        self.child = child.Child(
            "tests.harness.mooncake_holder",
            json.dumps(setup),
            log=folder / "mooncake_holder.log",
            environment=environment(),
        )

    def get(self, name: str) -> bytes:
        """Return the value of a name; empty for an unknown name."""
        return bytes.fromhex(self.child.ask("get", name=name))

    def put(self, name: str, value: bytes) -> None:
        self.child.ask("put", name=name, value=value.hex())

    def remove(self, name: str) -> None:
        self.child.ask("remove", name=name)

    def remove_all(self) -> None:
        self.child.ask("remove_all")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.child.__exit__(*exception)


@contextlib.contextmanager
def cluster(folder: Path, *flags: str, segment_mb: int = 256) -> Iterator[tuple[Master, Holder]]:
    """Run a master and one holder until the end of the block."""
    with Master(folder, *flags) as master, Holder(folder, master, segment_mb=segment_mb) as holder:
        yield master, holder
