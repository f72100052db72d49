"""Requests to a running server, without attaching to it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvstrata.errors import Unavailable
from kvstrata.measure.engine import ANSWER_S, SETTLE_S, wait_until
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.policy.processes import tenant_number
from kvstrata.rpc import wire
from kvstrata.rpc.zmq_plain import PlainConnection


class RunningServer:
    """A connection to a running server, without a session."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the directory of the server's sockets. Raises Unavailable, which says what to start."""
        self._connection = PlainConnection(directory / RPC_SOCKET, ANSWER_S)
        try:
            self.status: dict[str, Any] = self._connection.status()
        except Unavailable:
            self._connection.close()
            raise Unavailable(
                f"no server answers in {directory}; start one with `lmcache-server`, "
                "or give the --port or --socket-dir of a running one",
                field="socket_dir",
            ) from None

    def fresh(self) -> dict[str, Any]:
        """Fetch the status document anew; `status` keeps it. Raises Unavailable."""
        self.status = self._connection.status()
        return self.status

    def ping_seconds(self, count: int) -> list[float]:
        """Send `count` pings one after the other; returns the seconds of each. Raises Unavailable."""
        taken = []
        for _ in range(count):
            begun_s = time.monotonic()
            self._connection.ask(wire.Ping(wire.NO_SESSION, self._connection.next_seq()))
            taken.append(time.monotonic() - begun_s)
        return taken

    def clear(self, tenant: str) -> int:
        """Drop a tenant's chunks from L1; returns the bytes left in L1 after `SETTLE_S`. Raises Unavailable."""
        names = {tenant, f"#{tenant_number(tenant):08x}"}

        def left() -> int:
            self._connection.ask(
                wire.Clear(wire.NO_SESSION, self._connection.next_seq(), wire.ClearScope.L1, tenant)
            )
            return sum(row["bytes"] for row in self.fresh()["tenants"] if row["tenant"] in names)

        wait_until(lambda: left() == 0, SETTLE_S)
        return left()

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()
