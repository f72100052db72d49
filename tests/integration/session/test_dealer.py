"""An ordinary DEALER of libzmq speaks to a server's socket: what needs no shared memory works, the rest is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvstrata.types import KEY_BYTES
from tests.harness.rpc_client import RECORD_BYTES, RpcClient, chain_of, layout, part
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=64, flags=("--no-http",)) as process:
        process.start()
        yield process
        assert process.stop() == 0, process.log_tail()


class Dealer:
    """It knows docs/protocol.md and nothing of our code."""

    def __init__(self, socket_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.connect(f"ipc://{socket_dir / 'rpc.sock'}")

    def ask(self, *request: Any) -> list[Any]:
        self._socket.send(msgspec.msgpack.encode(request))
        reply: list[Any] = msgspec.msgpack.decode(self._socket.recv())
        return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def dealer(server: ServerProcess) -> Iterator[Dealer]:
    dealer = Dealer(server.socket_dir)
    yield dealer
    dealer.close()


def test_a_dealer_counts_and_reads_what_another_process_stored(server: ServerProcess, dealer: Dealer) -> None:
    with RpcClient(server.socket_dir) as client:
        identity = client.identify(salt="of a dealer")
        chain = chain_of(identity.root, 3)
        client.store(identity, chain)
        assert dealer.ask("ping", 1)[:2] == ["ping", 1]
        digest = part().digest()
        request = {"salt": "of a dealer"}
        name, seq, _, number, root, *_ = dealer.ask(
            "identify", 2, request, msgspec.to_builtins(layout()), [digest]
        )
        assert (name, seq, root) == ("identify", 2, identity.root)
        found = dealer.ask("lookup", 3, 1000, number, "", [["prefix", chain + bytes(KEY_BYTES)]])
        assert found[:2] == ["lookup", 3] and found[3:5] == [3, b""]
        _, _, _, is_found, length, body = dealer.ask(
            "retrieve", 4, number, chain[:KEY_BYTES], digest, 0, RECORD_BYTES
        )
        assert is_found and length >= RECORD_BYTES and len(body) == RECORD_BYTES


@pytest.mark.parametrize(
    "request_",
    [
        ("reserve", 9, 1000, 1, b"", bytes(32), 8192),
        ("commit", 9, 1, [0]),
        ("abort", 9, 1),
        ("release", 9, []),
        ("cancel", 9, 1),
        ("quiesced", 9),
        ("corrupt", 9, 1, bytes(32)),
    ],
    ids=lambda request_: request_[0],
)
def test_the_rest_is_refused_by_name(dealer: Dealer, request_: tuple[Any, ...]) -> None:
    kind, seq, _, code, message, field, _ = dealer.ask(*request_)
    assert (kind, seq, code, field) == ("error", 9, "not_permitted", "op")
    assert request_[0] in message
