"""rpc/zmq_curve.py: one key for all processes of a user, and a handshake that nobody begins without it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from zmq.utils import z85

from kvstrata.config import private_dir
from kvstrata.errors import ConfigError
from kvstrata.rpc.zmq_curve import FILE, CurveKeys, SharedKey, new_secret, public_of
from kvstrata.rpc.zmq_server import ZmqServer
from tests.fuzz.rpc import zmtp
from tests.oracles.curve_hello import hello

OURS = f"kvstrata-{os.geteuid()}"
P = 2**255 - 19
LOW_ORDER = [
    *(number.to_bytes(32, "little") for number in (0, 1, P - 1, P, P + 1)),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
]
"""Points of Curve25519 that any secret key multiplies to zero, so anybody knows the secret that they share."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_a_file_that_a_cleaner_has_removed_is_put_back_and_another_one_is_left_alone(
    environment: dict[str, str],
) -> None:
    key = SharedKey("a", environment)
    os.utime(key.path, (1, 1))
    key.touch()
    assert key.path.stat().st_mtime > 1
    key.path.unlink()
    key.path.parent.rmdir()
    key.touch()
    assert SharedKey("a", environment).keys == key.keys
    key.path.unlink()
    other = SharedKey("a", environment)
    key.touch()
    assert SharedKey("a", environment).keys == other.keys != key.keys


def test_the_key_lies_where_processes_of_a_login_and_of_systemd_find_it_and_another_run_dir_keeps_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login, own = tmp_path / "run" / str(os.geteuid()), tmp_path / "own"
    login.mkdir(parents=True)
    own.mkdir()
    monkeypatch.setattr(private_dir, "SYSTEM_RUN", login.parent)
    both = [login / OURS, Path("/tmp") / OURS]
    assert (
        private_dir.shared_run_dirs({})
        == private_dir.shared_run_dirs({"XDG_RUNTIME_DIR": str(login)})
        == both
    )
    assert private_dir.shared_run_dirs({"XDG_RUNTIME_DIR": str(own)}) == [own / OURS]


def test_a_folder_that_another_user_has_prepared_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, open_to_others = tmp_path / "ours", tmp_path / "open"
    open_to_others.mkdir()
    (open_to_others / FILE).write_text("secret of somebody else\n")
    open_to_others.chmod(0o777)
    monkeypatch.setattr("kvstrata.rpc.zmq_curve.shared_run_dirs", lambda environment: [ours, open_to_others])
    assert SharedKey("a", {}).path == ours / FILE
    monkeypatch.setattr("kvstrata.rpc.zmq_curve.shared_run_dirs", lambda environment: [open_to_others])
    with pytest.raises(ConfigError, match="others may write"):
        SharedKey("a", {})


@pytest.fixture
async def listener() -> AsyncIterator[tuple[int, bytes]]:
    """A port as a controller has it: clients of any key that know the server's. Its number, and that public key."""
    secret = new_secret()
    server = ZmqServer(asyncio.get_running_loop())
    yield (
        server.bind_tcp("127.0.0.1", 0, curve=CurveKeys(secret, None), insecure=False),
        z85.decode(public_of(secret)),
    )
    server.close()


async def answered(port: int, body: bytes) -> bool:
    """Whether the server goes on with the handshake after this HELLO."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(zmtp.greeting(b"CURVE"))
    await reader.readexactly(64)
    writer.write(zmtp.command(b"HELLO", body))
    try:
        return (await reader.readexactly(10))[3:] == b"WELCOME"
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        writer.close()


def sealed_for(server: bytes) -> bytes:
    """A HELLO of a new short-term key for a server with this public key."""
    short = X25519PrivateKey.generate()
    public = short.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hello(public, short.exchange(X25519PublicKey.from_public_bytes(server)))


async def test_only_a_client_that_knows_the_servers_public_key_gets_beyond_hello(
    listener: tuple[int, bytes],
) -> None:
    port, public = listener
    assert await answered(port, sealed_for(public))
    assert not await answered(port, sealed_for(z85.decode(public_of(new_secret()))))


@pytest.mark.parametrize("point", LOW_ORDER, ids=lambda point: point.hex()[:8])
async def test_a_short_term_key_of_low_order_does_not_replace_that_knowledge(
    listener: tuple[int, bytes], point: bytes
) -> None:
    """libsodium refuses these points; with a library that takes them, anybody could seal a HELLO."""
    port, _ = listener
    for key in (point, point[:31] + bytes([point[31] | 0x80])):
        assert not await answered(port, hello(key, bytes(32)))
