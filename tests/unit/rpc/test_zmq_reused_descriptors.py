"""A connection that gets the descriptor of one that has ended does not pay for what that one sent.

The server's loop stands still while libzmq's thread reads all messages of the first connection, sees it end and accepts
the second one, as on a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from kvstrata.rpc.zmq_server import MAX_REFUSED, Address, ZmqServer
from tests.fuzz.rpc.zmtp import ZmtpPeer, frame
from tests.harness.alone import alone
from tests.harness.waiting import until

ENDS_S = 30.0


class Port:
    """A server of this process, which refuses every message but `well`."""

    def __init__(self) -> None:
        self.server = ZmqServer(asyncio.get_running_loop())
        self.number = self.server.bind_tcp("127.0.0.1", 0, keys=None, anywhere=False)
        self.n_refused = self.n_well = 0
        self.server.start(self._take, lambda address, frames: b"")

    def _take(self, address: Address, body: Any) -> bool:
        well = bytes(body) == b"well"
        self.n_well += well
        self.n_refused += not well
        return well

    def peer(self, identity: bytes = b"") -> ZmtpPeer:
        """A new connection past the handshake, which libzmq's thread does alone."""
        return ZmtpPeer(self.number, identity=identity)

    async def hears(self, peer: ZmtpPeer) -> None:
        """Let the server handle a message of this peer."""
        wanted = self.n_well + 1
        peer.send(frame(b"well"))
        await until(lambda: self.n_well == wanted)


def sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
        except FileNotFoundError:  # the descriptor of listdir
            pass
    return found


def replaced(port: Port, first: ZmtpPeer, own: int, identity: bytes) -> ZmtpPeer:
    """End the connection that has the descriptor `own`, and open another one, which gets it; the loop stands still."""
    first.close()
    ends_s = time.monotonic() + ENDS_S
    while own in sockets():
        assert time.monotonic() < ends_s, "libzmq keeps the connection"
    second = port.peer(identity)
    assert own in sockets()
    return second


@pytest.mark.parametrize(("n_sent", "identity"), [(2 * MAX_REFUSED, "its own"), (20 * MAX_REFUSED, "")])
@alone
async def test_a_connection_is_not_cut_for_messages_of_the_one_that_had_its_descriptor(n_sent, identity):
    port = Port()
    before = sockets()
    first = port.peer()
    [own] = sockets() - before - {first.socket.fileno()}
    await port.hears(first)
    first.send(frame(b"x") * n_sent)
    second = replaced(port, first, own, identity.encode())
    await port.hears(second)
    await port.hears(second)
    assert port.server.connections == 1
    # One more may be in the server's hands when the first connection ends, and is not counted for it.
    assert port.n_refused <= MAX_REFUSED + 1, "the messages of the first one are dropped after so many"
    second.close()
    port.server.close()
