"""Who owns the connector in a capsule."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest

from kvstrata.native import fs
from kvstrata.native.connector import NativeConnector

DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


@pytest.mark.parametrize("taken", [True, False])
def test_a_capsules_destructor_is_called_only_when_its_connector_was_not_taken(
    tmp_path: Path, taken: bool
) -> None:
    calls: list[int] = []
    # Whoever took the connector frees it: a destructor that did so too would free it twice.
    destructor = DESTRUCTOR(lambda _: calls.append(1))
    capsule = fs.connector(
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
