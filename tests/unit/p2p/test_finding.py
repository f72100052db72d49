"""Which owners a reader asks, in which order, and how long it believes the directory."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.errors import TransferError
from kvstrata.p2p import finding, nixl
from kvstrata.p2p.finding import Finder, OwnerBook, Shared
from kvstrata.p2p.settings import OwnerLimits, PeerSettings
from kvstrata.rpc.cluster_wire import Owner, WhereReply
from kvstrata.testing.strategies import key_of
from kvstrata.tiers.base import Ask

KEYS = [key_of(n) for n in range(8)]
REGION = nixl.Region(4096, 4096)


def owner(name: str, n_keys: int = 8, *, confirmed: bool = True) -> Owner:
    return Owner(name, 1, "tcp://there:1", n_keys, confirmed, "k" * 40)


class Book:
    """An owner book whose reads under way a test sets."""

    def __init__(self) -> None:
        self.under_way: dict[str, int] = {}
        self.book = OwnerBook(OwnerLimits(), lambda name: self.under_way.get(name, 0))

    def order(self, *owners: Owner, now_s: float = 0.0) -> list[str]:
        return [one.instance for one in self.book.in_order(owners, now_s)]


def test_owners_are_asked_by_length_then_trust_then_our_own_load() -> None:
    for what, owners, under_way, order in (
        ("the directory's order", [owner("b"), owner("a")], {}, ["b", "a"]),
        ("the longer beginning", [owner("a", 5), owner("b", 10)], {}, ["b", "a"]),
        ("nearly as long is as good", [owner("a", 79), owner("b", 80)], {}, ["a", "b"]),
        ("confirmed first", [owner("a", confirmed=False), owner("b")], {}, ["b", "a"]),
        ("fewer reads of ours", [owner("a"), owner("b")], {"a": 1}, ["b", "a"]),
    ):
        book = Book()
        book.under_way = under_way
        assert book.order(*owners) == order, what


def test_reads_of_a_hot_chunk_spread_over_its_owners() -> None:
    book, asked = Book(), []
    for _ in range(9):
        asked.append(book.order(*[owner(name) for name in "abc"])[0])
        book.under_way[asked[-1]] = book.under_way.get(asked[-1], 0) + 1
    assert sorted(asked) == sorted("abc" * 3)


def test_an_owner_that_failed_is_skipped_twice_as_long_each_time_and_is_read_again() -> None:
    book = Book()
    book.book.ended("a", 0.0, well=False)
    assert book.order(owner("a"), owner("b"), now_s=0.9) == ["b"]
    assert book.book.states() == {"owners": 2, "owners_skipped": 1}
    assert book.order(owner("a"), now_s=1.0) == ["a"]
    assert book.book.admit("a", 1.0)
    assert not book.book.admit("a", 1.0)  # one at a time tries
    book.book.ended("a", 1.0, well=False)
    assert book.order(owner("a"), now_s=2.9) == []
    assert book.book.admit("a", 3.0)
    book.book.ended("a", 3.0, well=True)
    assert book.order(owner("a"), now_s=3.0) == ["a"]


def test_owners_from_which_reads_were_slow_come_last_until_they_are_tried_again() -> None:
    book = Book()
    for name, bytes_s in (("a", 1e9), ("b", 3e9)):
        book.book.ended(name, 0.0, well=True)
        book.book.measured(name, 1 << 30, 0.0, (1 << 30) / bytes_s)
    slow_first = [owner("a"), owner("b"), owner("c")]
    assert book.order(*slow_first, now_s=2.0) == ["b", "c", "a"]
    book.under_way = {"b": 2, "c": 1}
    assert book.order(*slow_first, now_s=2.0) == ["c", "b", "a"]
    assert book.order(*slow_first, now_s=70.0) == ["a", "c", "b"]
    book.book.measured("a", 1000, 70.0, 80.0)
    assert book.order(owner("a"), owner("b"), now_s=70.0) == ["a", "b"], "a short read tells nothing"


def test_owners_that_were_asked_are_remembered_up_to_a_bound() -> None:
    book = OwnerBook(OwnerLimits(max_owners=3), lambda name: 0)
    for n in range(10):
        book.ended(f"owner-{n}", 0.0, well=True)
    assert book.states()["owners"] == 3


class Asked:
    """A finder, the directory's next answer, and how often that was asked for."""

    def __init__(self) -> None:
        self.now_s, self.owners, self.times = 0.0, [owner("a")], 0
        settings = PeerSettings(("tcp://controller:1",), "tcp", remember_ms=1_000, remember_none_ms=500)
        clock: Any = SimpleNamespace(monotonic_s=lambda: self.now_s)
        self.finder = Finder(Shared("peer", settings, clock, "us"), self)  # type: ignore[arg-type]

    async def ask(self, request: object, ends_s: float) -> WhereReply:
        self.times += 1
        return WhereReply(0, 1, self.owners)

    async def names(self, keys: list[bytes], now_s: float, *, each: bool = False) -> list[str]:
        self.now_s = now_s
        found = await self.finder.owners(keys, Ask(each=each), now_s + 1)
        return [one.instance for one in found or []]


async def test_answers_of_the_directory_are_reused_for_a_moment() -> None:
    asked = Asked()
    assert [await asked.names(KEYS, 0.0), await asked.names(KEYS, 0.9)] == [["a"], ["a"]]
    assert asked.times == 1
    asked.owners = [owner("b", 7)]
    assert (await asked.names(KEYS[:7], 0.9), asked.times) == (["b"], 2), "another run is another question"
    asked.owners = [owner("us"), owner("c")]
    assert (await asked.names(KEYS, 1.0), asked.times) == (["c"], 3)
    asked.owners = []
    assert (await asked.names(KEYS, 2.0), asked.times) == ([], 4)
    assert (await asked.names(KEYS[:3], 2.4), asked.times) == ([], 4), "nobody has the first key"
    assert (await asked.names(KEYS, 2.5), asked.times) == ([], 5)


async def test_loads_of_any_key_of_a_run_know_its_owners_until_they_prove_wrong() -> None:
    asked = Asked()
    await asked.names(KEYS, 0.0)
    assert asked.finder.hint(KEYS[5]) == [owner("a")]
    asked.finder.forget(KEYS[5:6])
    assert (asked.finder.hint(KEYS[5]), asked.finder.hint(KEYS[6])) == (None, [owner("a")])


async def test_the_memory_of_the_directorys_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "REMEMBERED_KEYS", 16)
    asked = Asked()
    for n in range(100):
        asked.owners = [owner("a", 1)] if n % 2 else []
        await asked.names([key_of(n)], 0.0)
    finder = asked.finder
    assert len(finder._newer) + len(finder._older) <= 32 and len(finder._nobody) <= 16
    assert finder.hint(key_of(99)) and finder.hint(key_of(1)) is None


async def test_a_python_without_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransferError, match=r"nixl: cannot be imported.*pip install --no-deps nixl=="):
        await nixl.NixlEngine().open(REGION)


async def test_an_error_that_nobody_expects_is_told_and_no_call_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(name: str) -> object:
        raise SystemError("a broken module")

    monkeypatch.setattr(nixl, "importlib", SimpleNamespace(import_module=fails))
    with pytest.raises(TransferError, match="SystemError: a broken module"):
        await nixl.NixlEngine().open(REGION)


def test_tcp_is_left_out_unless_a_setting_or_ucx_tls_asks_for_it() -> None:
    for environment, tcp, this_host_only, settings in (
        ({}, False, False, {"TLS": "^tcp"}),
        ({}, True, True, {"NET_DEVICES": "lo"}),
        ({}, True, False, {}),
        ({"UCX_TLS": "tcp"}, False, True, {"NET_DEVICES": "lo"}),
        ({"UCX_NET_DEVICES": "eth1"}, True, True, {}),
    ):
        found = nixl.ucx_settings(environment, tcp=tcp, this_host_only=this_host_only)
        assert found == settings, (environment, tcp, this_host_only)
