"""A process without a slice stores and loads nothing, and gets L1 in a form that it cannot write to."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvstrata.types import Role
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, prompt
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

SERVER = {"chunk_tokens": CHUNK_TOKENS}


def mapped(server: ServerProcess) -> list[str]:
    """How this process maps the extents."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if line.endswith(str(server.segment_dir / "extents")))


def test_the_descriptor_of_a_scheduler_cannot_be_mapped_for_writing(server):
    with RpcClient(server.socket_dir, role=Role.SCHEDULER) as client:
        assert client.attachment is not None
        fd, length = client.attachment.extents_fd, client.attachment.extents_bytes
        mmap.mmap(fd, length, prot=mmap.PROT_READ).close()
        with pytest.raises(PermissionError):
            mmap.mmap(fd, length)


def test_a_scheduler_maps_l1_read_only_and_looks_up_as_before(server, request):
    with CacheEngine(server.socket_dir, model=request.node.name) as worker:
        worker.connect()
        tokens = prompt(3)
        assert worker.stored(tokens) == ["stored"] * 3
        assert mapped(server) == ["rw-s"]
        with CacheEngine(server.socket_dir, model=request.node.name, role=Role.SCHEDULER) as side:
            side.connect()
            assert mapped(server) == ["r--s", "rw-s"]
            assert side.client.peek(side.identity(), side.hasher(tokens)) == 3
            assert side.looked_up(tokens).n_chunks == 3
            assert worker.hit(tokens) == 3
