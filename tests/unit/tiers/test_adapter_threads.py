"""A closed adapter has neither a thread nor a descriptor left, whoever still refers to it; who frees its connector."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest

from kvstrata.native.connector import NativeConnector, fs_connector
from kvstrata.testing.strategies import key_of, lent_context, put_item, settled
from kvstrata.tiers.base import Outcome
from kvstrata.tiers.config import configure_tier
from tests.harness.alone import alone
from tests.harness.waiting import until


def threads() -> set[str]:
    """Numbers of this process's threads, those without Python among them."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize(
    "entry", [{"type": "fs"}, {"type": "fs", "shared": True}, {"type": "disk", "capacity_gb": 1}]
)
@alone
async def test_a_closed_adapter_leaves_no_thread_and_no_descriptor(tmp_path, entry):
    context = lent_context(lambda key: None)
    before, open_before = threads(), len(os.listdir("/proc/self/fd"))
    adapter = configure_tier({**entry, "base_path": str(tmp_path)}, 0).make()
    await adapter.open(context)
    puts = [put_item(key_of(n), 5_000) for n in range(16)]  # some threads begin with the first work
    assert all(outcome.outcome is Outcome.STORED for outcome in await settled(adapter.put, puts))
    assert threads() - before
    await adapter.close()
    await until(lambda: threads() <= before)  # a joined thread is listed a moment longer
    assert len(os.listdir("/proc/self/fd")) == open_before


@alone
async def test_an_adapter_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    first, second = (configure_tier({"type": "fs", "base_path": str(tmp_path)}, n).make() for n in range(2))
    await first.open(lent_context(lambda key: None))
    before = threads()
    with pytest.raises(Exception, match="another running server"):
        await second.open(lent_context(lambda key: None))
    await until(lambda: threads() <= before)
    await first.close()


DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


@pytest.mark.parametrize("taken", [True, False])
def test_a_capsules_destructor_is_called_only_when_its_connector_was_not_taken(tmp_path, taken):
    calls: list[int] = []
    # Whoever took the connector frees it: a destructor that did so too would free it twice.
    destructor = DESTRUCTOR(lambda _: calls.append(1))
    capsule = fs_connector(
        str(tmp_path), "tmp", shared=False, use_odirect=False, capacity_bytes=0, min_free_bytes=0
    )
    set_destructor = ctypes.pythonapi.PyCapsule_SetDestructor
    set_destructor.argtypes = [ctypes.py_object, DESTRUCTOR]
    assert set_destructor(capsule, destructor) == 0
    connector = NativeConnector(capsule) if taken else None
    del capsule
    gc.collect()
    assert len(calls) == (not taken)
    del connector
