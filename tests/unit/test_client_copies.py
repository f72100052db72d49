"""Who may touch which bytes: epochs, leases, mappings."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvstrata.client.copies import CopyLedger
from kvstrata.types import LeaseName

POOL, OTHER_POOL = b"p" * 16, b"q" * 16
SESSION = bytes(16)


class Mapped:
    """Stands for a mapping: what is asked of it here is whether it lives."""

    def __init__(self, pool_id: bytes) -> None:
        self.pool_id = pool_id


def lease(seq: int = 1, epoch: int = 7) -> LeaseName:
    return LeaseName(SESSION, seq, epoch)


@pytest.fixture
def ledger() -> CopyLedger:
    ledger = CopyLedger()
    ledger.attached(7, POOL, lambda: Mapped(POOL))
    return ledger


def test_nothing_begins_in_an_epoch_never_attached(ledger):
    assert ledger.begin_gather(8) is None
    assert ledger.begin_load(lease(epoch=8)) is None
    assert ledger.n_running == 0


def test_the_same_pool_is_mapped_once_and_another_anew(ledger):
    def must_not() -> Mapped:
        raise AssertionError("mapped twice")

    first = ledger.begin_gather(7)
    assert ledger.attached(8, POOL, must_not) is first
    assert ledger.attached(9, OTHER_POOL, lambda: Mapped(OTHER_POOL)) is not first
    assert ledger.begin_gather(8) is first


def test_an_older_epoch_stays_open_until_it_is_quiesced(ledger):
    ledger.attached(8, POOL, lambda: Mapped(POOL))
    assert ledger.begin_gather(7) is not None
    ledger.end_gather(7)
    assert ledger.quiesce(8)
    assert ledger.begin_gather(7) is None
    assert ledger.begin_load(lease()) is None
    assert ledger.begin_gather(8) is not None


@pytest.mark.parametrize("kind", ["gather", "load"])
def test_a_running_copy_forbids_to_quiesce_its_epoch(ledger, kind):
    if kind == "gather":
        ledger.begin_gather(7)
    else:
        ledger.begin_load(lease())
    ledger.attached(8, POOL, lambda: Mapped(POOL))
    assert not ledger.quiesce(8)
    if kind == "gather":
        ledger.end_gather(7)
    else:
        ledger.end_load(lease())
    assert ledger.quiesce(8)


def test_copies_of_the_present_epoch_do_not_hinder(ledger):
    ledger.attached(8, POOL, lambda: Mapped(POOL))
    ledger.begin_gather(8)
    assert ledger.quiesce(8)
    ledger.end_gather(8)
    assert ledger.n_running == 0


def test_a_mapping_lives_while_a_copy_uses_it_and_no_longer(ledger):
    held = ledger.begin_gather(7)
    gone = weakref.ref(held)
    ledger.attached(8, OTHER_POOL, lambda: Mapped(OTHER_POOL))
    assert not ledger.quiesce(8)
    ledger.end_gather(7)
    assert ledger.quiesce(8)
    assert gone() is held
    del held
    gc.collect()
    assert gone() is None


def test_a_lease_loads_once(ledger):
    assert ledger.begin_load(lease()) is not None
    assert ledger.begin_load(lease()) is None
    ledger.end_load(lease())
    assert ledger.begin_load(lease()) is None
    assert ledger.begin_load(lease(seq=2)) is not None


def test_a_spent_lease_is_released_at_once_only_when_no_copy_runs_under_it(ledger):
    ledger.begin_load(lease(1))
    assert ledger.spend([lease(1), lease(2)]) == [lease(2)]
    assert ledger.begin_load(lease(2)) is None
    ledger.end_load(lease(1))
    assert ledger.spend([lease(1)]) == [lease(1)]
