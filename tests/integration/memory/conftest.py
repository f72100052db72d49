"""An attach server in a directory of its own, and a worker process that can attach to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.attach_scene import new_worker
from tests.harness.attach_server import AttachServerChild, Place
from tests.harness.child import Child


@pytest.fixture
def place() -> Iterator[Place]:
    """A socket directory with a space in its name, and a segment directory on /dev/shm."""
    root = Path(tempfile.mkdtemp(prefix="kv-"))
    segment = Path("/dev/shm") / root.name
    yield Place(root / "socket dir", segment)
    shutil.rmtree(root)
    shutil.rmtree(segment, ignore_errors=True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "children.log"


@pytest.fixture
def server(place: Place, log: Path) -> Iterator[AttachServerChild]:
    with AttachServerChild(place, log=log) as server:
        yield server


@pytest.fixture
def worker(log: Path) -> Iterator[Child]:
    with new_worker(log) as worker:
        yield worker
