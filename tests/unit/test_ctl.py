"""`kvstrata ctl`: what it prints and how it fails."""

from __future__ import annotations

import json

import pytest
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


ANY_KIND = {"model": "", "kind": None, "adapter": "", "tenant": "", "salt": ""}


@pytest.mark.parametrize("text", ["", "first-secret\nsecond-secret", "sécret"])
def test_a_file_that_holds_no_token_is_named_and_its_secret_is_not_told(capsys, tmp_path, text):
    file = tmp_path / "token"
    file.write_text(text)
    assert ctl.main(["--url", "http://127.0.0.1:9", "--token-file", str(file), "status"]) == 1
    error = capsys.readouterr().err
    assert f"--token-file: {file} must hold the token alone" in error and "secret" not in error


def test_tokens_that_are_no_json_are_named(capsys, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("nope")
    assert ctl.main(["prefetch", str(file)]) == 1
    assert str(file) in capsys.readouterr().err


def test_what_stranded_commands_ask():
    def asked(*arguments):
        return ctl._request(ctl.parser().parse_args(["stranded", *arguments]))

    assert asked("list") == ctl.Ask("/v1/stranded")
    assert asked("clear", "ab12") == ctl.Ask("/v1/stranded/clear", {"session": "ab12"})


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["list"], ctl.Ask("/v1/l2/adapters")),
        (["export"], ctl.Ask("/v1/l2/adapters")),
        (
            ["add", '{"type": "fs"}', "--position", "1", "--backfill"],
            ctl.Ask("/v1/l2/adapters", {"adapter": {"type": "fs"}, "position": 1, "backfill": True}, "", 60),
        ),
        (
            ["drain", "fs-0", "--no-loads", "--wait-s", "2.5"],
            ctl.Ask("/v1/l2/adapters/fs-0/drain", {"loads": False, "wait_s": 2.5}, "", 62.5),
        ),
        (["resume", "fs-0"], ctl.Ask("/v1/l2/adapters/fs-0/resume", {"backfill": False})),
        (["resume", "a/b", "--backfill"], ctl.Ask("/v1/l2/adapters/a%2Fb/resume", {"backfill": True})),
        (["remove", "a/b"], ctl.Ask("/v1/l2/adapters/a%2Fb?wait_s=10.0", None, "DELETE", 70)),
    ],
)
def test_what_l2_commands_ask(arguments, asked):
    assert ctl._request(ctl.parser().parse_args(["l2", *arguments])) == asked


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["status"], ctl.Ask("/v1/cluster")),
        (["instances"], ctl.Ask("/v1/instances")),
        (["instance", "a/b"], ctl.Ask("/v1/instances/a%2Fb")),
        (["events", "--after", "3"], ctl.Ask("/v1/events?wait_s=0.0&after=3")),
        (["drain", "a", "--wait-s", "2"], ctl.Ask("/v1/instances/a/drain", {"wait_s": 2.0}, "", 32)),
        (["remove", "a"], ctl.Ask("/v1/instances/a", None, "DELETE")),
        (["allow", "a"], ctl.Ask("/v1/instances/a/allow", {})),
        (["runtime", "a"], ctl.Ask("/v1/instances/a/runtime?wait_s=5.0", timeout_s=35)),
        (["document", "a"], ctl.Ask("/v1/instances/a/status?wait_s=5.0", timeout_s=35)),
        (
            ["explain", "--request-id", "r/1", "--wait-s", "2", "--instance", "a"],
            ctl.Ask(
                "/v1/explain", {**ANY_KIND, "request_id": "r/1", "instances": ["a"], "wait_s": 2.0}, "", 32
            ),
        ),
        (
            ["clear", "--tier", "all", "--instance", "a", "--instance", "b"],
            ctl.Ask(
                "/v1/clear", {"tier": "all", "tenant": None, "instances": ["a", "b"], "wait_s": 5.0}, "", 35
            ),
        ),
        (["unpin", "c"], ctl.Ask("/v1/unpin", {"claim": "c", "instance": None, "wait_s": 5.0}, "", 35)),
    ],
)
def test_what_cluster_commands_ask(arguments, asked):
    assert ctl._request(ctl.parser().parse_args(["cluster", *arguments])) == asked


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["l2"], "ACTION"),
        (["l2", "pause"], "invalid choice: 'pause'"),
        (["l2", "add"], "JSON"),
        (["l2", "add", "{}", "--position", "last"], "--position"),
        (["l2", "drain"], "name"),
        (["l2", "resume"], "name"),
        (["l2", "resume", "fs-0", "--wait-s", "1"], "--wait-s"),
        (["l2", "drain", "fs-0", "--wait-s", "-1"], "must be seconds from 0 to 600, found '-1'"),
        (["l2", "remove", "fs-0", "--wait-s", "nan"], "must be seconds from 0 to 600, found 'nan'"),
    ],
)
def test_wrong_l2_commands_are_named(arguments, says, capsys):
    with pytest.raises(SystemExit):
        ctl.main(arguments)
    assert says in capsys.readouterr().err


def test_an_adapter_that_is_no_json_is_named(capsys):
    assert ctl.main(["l2", "add", "fs"]) == 1
    assert "JSON: not JSON" in capsys.readouterr().err


def test_an_export_has_what_takes_part_in_its_order_and_names_secrets_to_fill_in(capsys):
    rows = [
        {"name": "b-1", "position": 0, "entry": {"type": "b", "password": "***"}, "secrets_left_out": ["password"]},
        {"name": "a-0", "position": 1, "entry": {"type": "a"}, "secrets_left_out": []},
        {"name": "c-2", "position": None, "entry": {"type": "c"}, "secrets_left_out": ["token"]},
    ]  # fmt: skip
    assert ctl._export(rows) == {"l2_adapters": [{"type": "b", "password": "***"}, {"type": "a"}]}
    assert capsys.readouterr().err == "kvstrata ctl: b-1: password: a secret is left out, fill it in\n"
    assert ctl._export([]) == {"l2_adapters": []}
