"""rpc/key_file.py: a changed file counts at once, a wrong one changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.rpc.key_file import KeyFile
from kvstrata.rpc.zmq_curve import new_secret, public_of, read_controller_keys

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
