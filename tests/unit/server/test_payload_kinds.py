"""What codecs learn about payloads: the element size of each slice, as engines declare it."""

from __future__ import annotations

from kvstrata.rpc.wire import MAX_SLICES
from kvstrata.server.payload_kinds import PayloadKinds
from kvstrata.types import Slice


def part(number: int = 0) -> Slice:
    return Slice(layers=(0, 2), kv_heads=(number, number + 1), layout="x")


def test_an_invalid_element_size_counts_as_two_bytes() -> None:
    kinds = PayloadKinds()
    for fact in (None, "4", True, 0, -1, 17, 1 << 70):
        kinds.attached(part(), {"element_bytes": fact})
        assert kinds.element_bytes_of(part().digest()) == 2


def test_slices_are_remembered_up_to_a_bound() -> None:
    kinds = PayloadKinds()
    kinds.attached(None, None)
    for number in range(MAX_SLICES + 1):
        kinds.attached(part(number), {"element_bytes": 1})
    assert kinds.element_bytes_of(part(0).digest()) == 2
    assert kinds.element_bytes_of(part(MAX_SLICES).digest()) == 1
