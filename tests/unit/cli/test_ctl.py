"""`kvstrata ctl`: what it prints and how it fails."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli import asking, ctl
from kvstrata.cli.table import table
from kvstrata.errors import BadRequest, Unavailable
from kvstrata.process.http_local import socket_file
from tests.harness.daemon import free_port

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def test_cells_of_a_table_are_words_and_never_literals_of_python():
    row = {"hits": {"l1": 3, "l2": 0}, "miss": None, "tenant": "", "layers": ["a", {"b": True}], "none": {}}
    assert table([row]).splitlines() == [
        "hits        miss  tenant  layers      none",
        "l1=3, l2=0  -     -       a, (b=yes)  -",
    ]


@given(JSON)
def test_any_json_can_be_shown_as_a_table(value):
    assert isinstance(table(value), str)


def test_an_absent_server_is_reported_in_one_line(capsys):
    assert ctl.main(["--url", "http://127.0.0.1:9", "status"]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9 does not answer" in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "first-secret\nsecond-secret", "sécret"])
def test_a_file_that_holds_no_token_is_named_and_its_secret_is_not_told(capsys, tmp_path, text):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(text)
    assert ctl.main(["--url", "http://127.0.0.1:9", "--token-file", str(file), "status"]) == 2
    error = capsys.readouterr().err
    assert f"--token-file: {file} must hold the token alone" in error and "secret" not in error


def test_no_text_of_an_engine_is_obeyed_by_the_terminal():
    hostile = "\x1b]0;owned\x07\x9b2J\n\u202e"
    for value in (
        hostile,
        {hostile: hostile},
        {"a": {hostile: 1}},
        [{hostile: hostile, "b": {hostile: hostile}}],
        [hostile],
        {"a": [hostile, {"b": hostile}]},
    ):
        text = table(value)
        assert all(line.isprintable() for line in text.splitlines()) and "\\x1b]0;owned" in text


def test_a_unix_socket_is_asked_where_the_usual_port_is_nobody_s(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    port = free_port()
    usual = f"http://127.0.0.1:{port}"
    one = socket_file("server", Path("/run/one.sock"))
    assert asking.find_url(usual, "server") == "unix:/run/one.sock"
    with socket.create_server(("127.0.0.1", port)):
        assert asking.find_url(usual, "server") == usual
    two = socket_file("server", Path("/run/two.sock"))
    with pytest.raises(
        BadRequest, match=r"^--url: no server of this user .*unix:/run/one.sock, unix:/run/two.sock"
    ):
        asking.find_url(usual, "server")
    one.close()
    two.close()


def test_a_socket_that_is_not_there_and_a_path_that_is_none_are_errors_of_the_url(tmp_path, capsys):
    with pytest.raises(Unavailable, match=r"^--url: unix:.*is a server running there"):
        asking.ask(f"unix:{tmp_path / 'no.sock'}", asking.Ask("/v1/status"))
    assert ctl.main(["--url", "unix:no.sock", "status"]) == 2
    assert "--url: 'unix:no.sock' must be" in capsys.readouterr().err
