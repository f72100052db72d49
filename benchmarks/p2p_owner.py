"""A child process that owns records and serves them to peers over UCX, with MACs and without (see p2p_mac.py)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import zmq

from kvstrata.clock import SystemClock
from kvstrata.p2p.engines.base import Region
from kvstrata.p2p.engines.ucx import UcxEngine
from kvstrata.p2p.serving import PeerServer
from kvstrata.rpc.zmq_curve import CurveKeys
from kvstrata.rpc.zmq_server import ZmqServer
from kvstrata.testing.strategies import record_length
from tests.harness import child
from tests.harness.l1 import L1, chain


class Owner:
    """The pool, its transfer engine and two servers of peers, on a loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.kept: list[Any] = []

    def open(self, records: int, size: int) -> dict[str, dict[str, str]]:
        """Store the records; return the endpoint and the public key of each server of peers."""
        return asyncio.run_coroutine_threadsafe(self._open(records, size), self.loop).result()

    async def _open(self, records: int, size: int) -> dict[str, dict[str, str]]:
        # Peers may lease a quarter of the pool.
        l1 = L1(5 * records * record_length(size) + (1 << 20))
        assert len(l1.store(chain("mac", records), size=size)) == records
        engine = UcxEngine()
        metadata = await engine.open(Region(l1.pool.extents_address, l1.pool.extents_bytes))
        self.kept += [l1, engine]
        return {name: self._serve(l1, metadata, mac=name == "mac") for name in ("plain", "mac")}

    def _serve(self, l1: L1, metadata: bytes, *, mac: bool) -> dict[str, str]:
        public, secret = zmq.curve_keypair()
        socket = ZmqServer(self.loop)
        port = socket.bind_tcp("127.0.0.1", 0, curve=CurveKeys(secret, None), insecure=False)
        server = PeerServer(
            l1.pool, SystemClock(), socket, instance_id="owner", incarnation=1,
            engine="ucx", metadata=lambda: metadata, mac=mac,
        )  # fmt: skip
        server.start()
        self.kept.append(server)
        return {"endpoint": f"tcp://127.0.0.1:{port}", "key": public.decode()}


if __name__ == "__main__":
    child.serve({"open": Owner().open})
