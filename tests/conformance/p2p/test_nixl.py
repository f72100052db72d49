"""NIXL as we use it keeps its promises (kvstrata/p2p/nixl.py), with real processes at both ends."""

from __future__ import annotations

import contextlib
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvstrata.p2p.nixl import MAX_ITEMS, Metadata
from tests.harness.amount import amount
from tests.harness.child import Child, ChildEnded, ChildError
from tests.harness.transfer_peer import pattern

pytestmark = pytest.mark.integration

KIB, MIB = 1 << 10, 1 << 20
LENGTH = 16 * MIB
LONG_S = 60.0
ENDED_ONCE = 1


class Engine(NamedTuple):
    """One way to run NIXL."""

    settings: tuple[str, ...]
    environment: dict[str, str]

    @property
    def may_end_the_owner(self) -> bool:
        """Whether the death of a reader may abort the owner: UCX's own reads over tcp can."""
        return self.settings == ("UCX_TLS=tcp",)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("UCX_TLS=shm,tcp",), id="one-host"),
        pytest.param(("UCX_TLS=tcp",), id="tcp", marks=pytest.mark.long),
    ],
)
def engine(request: pytest.FixtureRequest, nixl_environment: dict[str, str]) -> Engine:
    # Its `close` waits for reads that a stopped owner never ends: the whole limit, however long that is.
    return Engine(request.param, nixl_environment | {"KVSTRATA_PATIENCE": "1"})


Start = Callable[..., Child]


@contextlib.contextmanager
def starting(engine: Engine, folder: Path) -> Iterator[Start]:
    """Starts processes with an open transfer engine; a process's `metadata` are for its peers."""
    with contextlib.ExitStack() as stack:

        def started(seed: int = 0) -> Child:
            command = ("tests.harness.transfer_peer", *engine.settings)
            process = Child(*command, log=folder / "peer.log", environment=engine.environment)
            stack.enter_context(process)
            process.metadata = process.ask("open", length=LENGTH, seed=seed)  # type: ignore[attr-defined]
            return process

        yield started


@pytest.fixture
def start(engine: Engine, tmp_path: Path) -> Iterator[Start]:
    """For tests whose processes end."""
    with starting(engine, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def processes(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Child, Child]]:
    with starting(engine, tmp_path_factory.mktemp("peers")) as start:
        yield start(), start()


Pair = tuple[Child, Child]


@pytest.fixture
def pair(processes: Pair) -> Pair:
    """An owner with the patterns of seed 5, and a reader full of zeros that is connected to it as "owner".

    All tests of a variant have the same two processes.
    """
    owner, reader = processes
    owner.ask("fill", seed=5)
    reader.ask("clear")
    connect(reader, "owner", metadata_of(owner))
    return processes


def metadata_of(process: Any) -> bytes:
    return bytes.fromhex(process.metadata)


def connect(reader: Child, peer: str, metadata: bytes) -> None:
    reader.ask("connect", peer=peer, metadata=metadata.hex())


def whole(piece: int = MIB, length: int = LENGTH) -> list[list[int]]:
    """Items that read the first `length` bytes in pieces."""
    return [[at, at, piece] for at in range(0, length, piece)]


def sum_of(process: Child) -> int:
    return int(process.ask("checksum", offset=0, length=LENGTH))


def until(condition: Callable[[], bool]) -> None:
    """Ask until the condition holds; each try waits for another process's answer, so no clock is needed."""
    for _ in range(100_000):
        if condition():
            return
    raise AssertionError("the condition never held")


def test_bytes_arrive_where_the_items_say_and_nowhere_else(pair: Pair) -> None:
    owner, reader = pair
    items = [[1, 3, 1], [5, 777, 12345], [4 * MIB - 7, 3 * MIB + 1, 2 * MIB + 11]]
    assert reader.ask("read", peer="owner", items=items) == ["", ENDED_ONCE]
    theirs, expected = pattern(5, LENGTH), bytearray(LENGTH)
    for at, to, length in items:
        expected[to : to + length] = theirs[at : at + length]
    assert sum_of(reader) == zlib.crc32(expected)
    assert sum_of(owner) == zlib.crc32(theirs)


def test_a_batch_of_2048_items_is_whole(pair: Pair) -> None:
    owner, reader = pair
    many = whole(4 * KIB, 8 * MIB)
    assert reader.ask("read", peer="owner", items=many) == ["", ENDED_ONCE]
    read = {"offset": 0, "length": 8 * MIB}
    assert reader.ask("checksum", **read) == owner.ask("checksum", **read)


OUTSIDE = [
    [LENGTH, 0, 1],
    [LENGTH - 10, 0, 11],
    [0, LENGTH - 10, 11],
    [-1, 0, 1],
    [0, -1, 1],
    [0, 0, 0],
    [0, 0, -1],
    [1 << 64, 0, 1],
    [0, 0, 1 << 64],
]


def test_wrong_items_none_and_too_many_are_refused_before_anything_is_read(pair: Pair) -> None:
    _, reader = pair
    one = [0, 0, MIB]
    for items in (*([bad] for bad in OUTSIDE), *([one, bad] for bad in OUTSIDE), [], [one] * (MAX_ITEMS + 1)):
        assert reader.ask("read", peer="owner", items=items) == ["out_of_range", ENDED_ONCE], items[:2]
    assert sum_of(reader) == zlib.crc32(bytes(LENGTH))


def test_impossible_metadata_are_refused_and_the_old_connection_stays(pair: Pair) -> None:
    owner, reader = pair
    good = metadata_of(owner)
    told = msgspec.msgpack.decode(good, type=Metadata)
    other = msgspec.structs.replace
    damaged = [b"", b"garbage" * 9, bytes(len(good)), good[:-1], good + b"x", good[: len(good) // 2]]
    damaged += [msgspec.msgpack.encode(other(told, **{field: 0})) for field in ("address", "length")]
    for metadata, sentence in (
        *((one, "are damaged") for one in damaged),
        (msgspec.msgpack.encode(other(told, version="0.1")), "install the same on both"),
    ):
        with pytest.raises(ChildError, match=sentence) as refused:
            connect(reader, "owner", metadata)
        assert (refused.value.code, refused.value.field) == ("transfer", "metadata")
    assert reader.ask("read", peer="owner", items=whole()) == ["", ENDED_ONCE]
    assert sum_of(reader) == sum_of(owner)


def test_connecting_again_changes_nothing_and_after_disconnecting_reads_fail(pair: Pair) -> None:
    owner, reader = pair
    for _ in range(3):
        connect(reader, "owner", metadata_of(owner))
    assert reader.ask("read", peer="owner", items=[[0, 0, 1]]) == ["", ENDED_ONCE]
    for _ in range(2):
        reader.ask("disconnect", peer="owner")
    assert reader.ask("read", peer="owner", items=[[0, 0, 1]]) == ["not_connected", ENDED_ONCE]
    reader.ask("disconnect", peer="nobody")
    connect(reader, "owner", metadata_of(owner))
    assert reader.ask("read", peer="owner", items=[[0, 0, 1]]) == ["", ENDED_ONCE]


def test_a_read_from_a_killed_peer_fails_and_its_successor_can_be_read(start: Start) -> None:
    owner, reader = start(5), start()
    connect(reader, "owner", metadata_of(owner))
    numbers = [reader.ask("begin_read", peer="owner", items=whole(), deadline_s=LONG_S) for _ in range(8)]
    owner.kill()
    answers = [reader.ask("finish_read", number=number) for number in numbers]
    assert all(reason in ("", "peer_gone") and ended == ENDED_ONCE for reason, ended in answers), answers
    until(lambda: reader.ask("read", peer="owner", items=[[0, 0, 1]]) == ["peer_gone", ENDED_ONCE])
    successor = start(9)
    connect(reader, "owner", metadata_of(successor))
    assert reader.ask("read", peer="owner", items=whole()) == ["", ENDED_ONCE]
    assert sum_of(reader) == zlib.crc32(pattern(9, LENGTH))


def test_a_reader_killed_in_mid_read_does_not_harm_the_owner(start: Start, engine: Engine) -> None:
    """Where the engine can do no better, the owner's process may end; then its successor must be readable."""
    owner = start(5)

    def killed_in_mid_read() -> None:
        reader = start()
        connect(reader, "owner", metadata_of(owner))
        for _ in range(4):
            reader.ask("begin_read", peer="owner", items=whole(), deadline_s=LONG_S)
        reader.kill()

    def read() -> None:
        reader = start()
        connect(reader, "owner", metadata_of(owner))
        assert reader.ask("read", peer="owner", items=whole()) == ["", ENDED_ONCE]
        assert sum_of(reader) == sum_of(owner)

    for happens in (*(killed_in_mid_read,) * amount(1, 3), read):
        try:
            happens()
        except (AssertionError, ChildError, ChildEnded):
            if not engine.may_end_the_owner:
                raise
            owner.wait()  # raises if the owner still runs: then the failure has no excuse
            owner = start(5)
            happens()


def test_a_read_from_a_stopped_peer_fails_in_time_and_writes_nothing_after_its_end(pair):
    owner, reader = pair
    owner.signal(signal.SIGSTOP)
    begin = {"peer": "owner", "items": whole(), "deadline_s": 0.3}
    numbers = [reader.ask("begin_read", **begin) for _ in range(3)]
    answers = [reader.ask("finish_read", number=number)[0] for number in numbers]
    assert set(answers) <= {"", "deadline"}
    owner.signal(signal.SIGCONT)
    until(lambda: all(reader.ask("times_ended", number=number) for number in numbers))
    reader.ask("poison", seed=77, offset=0, length=LENGTH)
    # When new reads have arrived, no byte of the old ones can be on its way any more.
    connect(reader, "owner", metadata_of(owner))
    assert reader.ask("read", peer="owner", items=[[0, 0, MIB]]) == ["", ENDED_ONCE]
    expected = pattern(5, LENGTH)[:MIB] + pattern(77, LENGTH)[MIB:]
    assert sum_of(reader) == zlib.crc32(expected)
    assert [reader.ask("times_ended", number=number) for number in numbers] == [ENDED_ONCE] * 3


def test_a_read_whose_wait_was_cancelled_still_ends(pair: Pair) -> None:
    owner, reader = pair
    owner.signal(signal.SIGSTOP)
    number = reader.ask("begin_read", peer="owner", items=whole(), deadline_s=LONG_S)
    reader.ask("cancel_read", number=number)
    owner.signal(signal.SIGCONT)
    until(lambda: reader.ask("times_ended", number=number) == ENDED_ONCE)
    assert reader.ask("read", peer="owner", items=whole()) == ["", ENDED_ONCE]
    assert sum_of(reader) == sum_of(owner)
    assert reader.ask("times_ended", number=number) == ENDED_ONCE


@pytest.mark.parametrize("ending", ["close", "disconnect"])
def test_close_and_disconnect_end_reads_as_far_as_the_engine_can(start, ending):
    owner, reader = start(5), start()
    connect(reader, "owner", metadata_of(owner))
    owner.signal(signal.SIGSTOP)
    begin = {"peer": "owner", "items": whole(), "deadline_s": LONG_S}
    numbers = [reader.ask("begin_read", **begin) for _ in range(6)]
    reader.ask(ending, **({"peer": "owner"} if ending == "disconnect" else {}))
    answers = {reader.ask("finish_read", number=number)[0] for number in numbers}
    assert answers <= {"", "cancelled"}
    owner.signal(signal.SIGCONT)
    if ending == "disconnect":
        until(lambda: [reader.ask("times_ended", number=n) for n in numbers] == [ENDED_ONCE] * 6)
    if ending == "close":
        reader.ask("close")
        assert reader.ask("read", peer="owner", items=[[0, 0, 1]]) == ["closed", ENDED_ONCE]
    assert owner.finish() == 0


def test_a_read_over_a_cut_connection_fails_and_the_connection_can_be_made_again(pair: Pair) -> None:
    owner, reader = pair
    assert reader.ask("read", peer="owner", items=whole()) == ["", ENDED_ONCE]
    if owner.ask("cut_connections") > 0:  # when the kernel copies, no connection exists
        until(lambda: reader.ask("read", peer="owner", items=[[0, 0, 1]]) == ["peer_gone", ENDED_ONCE])
    connect(reader, "owner", metadata_of(owner))
    reader.ask("poison", seed=77, offset=0, length=LENGTH)
    assert reader.ask("read", peer="owner", items=whole()) == ["", ENDED_ONCE]
    assert sum_of(reader) == sum_of(owner)
