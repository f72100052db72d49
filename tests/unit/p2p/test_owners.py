"""Which owners a reader asks, in which order, and how its transfer engine is opened."""

from __future__ import annotations

import itertools
import sys

import pytest

from kvstrata.errors import TransferError
from kvstrata.p2p import peer_engine
from kvstrata.p2p.engines import nixl, ports, ucx
from kvstrata.p2p.engines.base import MAX_METADATA_BYTES, Region, pack_metadata, unpack_metadata
from kvstrata.p2p.owners import MB, DirectoryCache, OwnerBook, OwnerLimits, question_of
from kvstrata.p2p.peer_engine import PeerEngine
from kvstrata.rpc.cluster_wire import Owner
from kvstrata.testing.strategies import key_of
from tests.harness.waiting import until

KEYS = [key_of(n) for n in range(8)]


def owner(name: str, n_keys: int = 10, *, confirmed: bool = True) -> Owner:
    return Owner(name, 1, "tcp://there:1", n_keys, confirmed, "k" * 40)


class Book:
    """An owner book whose bytes under way a test sets."""

    def __init__(self) -> None:
        self.under_way: dict[str, int] = {}
        self.book = OwnerBook(OwnerLimits(), lambda name: self.under_way.get(name, 0))

    def order(self, *owners: Owner, now_s: float = 0.0) -> list[str]:
        return [one.instance for one in self.book.in_order(owners, now_s)]


def test_owners_are_asked_by_length_then_trust_then_our_own_load() -> None:
    for what, owners, under_way, order in (
        ("a little load changes nothing", [owner("a"), owner("b")], {"a": 63 * MB}, ["a", "b"]),
        ("the longer beginning", [owner("a", 5), owner("b", 10)], {}, ["b", "a"]),
        ("nearly as long is as good", [owner("a", 79), owner("b", 80)], {}, ["a", "b"]),
        ("confirmed first", [owner("a", confirmed=False), owner("b")], {}, ["b", "a"]),
        ("nothing there", [owner("a", 0), owner("b")], {}, ["b"]),
    ):
        book = Book()
        for one in owners:
            book.book.read(one.instance, 1 << 30)  # no slow start
        book.under_way = under_way
        assert book.order(*owners) == order, what


def test_reads_of_a_hot_chunk_spread_over_its_owners() -> None:
    book = Book()
    owners = [owner(name) for name in "abc"]
    for one in owners:
        book.book.read(one.instance, 1 << 30)
    asked = []
    for _ in range(9):
        best = book.order(*owners)[0]
        asked.append(best)
        book.under_way[best] = book.under_way.get(best, 0) + 64 * MB
    assert sorted(asked) == sorted("abc" * 3)


def test_a_new_owner_is_read_slowly_at_first_and_more_after_each_good_read() -> None:
    book = Book()
    book.under_way["a"] = 64 * MB
    assert book.order(owner("a")) == []  # its window is full …
    assert book.order(owner("a"), owner("b")) == ["b"]
    book.book.read("a", 64 * MB)
    assert book.order(owner("a")) == ["a"]  # … and has doubled
    book.book.failed("a", 0.0)
    book.book.well("a", 1.0)
    assert book.order(owner("a"), now_s=1.0) == []  # it begins anew


def test_an_owner_that_failed_is_skipped_twice_as_long_each_time_and_is_read_again() -> None:
    book = Book()
    book.book.failed("a", 0.0)
    assert book.order(owner("a"), owner("b"), now_s=0.9) == ["b"]
    assert book.book.states() == {"owners": 2, "owners_skipped": 1}
    assert book.order(owner("a"), now_s=1.0) == ["a"]
    assert book.book.admit("a", 1.0)
    assert not book.book.admit("a", 1.0)  # one at a time tries
    book.book.failed("a", 1.0)
    assert book.order(owner("a"), now_s=2.9) == []
    assert book.book.admit("a", 3.0)
    book.book.well("a", 3.0)
    assert book.order(owner("a"), now_s=3.0) == ["a"]


def test_owners_that_were_asked_are_remembered_up_to_a_bound() -> None:
    book = OwnerBook(OwnerLimits(max_owners=3), lambda name: 0)
    for n in range(10):
        book.well(f"owner-{n}", 0.0)
    assert book.states()["owners"] == 3


def test_answers_of_the_directory_are_reused_for_a_moment() -> None:
    cache = DirectoryCache(ttl_s=1.0, negative_ttl_s=0.5)
    question = question_of(KEYS)
    assert cache.recall(question, 0.0) is None
    cache.learn(question, [owner("a")], 0.0)
    assert cache.recall(question, 0.9) == [owner("a")]
    assert cache.recall(question_of(KEYS[:7]), 0.9) is None  # another beginning is another question
    assert cache.recall(question, 1.0) is None
    cache.learn(question, [owner("a")], 1.0)
    cache.wrong(question)
    assert cache.recall(question, 1.0) is None
    cache.learn(question, [], 2.0)
    assert cache.recall(question, 2.4) == []
    assert cache.recall(question_of(KEYS[:3]), 2.4) == []  # nobody has the first key
    assert cache.recall(question, 2.5) is None


def test_the_memory_of_the_directorys_answers_is_bounded() -> None:
    cache = DirectoryCache(ttl_s=1.0, negative_ttl_s=1.0, max_questions=4)
    for n in range(10):
        cache.learn(question_of([key_of(n)]), [owner("a")], 0.0)
        cache.learn(question_of([key_of(100 + n)]), [], 0.0)
    known = [n for n in range(10) if cache.recall(question_of([key_of(n)]), 0.0)]
    nobody = [n for n in range(10) if cache.recall(question_of([key_of(100 + n)]), 0.0) == []]
    assert known == nobody == [6, 7, 8, 9]


REGION = Region(4096, 4096)


async def test_a_build_without_ucx_says_what_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstrata.native.ucx", None)
    with pytest.raises(TransferError, match="this build has no UCX engine; run `make setup`"):
        await ucx.UcxEngine().open(REGION)


async def test_a_python_without_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    engine = nixl.NixlEngine()
    with pytest.raises(TransferError, match=r"nixl: cannot be imported.*pip install --no-deps nixl=="):
        await engine.open(REGION)


async def test_memory_that_cannot_be_is_refused() -> None:
    wrong = [Region(0, 1), Region(1, 0), Region(1 << 62, 1 << 62)]
    for region, engine in itertools.product(wrong, (ucx.UcxEngine(), nixl.NixlEngine())):
        with pytest.raises(TransferError, match="are not a range of memory"):
            await engine.open(region)
        await engine.close()


def test_metadata_come_back_as_they_went_and_have_a_bound() -> None:
    packed = pack_metadata("ucx", REGION, b"part")
    assert unpack_metadata("ucx", "peer", packed) == (4096, b"part")
    with pytest.raises(TransferError, match="exceed"):
        pack_metadata("ucx", REGION, bytes(MAX_METADATA_BYTES))
    for name in ("", "x" * 300):
        with pytest.raises(TransferError, match="peer: must have"):
            unpack_metadata("ucx", name, packed)


def test_tcp_is_left_out_unless_a_setting_or_ucx_tls_asks_for_it() -> None:
    for environment, tcp, this_host_only, settings in (
        ({}, False, False, {"TLS": "^tcp"}),
        ({}, True, True, {"NET_DEVICES": "lo"}),
        ({}, True, False, {}),
        ({"UCX_TLS": "tcp"}, False, True, {"NET_DEVICES": "lo"}),
        ({"UCX_NET_DEVICES": "eth1"}, True, True, {}),
    ):
        found = ports.ucx_settings(environment, tcp=tcp, this_host_only=this_host_only)
        assert found == settings, (environment, tcp, this_host_only)


class StubEngine:
    """Cannot be opened while `errors` has an error."""

    errors: list[Exception]

    async def open(self, region: Region) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        return b"metadata"

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    monkeypatch.setattr(peer_engine, "RETRY_S", 0.0)
    made = StubEngine()
    made.errors, made.closed = [], False
    return made


async def test_without_a_usable_device_the_engine_is_opened_as_soon_as_there_is_one(engine) -> None:
    engine.errors = [TransferError(f"stub: no device {at}", field="network") for at in range(3)]
    opened = PeerEngine("peer", lambda: engine)
    await opened.open(REGION)
    assert (opened.metadata, opened.remarks()) == (b"", {"engine": "stub: no device 0"})
    with pytest.raises(TransferError, match="no network device"):
        _ = opened.current
    await until(lambda: opened.metadata == b"metadata")
    assert opened.current is engine and opened.remarks() == {}
    await opened.close()
    assert engine.closed


async def test_another_error_stops_the_start(engine) -> None:
    engine.errors = [TransferError("stub: not installed", field="engine")]
    with pytest.raises(TransferError, match="not installed"):
        await PeerEngine("peer", lambda: engine).open(REGION)


async def test_a_tier_that_is_closed_tries_no_more(engine) -> None:
    engine.errors = [TransferError("stub: no device", field="network")] * 1_000_000
    opened = PeerEngine("peer", lambda: engine)
    await opened.open(REGION)
    await opened.close()
    left = len(engine.errors)
    await until(lambda: len(engine.errors) == left)
