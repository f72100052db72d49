"""A sound record of another identity in a leased extent is never loaded."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.native.copying import buffer_address
from kvstrata.native.record import RecordSpec, record_header, seal_record
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, l1_mb=64, chunk_tokens=CHUNK_TOKENS) as server:
        server.start()
        yield server


@pytest.fixture
def engine(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[CacheEngine]:
    with CacheEngine(server.socket_dir, model=request.node.name) as engine:
        yield engine.connect()


@pytest.mark.parametrize("sync", [True, False])
def test_a_chunk_whose_record_names_another_identity_is_a_miss_and_is_dropped(server, engine, sync):
    """Any process that maps L1 can write such a record, whose checksums are right."""
    tokens = prompt(5)
    engine.stored(tokens)
    result = engine.looked_up(tokens)
    item = engine.items(tokens, result)[2]
    with open(server.segment_dir / "extents", "r+b") as extents, mmap.mmap(extents.fileno(), 0) as memory:
        address = buffer_address(memory, writable=True) + item.offset_bytes
        known = record_header(address, item.length_bytes)
        foreign = RecordSpec(known.key, b"f" * 32, known.slice_digest, known.parent_key, known.chunk_tokens)
        seal_record(address, item.length_bytes, foreign, [length for _, length, _ in known.sections])
    assert engine.check_load(tokens, result, sync=sync) == {2}
    eventually(
        "the foreign chunk is dropped",
        lambda: engine.client.peek(engine.identity(), engine.hasher(tokens)) == 2,
    )
    assert "stored" in engine.stored(tokens), "the next store replaces it"
    assert engine.hit(tokens) == 5
