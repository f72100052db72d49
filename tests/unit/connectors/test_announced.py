"""Chunks announced as stored are announced as removed once they have left L1, and not before."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm import store_table
from kvstrata.connectors.vllm.store_table import ARRIVES_WITHIN_S, LOOKED_AT_PER_STEP, ROUND_S, Announced

pytestmark = pytest.mark.usefixtures("patience_of_production")

ROOT = b"r" * 32


class L1:
    def __init__(self):
        self.there, self.now_s, self.readable, self.looked_at = set(), 0.0, True, []

    def __call__(self):
        return self.now_s

    def present(self, chunks):
        assert {root for root, _ in chunks} == {ROOT}
        keys = [key for _, key in chunks]
        self.looked_at += keys
        return [key in self.there for key in keys] if self.readable else None


@pytest.fixture
def l1():
    return L1()


@pytest.fixture
def watched(l1):
    return Announced(l1.present, l1)


def key(number):
    return number.to_bytes(32, "little")


def test_a_chunk_that_another_worker_is_still_storing_is_not_announced_as_removed(l1, watched):
    watched.add(ROOT, [key(1)])
    l1.now_s += ARRIVES_WITHIN_S / 2
    assert watched.left() == []
    l1.now_s += ARRIVES_WITHIN_S
    assert watched.left() == [key(1)]


def test_an_index_that_cannot_be_read_removes_nothing(l1, watched):
    l1.readable = False
    watched.add(ROOT, [key(1)])
    l1.now_s += 2 * ARRIVES_WITHIN_S
    assert watched.left() == []


def test_each_step_looks_at_a_few_chunks_and_later_steps_at_the_others(l1, watched):
    keys = [key(number) for number in range(3 * LOOKED_AT_PER_STEP)]
    l1.there = set(keys)
    watched.add(ROOT, keys)
    l1.now_s += ROUND_S
    for steps in range(1, 4):
        assert watched.left() == []
        assert len(l1.looked_at) == steps * LOOKED_AT_PER_STEP
    assert l1.looked_at == keys
    watched.left()
    assert len(l1.looked_at) == len(keys), "no chunk is looked at twice in one round"


def test_more_chunks_than_can_be_watched_push_out_those_looked_at_longest_ago(l1, watched, monkeypatch):
    monkeypatch.setattr(store_table, "MAX_ANNOUNCED", 2)
    assert watched.add(ROOT, [key(1), key(2)]) == []
    assert watched.add(ROOT, [key(1), key(3)]) == [key(2)]
