"""Keys of a cluster and of a user: files agree, stay private and count when they change; nobody connects without."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from zmq.utils import z85

from kvstrata.cli import main
from kvstrata.config import private_dir
from kvstrata.errors import ConfigError
from kvstrata.rpc.zmq_curve import (
    FILE,
    ClusterKeys,
    KeyFile,
    SharedKey,
    new_secret,
    public_of,
    read_cluster_keys,
    read_controller_keys,
)
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


def test_a_file_that_a_cleaner_has_removed_is_put_back_and_another_one_is_left_alone(environment):
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


def test_a_folder_that_another_user_has_prepared_is_passed_over(tmp_path, monkeypatch):
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
        server.bind_tcp("127.0.0.1", 0, keys=ClusterKeys(secret), anywhere=False),
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


async def test_only_a_client_that_knows_the_servers_public_key_gets_beyond_hello(listener):
    port, public = listener
    assert await answered(port, sealed_for(public))
    assert not await answered(port, sealed_for(z85.decode(public_of(new_secret()))))


@pytest.mark.parametrize("point", LOW_ORDER, ids=lambda point: point.hex()[:8])
async def test_a_short_term_key_of_low_order_does_not_replace_that_knowledge(listener, point):
    """libsodium refuses these points; with a library that takes them, anybody could seal a HELLO."""
    port, _ = listener
    for key in (point, point[:31] + bytes([point[31] | 0x80])):
        assert not await answered(port, hello(key, bytes(32)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a controller and of the members `a` and `b`."""
    assert run("init", tmp_path / "keys", "a", "b") == 0
    return tmp_path / "keys"


def run(command: str, folder: Path, *rest: str) -> int:
    return main(["cluster", command, str(folder), *rest])


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def check(folder: Path, *names: str) -> None:
    """Assert that the files let exactly these members speak to each other and to the controller."""
    assert set(contents(folder)) == {"controller.keys", *(f"{name}.keys" for name in names)}
    controller = read_controller_keys(str(folder / "controller.keys"))
    members = {name: read_cluster_keys(str(folder / f"{name}.keys"), "x") for name in names}
    public = {name: public_of(keys.secret) for name, keys in members.items()}
    assert len(set(public.values())) == len(names)
    assert controller.clients == set(public.values())
    assert controller.listed == {key.decode(): (name, f"{name}-*") for name, key in public.items()}
    for keys in members.values():
        assert keys.server == public_of(controller.secret)
        assert keys.clients == {*public.values(), keys.server}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_init_replaces_no_key_unless_it_is_asked_to(folder, capsys):
    before = contents(folder)
    assert run("init", folder, "c") == 2
    assert "exists already" in capsys.readouterr().err
    assert contents(folder) == before
    check(folder, "a", "b")
    assert run("init", folder, "a", "b", "--overwrite") == 0
    assert not set(contents(folder).values()) & set(before.values())
    check(folder, "a", "b")


def test_a_member_is_added_without_a_change_of_the_other_keys(folder):
    before = read_cluster_keys(str(folder / "a.keys"), "x")
    assert run("add", folder, "c") == 0
    check(folder, "a", "b", "c")
    assert read_cluster_keys(str(folder / "a.keys"), "x").secret == before.secret
    assert run("add", folder, "a") == 2
    assert read_cluster_keys(str(folder / "a.keys"), "x").secret == before.secret
    assert run("add", folder, "a", "--overwrite") == 0
    assert read_cluster_keys(str(folder / "a.keys"), "x").secret != before.secret
    check(folder, "a", "b", "c")


def test_a_removed_member_is_in_no_file_any_more(folder, capsys):
    assert run("remove", folder, "b") == 0
    check(folder, "a")
    assert run("remove", folder, "b") == 2
    assert "b is not a member; members: a" in capsys.readouterr().err
    assert run("remove", folder, "a") == 2


def test_a_member_whose_file_was_moved_away_is_named(folder, capsys):
    (folder / "b.keys").unlink()
    assert run("add", folder, "c") == 0
    assert "b: its file is not in" in capsys.readouterr().out
    listed = read_controller_keys(str(folder / "controller.keys")).listed
    assert sorted(ids[0] for ids in listed.values()) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["controller", "../x", "", "a b", "-a", "a" * 63])
def test_a_name_that_cannot_be_a_file_or_an_id_is_refused(tmp_path, name, capsys):
    assert run("init", tmp_path / "keys", "--", name) == 2
    assert "NAME: " in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path, capsys):
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    assert run("init", tmp_path / "open", "a") == 2
    assert "others may write" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of root")
def test_keys_that_are_mounted_for_our_group_are_read_and_those_for_all_are_not(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    path = folder / "controller.keys"
    path.chmod(0o440)
    assert read_controller_keys(str(path)).listed
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_controller_keys(str(path))


SECRET = new_secret().decode()
A, B = (public_of(new_secret()).decode() for _ in "ab")


def write(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines))
    path.chmod(0o600)


@pytest.mark.parametrize(
    "lines",
    [
        (f"secret {SECRET}", "client short"),
        (f"secret {SECRET}",),
        (f"secret {new_secret().decode()}", f"client {B}"),
        None,
    ],
    ids=["a wrong line", "no client", "another secret", "no file"],
)
def test_a_changed_file_counts_unless_it_is_wrong(tmp_path: Path, lines: tuple[str, ...] | None) -> None:
    path = tmp_path / "keys"
    write(path, f"secret {SECRET}", f"client {A}")
    file = KeyFile(str(path), read_controller_keys)
    assert file.now().clients == {A.encode()}
    if lines is None:
        os.unlink(path)
    else:
        write(path, *lines)
    assert file.now().clients == {A.encode()}
    write(path, f"secret {SECRET}", f"client {A} a", f"client {B} b b-*")
    assert file.now().clients == {A.encode(), B.encode()}
    assert file.now().listed == {A: ("a",), B: ("b", "b-*")}
    write(path, f"secret {SECRET}", f"client {B} b")
    assert file.now().clients == {B.encode()}


def test_a_wrong_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyFile(str(tmp_path / "nothing"), read_controller_keys)
