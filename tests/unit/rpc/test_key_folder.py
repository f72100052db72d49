"""Files of a cluster's keys agree, stay private and are not lost; changed files count, wrong ones change nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvstrata.cli import main
from kvstrata.errors import ConfigError
from kvstrata.rpc.zmq_curve import KeyFile, new_secret, public_of, read_cluster_keys, read_controller_keys


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
    assert controller.curve.clients == set(public.values())
    assert controller.listed == {key.decode(): (name, f"{name}-*") for name, key in public.items()}
    for keys in members.values():
        assert keys.server == public_of(controller.curve.secret)
        assert keys.clients == set(public.values())
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
    assert "b is no member; members are a" in capsys.readouterr().err
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
def test_keys_that_are_mounted_for_our_group_are_read_and_those_for_all_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert file.clients() == {A.encode()}
    if lines is None:
        os.unlink(path)
    else:
        write(path, *lines)
    assert file.clients() == {A.encode()}
    write(path, f"secret {SECRET}", f"client {A} a", f"client {B} b b-*")
    assert file.clients() == {A.encode(), B.encode()}
    assert file.now().listed == {A: ("a",), B: ("b", "b-*")}
    write(path, f"secret {SECRET}", f"client {B} b")
    assert file.clients() == {B.encode()}


def test_a_wrong_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyFile(str(tmp_path / "nothing"), read_controller_keys)
