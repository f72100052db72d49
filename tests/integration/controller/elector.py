"""A process that takes part in an election; tests talk to it through tests/harness/child.py."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

from kvstrata.clock import SystemClock
from kvstrata.config.controller_model import EtcdSettings
from kvstrata.controller.election import Candidate, Election
from kvstrata.controller.etcd import read
from kvstrata.controller.orders import Orders
from kvstrata.errors import NotLeading
from tests.harness.child import serve


class Elector:
    """The election runs on a thread with a loop; each handler asks it."""

    def __init__(self, name: str, endpoint: str, ttl_s: int) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        settings = EtcdSettings(endpoints=[endpoint], ttl_s=ttl_s)
        self.log: list[tuple[str, int]] = []
        clock = SystemClock()
        me = Candidate(name, f"http://{name}")
        self._election = Election(settings, me, clock)
        self._stale_token = 0
        taking_part = self._election.run(Orders(clock), self._changed)
        self._task = asyncio.run_coroutine_threadsafe(taking_part, self._loop)

    def _changed(self) -> None:
        leader = self._election.leader
        self.log.append((leader.member.name if leader else "", self._election.token))

    def state(self) -> dict[str, Any]:
        """The election as this process sees it now."""
        leader = self._election.leader
        return {
            "leader": leader.member.name if leader else "",
            "leader_token": leader.token if leader else 0,
            "token": self._election.token,
            "members": [member.name for member in self._election.members],
            "tokens_seen": [token for _, token in self.log if token],
        }

    def write(self, key: str, value: str) -> bool:
        """Write as leader; returns whether it was written."""
        writing = self._election.write({key: value.encode()})
        future = asyncio.run_coroutine_threadsafe(writing, self._loop)
        try:
            future.result(30)
        except NotLeading:
            return False
        return True

    def write_believing(self, key: str, value: str, token: int) -> bool:
        """Write as a process that still believes to lead under `token`, even if its time is over."""
        election = self._election
        kept = election._token, election._sure_until_s
        election._token, election._sure_until_s = token, float("inf")
        try:
            return self.write(key, value)
        finally:
            election._token, election._sure_until_s = kept

    def read(self, key: str) -> str | None:
        """The value of a key."""
        name = self._election._key(f"orders/{key}")
        reading = self._election._connected().transact([], [read(name)])
        answer = asyncio.run_coroutine_threadsafe(reading, self._loop).result(30)
        return answer.rows[name].value.decode() if name in answer.rows else None

    def leave(self) -> None:
        """Leave the election in order."""
        self._task.cancel()
        asyncio.run_coroutine_threadsafe(self._election.close(), self._loop).result(30)


if __name__ == "__main__":
    elector = Elector(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    serve({name: getattr(elector, name) for name in ("state", "write", "write_believing", "read", "leave")})
