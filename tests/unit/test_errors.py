"""The error tree, the codes that others rely on, and texts of others in errors: one line, bounded, no credentials."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from pathlib import Path

import pytest

from kvstrata import text
from kvstrata.config.secrets import scrubbed
from kvstrata.errors import (
    WIRE_ERRORS,
    BadRequest,
    ConfigError,
    InstanceIdTaken,
    InternalError,
    KvstrataError,
    Superseded,
    TooOld,
    UnknownInstance,
    UnreachableInstance,
    WrongKey,
    from_wire,
    install,
)
from kvstrata.observability import logging as log_format
from kvstrata.text import LEFT_OUT, MAX_LINE_CHARS, one_line, remember_secret

GOLDEN = """
    bad_config         no   ConfigError    ConfigError
    bad_request        no   CallerError    BadRequest
    wrong_version      no   CallerError    WrongVersion
    unknown_identity   yes  CallerError    UnknownIdentity
    not_permitted      no   CallerError    NotPermitted
    layout_refused     no   CallerError    LayoutRefused
    refused            yes  RemoteError    Refused
    deadline           yes  RemoteError    DeadlineExceeded
    cancelled          no   CallerError    Cancelled
    unavailable        yes  RemoteError    Unavailable
    not_leading        yes  RemoteError    NotLeading
    segment            no   MediumError    SegmentError
    storage            no   MediumError    StorageError
    transfer           no   MediumError    TransferError
    internal           no   InternalError  InternalError
    unknown_instance   yes  CallerError    UnknownInstance
    superseded         yes  CallerError    Superseded
    instance_id_taken  yes  CallerError    InstanceIdTaken
    wrong_key          no   CallerError    WrongKey
    too_old            no   CallerError    TooOld
    unreachable_instance yes CallerError   UnreachableInstance
"""
"""Code, retryable, branch, class. A changed line is a change of the wire."""

BRANCHES = ("CallerError", "ConfigError", "MediumError", "RemoteError", "InternalError")


def line(code: str, error: type[KvstrataError]) -> str:
    branch = next(kind.__name__ for kind in error.__mro__ if kind.__name__ in BRANCHES)
    return f"{code} {'yes' if error.retryable else 'no'} {branch} {error.__name__}"


def test_codes_of_the_wire_stay() -> None:
    of_controllers = [UnknownInstance, Superseded, InstanceIdTaken, WrongKey, TooOld, UnreachableInstance]
    lines = [line(error.code, error) for error in [*WIRE_ERRORS.values(), *of_controllers]]
    assert lines == [" ".join(row.split()) for row in GOLDEN.strip().splitlines()]


def test_a_reply_becomes_the_error_it_names() -> None:
    for code in (*WIRE_ERRORS, "of_a_later_version"):
        error = from_wire(code, "what is wrong", field="seq")
        assert type(error) is WIRE_ERRORS.get(code, InternalError)
        assert (error.message, error.field, error.retry_after_ms) == ("what is wrong", "seq", 0)


def test_each_extra_that_an_error_says_to_install_exists() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = re.findall(r"\binstall\(\"([a-z_,-]+)\"\)|\binstall\('([a-z_,-]+)'\)", "".join(
        file.read_text() for file in (root / "src").rglob("*.py")
    ))  # fmt: skip
    assert {name for found in told for one in found for name in one.split(",") if name} <= set(extras)
    assert len(told) > 5 and "[etcd]" in install("etcd")


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_known", ())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("redis://me:hunter2@host:1/0 hangs up", f"redis://{LEFT_OUT}@host:1/0 hangs up"),
        ("redis://:p/w@x@host:1", f"redis://{LEFT_OUT}@host:1"),
        ("https://ghp_0123456789abcdef0123@host/x", f"https://{LEFT_OUT}@host/x"),
        ("https://h/x?X-Amz-Signature=abcd&a=1", f"https://h/x?X-Amz-Signature={LEFT_OUT}&a=1"),
        ("Authorization: Bearer abc1def2ghi3", f"Authorization: Bearer {LEFT_OUT}"),
        (
            "key -----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- is bad",
            f"key {LEFT_OUT} is bad",
        ),
        ("a\x1b[31mred\r\n\x00b\u202ec", r"a\x1b[31mred\r\n\x00b\u202ec"),
        ("adapter.password: must be a string", "adapter.password: must be a string"),
        ("http://proxy:3128 and s3://bucket/a:b@c", "http://proxy:3128 and s3://bucket/a:b@c"),
        ("missing or wrong bearer token", "missing or wrong bearer token"),
    ],
)
def test_credentials_and_control_characters_are_not_repeated(given: str, wanted: str) -> None:
    assert one_line(given) == wanted


@pytest.mark.parametrize("long", ["x" * 200_000, "x " * 100_000, "\x00" * 200_000, "\ud800" * 9_000])
def test_a_long_text_is_cut(long: str) -> None:
    line = one_line(f"type: unknown {long}")
    assert line.startswith("type: unknown ") and len(line) <= MAX_LINE_CHARS and line.isprintable()


def test_a_secret_that_was_read_is_left_out_wherever_it_stands() -> None:
    remember_secret("correct horse")
    remember_secret("correct horse battery\n")
    remember_secret("short")
    assert one_line("WRONGPASS for 'correct horse battery', short") == f"WRONGPASS for '{LEFT_OUT}', short"
    for n in range(2 * text.MAX_SECRETS):
        remember_secret(f"number {n}")
    assert len(text._known) == text.MAX_SECRETS
    newest = 2 * text.MAX_SECRETS - 1
    assert one_line(f"number {newest}") == LEFT_OUT


def test_every_error_is_such_a_line() -> None:
    remember_secret("hunter2")
    error = ConfigError("type: " + "y" * 200_000 + "\nhunter2", field="z" * 200_000)
    assert len(error.message) < 400 and len(error.field) <= 200 and str(error) == error.message
    assert BadRequest("a\nb hunter2").message == rf"a\nb {LEFT_OUT}"


def test_every_log_line_is_such_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_secret("hunter2")
    log = tmp_path / "log"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr(log_format, "STDERR", fd)
    monkeypatch.setattr(log_format, "_writer", None)
    root, ours = logging.getLogger(), logging.getLogger("kvstrata")
    before = root.handlers[:], ours.handlers[:], ours.level, ours.propagate
    try:
        log_format.set_up("info")
        logging.getLogger("kvstrata.test").warning("a\n%s", "\x1b[2J redis://u:p@h hunter2")
        try:
            raise OSError("refused hunter2\x1b")
        except OSError:
            logging.getLogger("kvstrata.test").exception("failed")
        log_format.flush_log()
    finally:
        root.handlers[:], ours.handlers[:], ours.level, ours.propagate = before
        logging.captureWarnings(False)
    os.close(fd)
    written = log.read_text()
    assert "hunter2" not in written and "u:p@" not in written and "\x1b" not in written
    assert r"a\n\x1b[2J redis" in written and "\nTraceback" in written


@pytest.mark.parametrize(
    "part", ["://", "://:", "a://b:", "?sig", "secret-", "secret", "bearer ", "-----BEGIN A-----", "@", "x@:"]
)
def test_no_text_takes_long(part: str) -> None:
    """A pattern whose steps grow with the square of the text would keep this test busy for minutes."""
    long = part * (200_000 // len(part))
    assert len(one_line(long)) <= MAX_LINE_CHARS and len(one_line(f"redis://u:p@h {long}")) <= MAX_LINE_CHARS
    assert len(scrubbed(long)) <= 300
