"""Requests to a running server, without attaching to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstrata.config.private_dir import check_private_dir
from kvstrata.errors import ConfigError, Unavailable
from kvstrata.measure.engine import ANSWER_S, SETTLE_S, wait_until
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.policy.processes import tenant_number
from kvstrata.rpc import wire
from kvstrata.rpc.zmq_plain import PlainConnection


class RunningServer:
    """A connection to a running server, without a session."""

    def __init__(self, places: Sequence[Path]) -> None:
        """`places`: directories in which the server's sockets may lie. Raises Unavailable, which says what to start."""
        for place in places:
            try:
                check_private_dir(place, "socket_dir")
                self._connect(place)
            except (Unavailable, ConfigError):
                continue
            return
        raise Unavailable(
            f"no server answers in {', '.join(map(str, places))}; start one with `lmcache-server`, or give the --port "
            "or --socket-dir of a running one",
            field="socket_dir",
        )

    def _connect(self, place: Path) -> None:
        self._connection = PlainConnection(place / RPC_SOCKET, ANSWER_S)
        try:
            self.status: dict[str, Any] = self._connection.status()
            self.directory = place
        except Unavailable:
            self._connection.close()
            raise

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
