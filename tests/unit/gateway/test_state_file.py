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
    write_state,
)

STATE = State(
    saved_s=1.5,
    secret=bytes(32),
    pieces=[Piece(bytes(range(16)), [("a", 2.0), ("b@1", 0.0)])],
    responses=[("resp_1", "a")],
    rates=[("a", 100, 0.5, 3, True)],
    load_rates=[("a", "l1", 100, 0.25)],
    block_life_s=300.0,
    event_lag_s=0.1,
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
