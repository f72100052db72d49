"""The error tree: who is wrong, and the codes that other processes, dashboards and clients rely on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from kvstrata.errors import (
    WIRE_ERRORS,
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
