"""Attaching without a server: a retryable error, whatever the file system answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.errors import Unavailable
from kvstrata.memory.attach.client import LockHolder, attach
from tests.harness.attach_worker import make_request


@pytest.fixture
def root() -> Iterator[Path]:
    """Short enough for a socket's address."""
    root = Path(tempfile.mkdtemp(prefix="kv-"))
    yield root
    shutil.rmtree(root)


def test_a_socket_directory_that_cannot_be_looked_at_is_no_server(root):
    (root / "link").symlink_to("x" * 300)  # stat() fails, as below a directory that may not be searched
    with pytest.raises(Unavailable, match="File name too long"):
        attach(root / "link", make_request(session=b"s" * 16), LockHolder(), 0.1)


def test_a_socket_directory_that_is_missing_is_no_server(root):
    with pytest.raises(Unavailable, match="does not exist"):
        attach(root / "none", make_request(session=b"s" * 16), LockHolder(), 0.1)
