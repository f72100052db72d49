"""Raw ZMTP against every ZMTP port of a real server and a real controller: no connection ends a process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from random import Random

import pytest

from kvstrata.rpc import wire
from tests.fuzz.rpc import zmtp
from tests.harness.amount import amount
from tests.harness.cluster import Cluster
from tests.harness.controller_process import PORTS
from tests.harness.rpc_client import RpcClient

pytestmark = pytest.mark.integration

SEEDS = range(amount(15, 40))
WITH_KEYS = ("p2p", *PORTS)
Where = Callable[[str], tuple[int | str, bytes]]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Where]:
    """Address and kind of socket of each port by name; asserts at the end that both processes still run."""
    with Cluster(tmp_path_factory.mktemp("zmtp"), n_servers=1, l1_mb=16) as cluster:
        [server], controller = cluster.servers, cluster.controller
        member = cluster.member(0)
        assert member is not None
        found: dict[str, tuple[int | str, bytes]] = {
            "rpc ipc": (str(server.socket_dir / "rpc.sock"), b"DEALER"),
            "p2p": (int(member["control_endpoint"].rpartition(":")[2]), b"DEALER"),
            **{name: (controller.ports[name], b"DEALER") for name in PORTS},
        }
        yield found.__getitem__
        with RpcClient(server.socket_dir) as client:
            assert client.ping().epoch == server.ready["epoch"], server.log_tail()
        assert controller.ask("/healthz") == {"ok": True}
        assert server.stop() == 0, server.log_tail()
        assert controller.stop() == 0


def test_any_sequence_of_frames_and_commands_ends_no_process(ports: Where) -> None:
    where, kind = ports("rpc ipc")
    for seed in SEEDS:
        random = Random(seed)
        with contextlib.suppress(ConnectionError):  # the server may hang up at any byte
            peer = zmtp.ZmtpPeer(where, kind, random.choice([b"", b"same", random.randbytes(5)]))
            for _ in range(random.randrange(12)):
                peer.send(something(random))
            random.choice([peer.reset, peer.close])()
    zmtp.ZmtpPeer(where, kind).close()


def something(random: Random) -> bytes:
    """Make a random message, mostly well-formed ZMTP."""
    return random.choice(
        [
            lambda: (
                zmtp.frame(random.randbytes(random.randrange(4)), random.choice([0, 0, zmtp.MORE]))
                * random.choice([1, 100, 5_000])
            ),
            lambda: zmtp.PING * random.choice([1, 200]),
            lambda: zmtp.command(b"PING", random.randbytes(random.choice([0, 1, 2, 18, 19, 200]))),
            lambda: zmtp.command(
                random.choice([b"PONG", b"READY", b"ERROR", b"SUBSCRIBE", b"CANCEL", b"nonsense"])
            ),
            lambda: zmtp.ready(random.choice([b"DEALER", b"REQ", b"PUSH", b"PUB", b""])),
            lambda: zmtp.frame(random.randbytes(random.choice([300, 9_000, 100_000]))),
            lambda: zmtp.frame(wire.encode(wire.Ping(1))),
            lambda: b"\x02" + bytes([random.choice([0, 127, 255])]) * 8,
            lambda: random.randbytes(random.randrange(64)),
        ]
    )()


@pytest.mark.parametrize("port", WITH_KEYS)
def test_a_peer_without_keys_is_refused(ports: Where, port: str) -> None:
    with pytest.raises(ConnectionError):
        zmtp.ZmtpPeer(*ports(port))


@pytest.mark.parametrize("port", WITH_KEYS)
def test_any_bytes_in_place_of_a_curve_handshake_end_no_process(ports: Where, port: str) -> None:
    where, _ = ports(port)
    for seed in SEEDS:
        random = Random(f"{port} {seed}")
        with contextlib.suppress(ConnectionError):
            peer = zmtp.CurvePeer(where)
            for _ in range(random.randrange(1, 6)):
                peer.send(
                    random.choice(
                        [
                            something(random),
                            zmtp.command(
                                b"HELLO", bytes((1, 0)) + random.randbytes(random.choice([0, 192, 300]))
                            ),
                            zmtp.command(b"INITIATE", random.randbytes(random.choice([0, 249, 1_000]))),
                            zmtp.command(b"MESSAGE", random.randbytes(random.randrange(64))),
                        ]
                    )
                )
            random.choice([peer.reset, peer.close])()
