"""What codecs learn about payloads: facts of slices, and the fp8 shape only for identities of fidelity fp8."""

from __future__ import annotations

import pytest

from kvstrata.policy.processes import ProcessTable
from kvstrata.server.l2.payload_kinds import MAX_SLICES, PayloadKinds
from kvstrata.storage.base import PayloadKind
from kvstrata.types import LayoutIdentity, RequestIdentity, Role, Slice

SHAPE = [1, 2, 2, 16, 2, 64]


def part(number: int = 0) -> Slice:
    return Slice(layers=(0, 2), kv_heads=(number, number + 1), layout="x")


def root_of(peers: ProcessTable, fidelity: str) -> bytes:
    """The root of an identity of an engine with this fidelity."""
    session = fidelity.encode().ljust(16, b"-")
    layout = LayoutIdentity(model="m", kv_dtype="bfloat16", chunk_tokens=16, fidelity=fidelity)
    member = peers.attach(
        session,
        group=session,
        role=Role.CLIENT,
        layout=layout,
        engine_slices=1,
        part=part(),
        tenants=None,
        row=0,
        pid=1,
        secret=bytes(32),
    )
    return peers.identify(member, RequestIdentity()).root


def test_only_an_identity_of_fidelity_fp8_has_an_fp8_shape() -> None:
    peers = ProcessTable(1)
    kinds = PayloadKinds(peers)
    kinds.attached(part(), {"element_bytes": 2, "fp8": SHAPE})
    digest = part().digest()
    assert kinds.of(root_of(peers, "fp8"), digest) == PayloadKind(2, tuple(SHAPE))
    assert kinds.of(root_of(peers, "lossless"), digest) == PayloadKind(2)
    assert kinds.of(b"unknown".ljust(32), digest) == PayloadKind(2)
    assert kinds.of(root_of(peers, "fp8"), part(1).digest()) is None


@pytest.mark.parametrize(
    "fact",
    [None, "fp8", SHAPE[:-1], [*SHAPE, 1], [3, *SHAPE[1:]], [1, 0, 1, 1, 1, 16], [1, 1, 1, 1, 1, 1], [True] * 6,
     [1, *[1 << 31] * 5], [1.0, *SHAPE[1:]]],
)  # fmt: skip
def test_an_invalid_fp8_shape_counts_as_none(fact: object) -> None:
    peers = ProcessTable(1)
    kinds = PayloadKinds(peers)
    kinds.attached(part(), {"fp8": fact})
    assert kinds.of(root_of(peers, "fp8"), part().digest()) == PayloadKind(2)


@pytest.mark.parametrize("fact", [None, "4", True, 0, -1, 17, 1 << 70])
def test_an_invalid_element_size_counts_as_two_bytes(fact: object) -> None:
    kinds = PayloadKinds(ProcessTable(1))
    kinds.attached(part(), {"element_bytes": fact})
    assert kinds.of(bytes(32), part().digest()) == PayloadKind(2)


def test_slices_are_remembered_up_to_a_bound() -> None:
    kinds = PayloadKinds(ProcessTable(1))
    kinds.attached(None, None)
    for number in range(MAX_SLICES + 1):
        kinds.attached(part(number), {"element_bytes": 1})
    assert kinds.of(bytes(32), part(0).digest()) is None
    assert kinds.of(bytes(32), part(MAX_SLICES).digest()) == PayloadKind(1)
