"""Frames of an adapter host are read back as they were written, and nothing else is taken for a frame."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import StorageError
from kvstrata.storage.base import (
    MAX_REMARK_CHARS,
    Capabilities,
    Found,
    LoadOutcome,
    LoadStatus,
    PayloadKind,
    Presence,
    PutOutcome,
    PutStatus,
    Usage,
)
from kvstrata.storage.host import channel
from kvstrata.storage.host.channel import Answer, ChannelError, Counted, Kind
from kvstrata.storage.host.kinds import KNOWN_KINDS, KnownKinds

T = TypeVar("T")

numbers = st.integers(0, 2**64 - 1)
reasons = st.text(alphabet=st.characters(codec="ascii"), max_size=channel.MAX_REASON_BYTES)
keys = st.binary(min_size=32, max_size=32)
words = st.from_regex("^[a-z][a-z0-9_]{0,63}$", fullmatch=True)
found = st.builds(Found, st.sampled_from(Presence), st.integers(0, 2**32 - 1), reasons)
puts = st.builds(PutOutcome, st.sampled_from(PutStatus), reasons)
loads = st.builds(LoadOutcome, st.sampled_from(LoadStatus), reasons)
frames = st.one_of(
    st.builds(channel.found, numbers, st.lists(found)),
    st.builds(channel.counted, numbers, numbers),
    st.builds(
        lambda count: channel.ended(
            Kind.LOAD_ENDED, 1, [LoadOutcome(LoadStatus.LOADED)] * count, [True] * count
        ),
        st.integers(0, 5),
    ),
    st.builds(channel.used, numbers, st.builds(Usage, numbers, numbers, numbers)),
    st.builds(channel.dropped, numbers, st.lists(st.integers(0, 2**16 - 1))),
    st.builds(channel.evicted, st.lists(keys)),
    st.just(channel.counts(Counted({"encoded": 1}, {"syncs": -2}))),
    st.just(channel.opened(Capabilities(persistent=True, shared=False), b"\0where")),
    st.just(channel.problem(Kind.RAISED, 3, ValueError("no"))),
    st.builds(channel.advertised, st.binary()),
)


@given(numbers, st.lists(found))
def test_answers_of_exists_are_read_back(number: int, outcomes: list[Found]) -> None:
    assert channel.read_answer(channel.found(number, outcomes)) == Answer(
        Kind.FOUND, number, outcomes=outcomes
    )


def repeated(one: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    """Lists of equal items."""
    return st.builds(lambda item, count: [item] * count, one, st.integers(1, 5))


@given(numbers, st.lists(st.tuples(puts, st.booleans())) | repeated(st.tuples(puts, st.booleans())))
def test_answers_of_a_put_are_read_back(number: int, items: list[tuple[PutOutcome, bool]]) -> None:
    outcomes, gone = [one for one, _ in items], [one for _, one in items]
    answer = channel.read_answer(channel.ended(Kind.PUT_ENDED, number, outcomes, gone))
    assert answer.outcomes == outcomes
    assert answer.dropped == [i for i, one in enumerate(gone) if one]


@given(numbers, st.lists(st.tuples(loads, st.booleans())) | repeated(st.tuples(loads, st.booleans())))
def test_answers_of_a_load_are_read_back(number: int, items: list[tuple[LoadOutcome, bool]]) -> None:
    outcomes, gone = [one for one, _ in items], [one for _, one in items]
    answer = channel.read_answer(channel.ended(Kind.LOAD_ENDED, number, outcomes, gone))
    assert answer.outcomes == outcomes
    assert answer.dropped == [i for i, one in enumerate(gone) if one]


kinds = st.builds(
    PayloadKind,
    st.integers(1, 16),
    st.none() | st.tuples(*[st.integers(1, 2**32 - 1)] * 6),
)
whose = st.binary(min_size=64, max_size=64)


@given(st.lists(st.tuples(whose, st.none() | kinds), max_size=channel.MAX_KINDS))
def test_kinds_of_payloads_are_read_back(known: list[tuple[bytes, PayloadKind | None]]) -> None:
    frame = channel.kinds(known)
    assert len(frame) <= channel.MAX_FRAME_BYTES
    request = channel.read_request(frame)
    assert (request.kind, request.kinds) == (Kind.KINDS, known)


def test_most_kinds_fit_a_frame_and_no_more_than_a_bound_are_known() -> None:
    known, told = KnownKinds(), KnownKinds()
    n, each = KNOWN_KINDS + 3, channel.MAX_KINDS
    rows = [(b"%064d" % i, PayloadKind(2, ((1 << 32) - 1,) * 6)) for i in range(n)]
    told.learn(rows)
    for at in range(0, n, each):
        frame = channel.kinds(rows[at : at + each])
        assert len(frame) <= channel.MAX_FRAME_BYTES
        known.learn(channel.read_request(frame).kinds)
    kept = [i for i, (of, _) in enumerate(rows) if known.of(of[:32], of[32:]) is not None]
    assert kept == list(range(3, n))
    assert all(told.of(of[:32], of[32:]) == known.of(of[:32], of[32:]) for of, _ in rows)
    known.learn([(rows[-1][0], None)])
    assert known.of(rows[-1][0][:32], rows[-1][0][32:]) is None


@given(
    st.builds(
        Counted,
        *[st.dictionaries(words, st.integers(-(2**63), 2**63 - 1))] * 2,
        st.dictionaries(words, st.text(max_size=MAX_REMARK_CHARS), max_size=8),
    )
)
def test_counters_are_read_back(counted: Counted) -> None:
    assert channel.read_answer(channel.counts(counted)) == Answer(Kind.COUNTS, 0, counts=counted)


@given(st.text())
def test_any_reason_fits_a_frame_and_is_read_as_text(reason: str) -> None:
    outcomes = [PutOutcome(PutStatus.FAILED, reason)] * channel.MAX_ITEMS
    frame = channel.ended(Kind.PUT_ENDED, 1, outcomes, [False] * len(outcomes))
    assert len(frame) <= channel.MAX_FRAME_BYTES
    [word] = {outcome.reason for outcome in channel.read_answer(frame).outcomes}
    assert reason.encode(errors="replace").decode().startswith(word)


@given(st.binary(max_size=200))
def test_other_bytes_are_an_error_of_the_channel(frame: bytes) -> None:
    try:
        channel.read_answer(frame)
    except ChannelError:
        pass


@given(frames, st.data())
def test_a_damaged_frame_is_read_as_some_answer_or_is_an_error_of_the_channel(
    frame: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(frame)
    damaged[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    for candidate in (bytes(damaged), frame[: data.draw(st.integers(0, len(frame) - 1))]):
        try:
            assert isinstance(channel.read_answer(candidate), Answer)
        except ChannelError:
            pass


def test_a_frame_of_the_server_is_no_answer() -> None:
    for frame in (channel.bare(Kind.CLEAR, 1), channel.keyed(Kind.EXISTS, 1, bytes(32))):
        with pytest.raises(ChannelError):
            channel.read_answer(frame)


def test_an_advertisement_larger_than_a_frame_is_refused_and_one_that_fits_is_read_back() -> None:
    capabilities = Capabilities(persistent=False, shared=True, takes_puts=False)
    with pytest.raises(StorageError, match="advertisement"):
        channel.opened(capabilities, bytes(channel.MAX_FRAME_BYTES))
    longest = bytes(range(256)) * 180
    answer = channel.read_answer(channel.opened(capabilities, longest))
    assert (answer.capabilities, answer.advertisement) == (capabilities, longest)
    with pytest.raises(StorageError, match="advertisement"):
        channel.advertised(bytes(channel.MAX_FRAME_BYTES))
    assert channel.read_answer(channel.advertised(longest)).advertisement == longest
