"""Sockets and files of another user."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import pytest

NOBODY = 65_534


@contextlib.contextmanager
def as_nobody() -> Iterator[int]:
    """What this thread makes meanwhile belongs to a user without rights, whose number is returned."""
    if os.getuid():
        pytest.skip("only root can make a socket that belongs to another user")
    libc = ctypes.CDLL(None)
    libc.setfsuid(NOBODY)
    try:
        yield NOBODY
    finally:
        libc.setfsuid(0)
