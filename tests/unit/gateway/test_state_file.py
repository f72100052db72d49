"""The file of what a gateway has learned: what is written is read, and everything else is refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.gateway.state_file import (
    HEAD_BYTES,
    MAGIC,
    NAME,
    VERSION,
    Piece,
    State,
    StateRefused,
    decoded,
    digest_of,
    encoded,
    read_state,
    remove_unfinished,
    write_state,
)

STATE = State(
    saved_s=1.5,
    secret=bytes(32),
    pieces=[Piece(bytes(range(16)), [("a", 2.0), ("b@1", 0.0)])],
    responses=[("resp_1", "a")],
    rates=[("a", 100, 0.5, 3, True)],
    load_rates=[("a", "l1", 100, 0.25)],
    paces=[("a", 300.0, 0.1)],
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, STATE)
    write_state(tmp_path, STATE)
    assert read_state(tmp_path) == STATE
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


@given(at=st.integers(0, len(encoded(STATE)) - 1), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_refused(at: int, flip: int, cut: bool) -> None:
    content = bytearray(encoded(STATE))
    content[at] ^= flip
    with pytest.raises(StateRefused):
        decoded(bytes(content[:at]) if cut else bytes(content))


def test_what_is_given_beside_the_state_is_read_as_if_it_were_in_it() -> None:
    pieces = [Piece(bytes([number]) * 16, [("a", 1.0)]) for number in range(20)]
    responses = [(f"resp_{number}", "b") for number in range(40)]
    both = decoded(encoded(STATE, pieces=iter(pieces), responses=iter(responses)))
    assert both.pieces == [*STATE.pieces, *pieces] and both.responses == [*STATE.responses, *responses]
    assert both.rates == STATE.rates and both.paces == STATE.paces


def test_what_a_killed_process_had_not_finished_is_deleted(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    (tmp_path / f".{NAME}.0123abcd").write_bytes(b"half")
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME] and read_state(tmp_path) == STATE


def test_a_file_of_another_version_is_refused_with_both_versions() -> None:
    content = bytearray(encoded(STATE))
    content[len(MAGIC)] = VERSION - 1
    with pytest.raises(StateRefused, match=f"version {VERSION - 1}; this gateway reads version {VERSION}"):
        decoded(bytes(content))


@given(st.binary(max_size=200))
def test_content_that_makes_no_sense_is_refused_though_its_checksum_is_right(body: bytes) -> None:
    head = encoded(STATE)[: HEAD_BYTES - 16]
    with pytest.raises(StateRefused, match="wrong content"):
        decoded(head + digest_of(body) + body)


def test_what_is_no_private_file_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    (tmp_path / NAME).chmod(0o640)
    with pytest.raises(StateRefused, match="only this user"):
        read_state(tmp_path)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to("/dev/zero")
    with pytest.raises(StateRefused, match="cannot be read"):
        read_state(tmp_path)
    (tmp_path / NAME).unlink()
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(StateRefused, match="only this user"):
        read_state(tmp_path)
