"""`kvstrata ctl`: what it prints and how it fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli import ctl
from kvstrata.cli.table import table

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
