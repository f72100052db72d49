"""`kvstrata ctl`: what it prints and how it fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli import ctl

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def test_a_table_aligns_keys_and_rows():
    shown = ctl.table(
        {"epoch": 3, "rows": [{"row": 1, "role": "worker"}, {"row": 22, "old": True}], "none": []}
    )
    assert shown.splitlines() == [
        "epoch  3",
        "rows",
        "  row  role    old",
        "  1    worker  -",
        "  22   -       yes",
        "none   -",
    ]


@given(JSON)
def test_any_answer_can_be_shown(value):
    assert isinstance(ctl.table(value), str)


def test_no_server_is_one_line(capsys):
    assert ctl.main(["--url", "http://127.0.0.1:9", "status"]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9 does not answer" in error and error.count("\n") == 1


def test_tokens_that_are_no_json_are_named(capsys, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("nope")
    assert ctl.main(["prefetch", str(file)]) == 1
    assert str(file) in capsys.readouterr().err
