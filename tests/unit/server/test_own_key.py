"""server/cluster/own_key.py: an instance without a key file keeps one key, which only its user can read."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.rpc.zmq_curve import public_of
from kvstrata.server.cluster.own_key import own_secret


def test_a_key_is_made_once_and_each_id_has_its_own(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    first = own_secret("a", tmp_path, environment)
    assert own_secret("a", tmp_path, environment) == first and public_of(first)
    assert own_secret("b", tmp_path, environment) != first
    folder = tmp_path / "state" / "kvstrata" / "members"
    assert sorted(path.name for path in folder.iterdir()) == ["a.key", "b.key"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "a.key").stat().st_mode) == 0o600


def test_without_a_folder_for_state_the_key_lies_in_the_socket_directory(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    environment = {"XDG_STATE_HOME": str(tmp_path / "a file")}
    sockets = tmp_path / "sockets"
    first = own_secret("a", sockets, environment)
    assert stat.S_IMODE((sockets / "member.key").stat().st_mode) == 0o600
    assert own_secret("a", sockets, environment) == first
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME"):
        own_secret("a", tmp_path / "a file", environment)


@pytest.mark.parametrize(("content", "mode", "says"), [("short", 0o600, "damaged"), ("", 0o640, "chmod 600")])
def test_a_file_that_is_damaged_or_that_others_can_read_stops_the_start(tmp_path, content, mode, says):
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    own_secret("a", tmp_path, environment)
    path = tmp_path / "kvstrata" / "members" / "a.key"
    if content:
        path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        own_secret("a", tmp_path, environment)
