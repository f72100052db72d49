"""Requests of `kvstrata bench` to a running server: over its admin port, and pings over its socket."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstrata.cli.asking import Ask, ask
from kvstrata.errors import Unavailable
from kvstrata.measure.engine import ANSWER_S, SETTLE_S, wait_until
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.rpc import wire
from kvstrata.server.processes import tenant_number
from kvstrata.session.plain import PlainConnection


class RunningServer:
    """The server behind an admin port, which has its sockets in one of `places`."""

    def __init__(self, url: str, token: str, places: Sequence[Path]) -> None:
        """Raises Unavailable, which says what to start, or what other server answers; or ConfigError."""
        self._url = url
        self._token = token
        try:
            self.status: dict[str, Any] = self.fresh()
        except Unavailable as error:
            raise Unavailable(
                f"no server answers: {error.message} Start one with `lmcache-server`, or give the --url of another",
                field="--url",
            ) from None
        self.directory = Path(self.status["instance"]["socket_dir"])
        if self.directory not in places:
            raise Unavailable(
                f"--url: the server at {url} has its sockets in {self.directory}, not in "
                f"{', '.join(map(str, places))}; give its --port or --socket-dir too",
                field="--url",
            )

    def fresh(self) -> dict[str, Any]:
        """Fetch the status document anew; `status` keeps it. Raises KvstrataError."""
        self.status = ask(self._url, Ask("/v1/status"), token=self._token)
        return self.status

    def ping_seconds(self, count: int) -> list[float]:
        """Send `count` pings one after the other; returns the seconds of each. Raises Unavailable."""
        connection = PlainConnection(self.directory / RPC_SOCKET, ANSWER_S)
        try:
            taken = []
            for _ in range(count):
                begun_s = time.monotonic()
                connection.ask(wire.Ping(connection.next_seq()))
                taken.append(time.monotonic() - begun_s)
            return taken
        finally:
            connection.close()

    def clear(self, tenant: str) -> int:
        """Drop a tenant's chunks from L1; returns the bytes left in L1 after `SETTLE_S`. Raises KvstrataError."""
        names = {tenant, f"#{tenant_number(tenant):08x}"}

        def left() -> int:
            ask(self._url, Ask("/v1/clear", {"tier": "l1", "tenant": tenant}), token=self._token)
            return sum(row["bytes"] for row in self.fresh()["tenants"] if row["tenant"] in names)

        wait_until(lambda: left() == 0, SETTLE_S)
        return left()
