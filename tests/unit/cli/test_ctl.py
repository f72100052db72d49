"""`kvstrata ctl`: what it prints and how it fails."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli import asking, ctl, ctl_explain
from kvstrata.cli.table import table
from kvstrata.errors import BadRequest, Unavailable
from kvstrata.process.http_token import SocketFile
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


EVICTED = {"chunk": 3, "reason": "evicted", "detail": "by LRU at 7 (unix ms)", "storage_key": "ab" * 32}
LOOKUP = {
    "request_id": "cmpl-7-0-1f2e3d4c", "tenant": "", "identity": "cd" * 32, "unix_ms": 1_700_000_000_000,
    "duration_ms": 0.25, "chunks": 5, "hits": {"l1": 2, "l2": 1, "served": 3}, "first_miss": EVICTED,
}  # fmt: skip


def test_an_explained_request_is_a_line_for_each_lookup():
    whole = {**LOOKUP, "first_miss": None}
    answer = {"request_id": LOOKUP["request_id"], "known": True, "lookups": [LOOKUP, whole]}
    assert table(ctl_explain.of_server(answer)).splitlines() == [
        "request_id  cmpl-7-0-1f2e3d4c",
        "lookups",
        "  at                    ms    tenant  chunks  l1  l2  served  first_miss",
        "  2023-11-14T22:13:20Z  0.25  -       5       2   1   3"
        "       chunk 3: evicted (by LRU at 7 (unix ms))",
        "  2023-11-14T22:13:20Z  0.25  -       5       2   1   3       -",
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


def test_a_file_of_tokens_that_is_not_json_is_refused(capsys, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("nope")
    assert ctl.main(["prefetch", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_a_quota_is_put_to_its_tenant_whatever_the_name():
    options = ctl.parser().parse_args(["quota", "a/b c", "0.5"])
    assert ctl._request(options) == asking.Ask("/v1/tenants/a%2Fb%20c/quota", {"quota_gb": 0.5}, "PUT")


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["list"], asking.Ask("/v1/l2/adapters")),
        (["show", "fs-0"], asking.Ask("/v1/l2/adapters")),
        (["pause", "fs-0"], asking.Ask("/v1/l2/adapters/fs-0/pause", {})),
        (["resume", "a/b"], asking.Ask("/v1/l2/adapters/a%2Fb/resume", {})),
    ],
)
def test_l2_commands_send_these_requests(arguments, asked):
    assert ctl._request(ctl.parser().parse_args(["l2", *arguments])) == asked


@pytest.mark.parametrize(
    ("held", "field"), [("[1, 2]", "tokens"), (f'["{"0" * 64}"]', "keys"), ("[]", "tokens")]
)
def test_a_file_of_chunks_holds_tokens_or_keys(tmp_path, held, field):
    file = tmp_path / "chunks"
    file.write_text(held)
    for action in (["lookup"], ["pin"], ["move", "--to", "b"], ["replicate", "--to", "b"], ["evict"]):
        asked = ctl._request(ctl.parser().parse_args(["cluster", *action, str(file)]))
        assert asked.path == f"/v1/{action[0]}" and asked.body is not None
        assert asked.body[field] == json.loads(held)


def test_layers_of_one_adapter_or_of_all_are_shown():
    medium, metrics = {"layer": "medium", "process": "host"}, {"layer": "metrics", "process": "server"}
    rows = [{"name": "b-1", "layers": [medium, metrics]}, {"name": "a-0", "layers": [metrics]}]
    assert ctl._layers(rows, "b-1") == [{"name": "b-1", **medium}, {"name": "b-1", **metrics}]
    assert [row["name"] for row in ctl._layers(rows, "")] == ["b-1", "b-1", "a-0"]
    with pytest.raises(BadRequest, match="no adapter 'c-2'; there are: b-1, a-0"):
        ctl._layers(rows, "c-2")


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
    one = SocketFile("server", Path("/run/one.sock"))
    assert asking.find_url(usual, "server") == "unix:/run/one.sock"
    with socket.create_server(("127.0.0.1", port)):
        assert asking.find_url(usual, "server") == usual
    two = SocketFile("server", Path("/run/two.sock"))
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
