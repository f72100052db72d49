"""Whatever an adapter host sends is read as a message or refused."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.testing.strategies import Settled
from kvstrata.tiers.base import Capabilities, KeyPage, Outcome
from kvstrata.tiers.host import frames
from kvstrata.tiers.host.frames import MAX_ITEMS, ChannelError

SAMPLES: list[Any] = [
    frames.Opened(Capabilities(persistent=True, shared=False), b"x"),
    frames.answer_of(1, (bytes([0, 2]), "io"), []),
    frames.answer_of(1, [Settled(Outcome.STORED), Settled(Outcome.FAILED, "full")], [1]),
    frames.answer_of(1, KeyPage([bytes(32)], 9), []),
    frames.Raised(1, "StorageError", "no", "field"),
    frames.Report({"syncs": 4}, {"why": "so"}, [bytes(32)], b"here"),
]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
)
names = st.sampled_from([type(sample).__name__ for sample in SAMPLES])


@given(
    st.binary(max_size=200)
    | st.builds(lambda name, rest: msgspec.msgpack.encode([name, *rest]), names, st.lists(values))
)
def test_any_bytes_are_a_message_or_refused(frame: bytes) -> None:
    try:
        message = frames.read_answer(frame)
    except ChannelError:
        return
    assert frames.read_answer(frames.frame_of(message)) == message
    if isinstance(message, frames.Answer):
        for operation in get_args(frames.Operation):
            with contextlib.suppress(ChannelError):
                frames.result_of(operation, 2, message)


@given(st.sampled_from(SAMPLES), st.data())
def test_a_damaged_frame_is_a_message_or_refused(sample: Any, data: st.DataObject) -> None:
    frame = bytearray(frames.frame_of(sample))
    assert frames.read_answer(bytes(frame)) == sample
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    test_any_bytes_are_a_message_or_refused.hypothesis.inner_test(bytes(frame))  # type: ignore[attr-defined]


def test_as_many_outcomes_as_a_frame_may_have_fit_with_the_longest_reasons() -> None:
    outcomes = [Settled(Outcome.FAILED, "ö" * 99)] * MAX_ITEMS
    frames.frame_of(frames.answer_of(1 << 62, outcomes, list(range(MAX_ITEMS))))
    items = [(bytes(32), 1 << 40, (1 << 32) - 1, True)] * MAX_ITEMS
    frames.frame_of(frames.Call(1 << 62, "load", items, owner=bytes(200)))
