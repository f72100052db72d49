"""Every transfer engine keeps its contract (kvstrata/p2p/engines/base.py), with real processes at both ends."""

from __future__ import annotations

import contextlib
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstrata.p2p.engines.base import MAX_ITEMS, MAX_METADATA_BYTES
from tests.harness.child import Child, ChildEnded, ChildError
from tests.harness.transfer_peer import pattern

pytestmark = pytest.mark.integration

KIB, MIB = 1 << 10, 1 << 20
LENGTHS = [8 * MIB, MIB]
LONG_S = 60.0
ENDED_ONCE = 1


class Engine(NamedTuple):
    """One way to run an engine."""

    name: str
    settings: tuple[str, ...]
    environment: dict[str, str] | None

    @property
    def drains(self) -> bool:
        return self.name == "ucx"

    @property
    def may_end_the_owner(self) -> bool:
        """Whether the death of a reader may abort the owner: UCX's own reads over tcp can, and NIXL has no others."""
        return self.name == "nixl" and self.settings == ("UCX_TLS=tcp",)


VARIANTS = {
    "ucx-one-host": ("ucx", ("UCX_TLS=shm,tcp",)),
    "ucx-no-network": ("ucx", ("UCX_TLS=^tcp",)),
    "ucx-tcp": ("ucx", ("UCX_TLS=tcp",)),
    "nixl-one-host": ("nixl", ("UCX_TLS=shm,tcp",)),
    "nixl-tcp": ("nixl", ("UCX_TLS=tcp",)),
}


@pytest.fixture(params=VARIANTS)
def engine(request: pytest.FixtureRequest) -> Engine:
    name, settings = VARIANTS[request.param]
    environment = request.getfixturevalue("nixl_environment") if name == "nixl" else None
    if name == "ucx":
        from kvstrata.errors import TransferError
        from kvstrata.p2p.engines.ucx import native_module

        try:
            native_module()
        except TransferError as error:
            pytest.skip(str(error))
    return Engine(name, settings, environment)


Start = Callable[..., Child]


@pytest.fixture
def start(engine: Engine, tmp_path: Path) -> Iterator[Start]:
    """Starts processes with an open transfer engine; a process's `metadata` are for its peers."""
    with contextlib.ExitStack() as stack:

        def started(seed: int = 0, lengths: list[int] | None = None) -> Child:
            command = ("tests.harness.transfer_peer", engine.name, *engine.settings)
            process = Child(*command, log=tmp_path / "peer.log", environment=engine.environment)
            stack.enter_context(process)
            process.metadata = process.ask("open", lengths=lengths or LENGTHS, seed=seed)  # type: ignore[attr-defined]
            return process

        yield started


def metadata_of(process: Any) -> bytes:
    return bytes.fromhex(process.metadata)


def connect(reader: Child, peer: str, metadata: bytes) -> None:
    reader.ask("connect", peer=peer, metadata=metadata.hex())


def pair(start: Start, seed: int = 5, lengths: list[int] | None = None) -> tuple[Child, Child]:
    """Start an owner and a reader that is connected to it by the name "owner"."""
    owner, reader = start(seed, lengths), start(0, lengths)
    connect(reader, "owner", metadata_of(owner))
    return owner, reader


def whole(lengths: list[int], piece: int) -> list[list[int]]:
    return [[r, at, r, at, piece] for r, length in enumerate(lengths) for at in range(0, length, piece)]


def sums(process: Child, lengths: list[int]) -> list[int]:
    return [process.ask("checksum", region=i, offset=0, length=n) for i, n in enumerate(lengths)]


def zeros(lengths: list[int]) -> list[int]:
    return [zlib.crc32(bytes(length)) for length in lengths]


def until(condition: Callable[[], bool]) -> None:
    """Ask until the condition holds; each try waits for another process's answer, so no clock is needed."""
    for _ in range(100_000):
        if condition():
            return
    raise AssertionError("the condition never held")


def test_bytes_arrive_where_the_items_say_and_nowhere_else(start: Start) -> None:
    owner, reader = pair(start)
    items = [[0, 1, 1, 3, 1], [1, 5, 0, 777, 12345], [0, 4 * MIB - 7, 0, 3 * MIB + 1, 2 * MIB + 11]]
    assert reader.ask("read", peer="owner", items=items) == ["", ENDED_ONCE]
    expected = [bytearray(n) for n in LENGTHS]
    for remote, at, local, to, length in items:
        expected[local][to : to + length] = pattern(5 + remote, LENGTHS[remote])[at : at + length]
    assert sums(reader, LENGTHS) == [zlib.crc32(part) for part in expected]
    assert sums(owner, LENGTHS) == [zlib.crc32(pattern(5 + i, n)) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    ("lengths", "piece"), [([64 * MIB], MIB), ([8 * MIB], 4 * KIB)], ids=["64x1MiB", "2048x4KiB"]
)
def test_batches_of_many_items_are_whole(start: Start, lengths: list[int], piece: int) -> None:
    owner, reader = pair(start, lengths=lengths)
    assert reader.ask("read", peer="owner", items=whole(lengths, piece)) == ["", ENDED_ONCE]
    assert sums(reader, lengths) == sums(owner, lengths)


OUTSIDE = [
    [0, 8 * MIB, 0, 0, 1],
    [0, 8 * MIB - 10, 0, 0, 11],
    [0, 0, 0, 8 * MIB - 10, 11],
    [1, 0, 0, 0, MIB + 1],
    [0, 0, 1, 0, MIB + 1],
    [0, -1, 0, 0, 1],
    [0, 0, 0, -1, 1],
    [2, 0, 0, 0, 1],
    [0, 0, 2, 0, 1],
    [-1, 0, 0, 0, 1],
    [0, 0, 0, 0, 0],
    [0, 0, 0, 0, -1],
    [0, 1 << 64, 0, 0, 1],
    [0, 0, 0, 0, 1 << 64],
]


def test_an_item_outside_of_a_region_is_refused_before_anything_is_read(start: Start) -> None:
    _, reader = pair(start)
    for bad in OUTSIDE:
        for items in ([bad], [[0, 0, 0, 0, MIB], bad]):
            assert reader.ask("read", peer="owner", items=items) == ["out_of_range", ENDED_ONCE], bad
    assert sums(reader, LENGTHS) == zeros(LENGTHS)


def test_no_items_and_too_many_are_refused(start: Start) -> None:
    _, reader = pair(start)
    assert reader.ask("read", peer="owner", items=[]) == ["out_of_range", ENDED_ONCE]
    many = [[0, 0, 0, 0, 1]] * (MAX_ITEMS + 1)
    assert reader.ask("read", peer="owner", items=many) == ["out_of_range", ENDED_ONCE]


def test_impossible_metadata_are_refused_and_the_old_connection_stays(start: Start, engine: Engine) -> None:
    owner, reader = pair(start)
    good = metadata_of(owner)
    name = engine.name.encode()
    other = good.replace(name, b"x" * len(name), 1)
    wrong = {
        "was not packed by a transfer engine": [b"", b"garbage" * 9, bytes(len(good))],
        "at most": [good + bytes(MAX_METADATA_BYTES)],
        "names another length": [good[:-1], good + b"x", good[:20]],
        "damaged": [good[:-1] + bytes([good[-1] ^ 1]), other],
        "format version": [good[:4] + b"\x63\x00" + good[6:]],
        "comes from the engine": [other[:13] + struct.pack("<I", zlib.crc32(other[17:])) + other[17:]],
    }
    for sentence, many in wrong.items():
        for metadata in many:
            with pytest.raises(ChildError, match=sentence) as refused:
                connect(reader, "owner", metadata)
            assert refused.value.code == "transfer"
            assert refused.value.field == "metadata"
    assert reader.ask("read", peer="owner", items=whole(LENGTHS, MIB)) == ["", ENDED_ONCE]
    assert sums(reader, LENGTHS) == sums(owner, LENGTHS)


def test_truncated_metadata_of_an_engine_are_refused(start: Start, engine: Engine) -> None:
    owner, reader = pair(start)
    good = metadata_of(owner)
    magic, version, regions, name_bytes, part_bytes, _ = struct.unpack_from("<4sHHBII", good)
    for cut in (part_bytes, part_bytes - 1, part_bytes // 2):
        rest = good[17 : len(good) - cut]
        checksum = zlib.crc32(rest)
        head = struct.pack("<4sHHBII", magic, version, regions, name_bytes, part_bytes - cut, checksum)
        with pytest.raises(ChildError) as refused:
            connect(reader, "other", head + rest)
        assert refused.value.code == "transfer"
    assert reader.ask("read", peer="owner", items=whole(LENGTHS, MIB)) == ["", ENDED_ONCE]


def test_metadata_whose_head_names_other_regions_are_refused(start: Start) -> None:
    owner, reader = pair(start)
    good = metadata_of(owner)
    magic, version, regions, name_bytes, part_bytes, _ = struct.unpack_from("<4sHHBII", good)
    for named in (regions - 1, regions + 1, regions + 7):
        lengths = struct.pack("<Q", MIB) * named
        rest = lengths + good[17 + 8 * regions :]
        head = struct.pack("<4sHHBII", magic, version, named, name_bytes, part_bytes, zlib.crc32(rest))
        with pytest.raises(ChildError) as refused:
            connect(reader, "other", head + rest)
        assert (refused.value.code, refused.value.field) == ("transfer", "metadata")
    assert reader.ask("read", peer="owner", items=whole(LENGTHS, MIB)) == ["", ENDED_ONCE]


def test_connecting_again_changes_nothing_and_after_disconnecting_reads_fail(start: Start) -> None:
    owner, reader = pair(start)
    for _ in range(3):
        connect(reader, "owner", metadata_of(owner))
    assert reader.ask("read", peer="owner", items=[[0, 0, 0, 0, 1]]) == ["", ENDED_ONCE]
    for _ in range(2):
        reader.ask("disconnect", peer="owner")
    assert reader.ask("read", peer="owner", items=[[0, 0, 0, 0, 1]]) == ["not_connected", ENDED_ONCE]
    reader.ask("disconnect", peer="nobody")
    connect(reader, "owner", metadata_of(owner))
    assert reader.ask("read", peer="owner", items=[[0, 0, 0, 0, 1]]) == ["", ENDED_ONCE]
    reader.ask("close")
    reader.ask("close")
    assert reader.ask("read", peer="owner", items=[[0, 0, 0, 0, 1]]) == ["closed", ENDED_ONCE]


def test_a_read_from_a_killed_peer_fails_and_its_successor_can_be_read(start: Start) -> None:
    lengths = [32 * MIB]
    owner, reader = pair(start, lengths=lengths)
    numbers = [
        reader.ask("begin_read", peer="owner", items=whole(lengths, MIB), deadline_s=LONG_S) for _ in range(8)
    ]
    owner.kill()
    answers = [reader.ask("finish_read", number=number) for number in numbers]
    assert all(reason in ("", "peer_gone") and ended == ENDED_ONCE for reason, ended in answers), answers
    until(lambda: reader.ask("read", peer="owner", items=[[0, 0, 0, 0, 1]]) == ["peer_gone", ENDED_ONCE])
    successor = start(9, lengths)
    connect(reader, "owner", metadata_of(successor))
    assert reader.ask("read", peer="owner", items=whole(lengths, MIB)) == ["", ENDED_ONCE]
    assert sums(reader, lengths) == [zlib.crc32(pattern(9, lengths[0]))]


def test_a_reader_killed_in_mid_read_does_not_harm_the_owner(start: Start, engine: Engine) -> None:
    """Where the engine can do no better, the owner's process may end; then its successor must be readable."""
    lengths = [32 * MIB]
    owner = start(5, lengths)

    def killed_in_mid_read() -> None:
        reader = start(0, lengths)
        connect(reader, "owner", metadata_of(owner))
        for _ in range(4):
            reader.ask("begin_read", peer="owner", items=whole(lengths, MIB), deadline_s=LONG_S)
        reader.kill()

    def read() -> None:
        reader = start(0, lengths)
        connect(reader, "owner", metadata_of(owner))
        assert reader.ask("read", peer="owner", items=whole(lengths, MIB)) == ["", ENDED_ONCE]
        assert sums(reader, lengths) == sums(owner, lengths)

    for happens in (killed_in_mid_read, killed_in_mid_read, killed_in_mid_read, read):
        try:
            happens()
        except (AssertionError, ChildError, ChildEnded):
            if not engine.may_end_the_owner:
                raise
            owner.wait()  # raises if the owner still runs: then the failure has no excuse
            owner = start(5, lengths)
            happens()


def test_a_read_from_a_stopped_peer_fails_in_time_and_writes_nothing_after_its_end(
    start: Start, engine: Engine
) -> None:
    lengths = [32 * MIB]
    owner, reader = pair(start, lengths=lengths)
    owner.signal(signal.SIGSTOP)
    begin = {"peer": "owner", "items": whole(lengths, MIB), "deadline_s": 0.3}
    numbers = [reader.ask("begin_read", **begin) for _ in range(3)]
    answers = [reader.ask("finish_read", number=number)[0] for number in numbers]
    assert set(answers) <= {"", "deadline"}
    if not engine.drains:
        owner.signal(signal.SIGCONT)
    # Over these transports a read whose wait has ended ends by itself; another test covers `disconnect`.
    until(lambda: all(reader.ask("times_ended", number=number) for number in numbers))
    reader.ask("poison", seed=77, offset=0, length=lengths[0])
    owner.signal(signal.SIGCONT)
    # When new reads have arrived, no byte of the old ones can be on its way any more.
    connect(reader, "owner", metadata_of(owner))
    assert reader.ask("read", peer="owner", items=[[0, 0, 0, 0, MIB]]) == ["", ENDED_ONCE]
    expected = pattern(5, lengths[0])[:MIB] + pattern(77, lengths[0])[MIB:]
    assert sums(reader, lengths) == [zlib.crc32(expected)]
    assert [reader.ask("times_ended", number=number) for number in numbers] == [ENDED_ONCE] * 3


def test_a_read_whose_wait_was_cancelled_still_ends(start: Start) -> None:
    lengths = [32 * MIB]
    owner, reader = pair(start, lengths=lengths)
    owner.signal(signal.SIGSTOP)
    number = reader.ask("begin_read", peer="owner", items=whole(lengths, MIB), deadline_s=LONG_S)
    reader.ask("cancel_read", number=number)
    owner.signal(signal.SIGCONT)
    until(lambda: reader.ask("times_ended", number=number) == ENDED_ONCE)
    assert reader.ask("read", peer="owner", items=whole(lengths, MIB)) == ["", ENDED_ONCE]
    assert sums(reader, lengths) == sums(owner, lengths)
    assert reader.ask("times_ended", number=number) == ENDED_ONCE


@pytest.mark.parametrize("ending", ["close", "disconnect"])
def test_close_and_disconnect_end_reads_as_far_as_the_engine_can(
    start: Start, engine: Engine, ending: str
) -> None:
    lengths = [32 * MIB]
    owner, reader = pair(start, lengths=lengths)
    owner.signal(signal.SIGSTOP)
    begin = {"peer": "owner", "items": whole(lengths, MIB), "deadline_s": LONG_S}
    numbers = [reader.ask("begin_read", **begin) for _ in range(6)]
    reader.ask(ending, **({"peer": "owner"} if ending == "disconnect" else {}))
    ended = [reader.ask("times_ended", number=number) for number in numbers]
    answers = {reader.ask("finish_read", number=number)[0] for number in numbers}
    assert answers <= {"", "cancelled"}
    owner.signal(signal.SIGCONT)
    if engine.drains:
        assert ended == [ENDED_ONCE] * 6
    elif ending == "disconnect":
        until(lambda: [reader.ask("times_ended", number=n) for n in numbers] == [ENDED_ONCE] * 6)
    assert owner.finish() == 0


def test_two_peers_read_each_other_at_once(start: Start) -> None:
    lengths = [32 * MIB]
    half = lengths[0] // 2
    one, two = start(5, lengths), start(11, lengths)
    connect(one, "two", metadata_of(two))
    connect(two, "one", metadata_of(one))
    # Each process reads the other's upper half into its own lower half.
    items = [[0, half + at, 0, at, MIB] for at in range(0, half, MIB)]
    begun = [
        (process, process.ask("begin_read", peer=peer, items=items, deadline_s=LONG_S))
        for _ in range(4)
        for process, peer in ((one, "two"), (two, "one"))
    ]
    for process, number in begun:
        assert process.ask("finish_read", number=number) == ["", ENDED_ONCE]
    for process, seed in ((one, 11), (two, 5)):
        expected = zlib.crc32(pattern(seed, lengths[0])[half:])
        assert process.ask("checksum", region=0, offset=0, length=half) == expected


def test_a_read_over_a_cut_connection_fails_and_the_connection_can_be_made_again(start: Start) -> None:
    lengths = [32 * MIB]
    owner, reader = pair(start, lengths=lengths)
    assert reader.ask("read", peer="owner", items=whole(lengths, MIB)) == ["", ENDED_ONCE]
    if owner.ask("cut_connections") > 0:  # when the kernel copies, no connection exists
        until(lambda: reader.ask("read", peer="owner", items=[[0, 0, 0, 0, 1]]) == ["peer_gone", ENDED_ONCE])
    connect(reader, "owner", metadata_of(owner))
    reader.ask("poison", seed=77, offset=0, length=lengths[0])
    assert reader.ask("read", peer="owner", items=whole(lengths, MIB)) == ["", ENDED_ONCE]
    assert sums(reader, lengths) == sums(owner, lengths)
