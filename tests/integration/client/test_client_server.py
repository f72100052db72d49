"""Client and server as real processes: what is stored comes back byte for byte, nothing waits for long, and a process
without a slice gets L1 in a form that it cannot write to.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.client import LoadItem, StoreOutcome, stores
from kvstrata.native.core import RecordSpec, buffer_address, record_header, seal_record
from kvstrata.types import KEY_BYTES, Role
from tests.harness.cache_engine import CHUNK_TOKENS, PATIENCE_S, CacheEngine, eventually, prompt
from tests.harness.open_files import open_files
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

SERVER = {"chunk_tokens": CHUNK_TOKENS}


@pytest.fixture
def engine(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[CacheEngine]:
    # Each test has a model of its own, so no test hits chunks of another.
    with CacheEngine(server.socket_dir, model=request.node.name) as engine:
        yield engine.connect()


def server_leases(server: ServerProcess) -> int:
    return server.get("/v1/status")["pool"]["leased_bytes"]


@pytest.mark.parametrize("sync", [True, False])
def test_stored_chunks_come_back_byte_for_byte(engine, sync):
    tokens = prompt(20)
    assert engine.stored(tokens) == ["stored"] * 20
    result = engine.looked_up(tokens)
    assert result.n_chunks == 20
    assert result.reason == ""
    assert engine.check_load(tokens, result, sync=sync) == set()


def test_chunks_that_are_present_are_not_copied_again(engine):
    engine.stored(prompt(4))
    job = engine.store(prompt(6))
    assert job.done.wait(PATIENCE_S)
    assert job.outcomes == [StoreOutcome.PRESENT] * 4 + [StoreOutcome.STORED] * 2
    assert job.bytes == 2 * engine.blocks.plan.payload_bytes(2)


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_extent_with_another_chunks_bytes_is_never_loaded(engine, sync):
    tokens = prompt(3)
    engine.stored(tokens)
    result = engine.looked_up(tokens)
    items = engine.items(tokens, result, first_block=100)
    swapped = [items[1]._replace(key=items[0].key), items[0]._replace(key=items[1].key), items[2]]
    before = engine.blocks.read(items[0].block_ids)
    job = engine.client.load(engine.identity(), result.lease, swapped, engine.blocks.plan, sync=sync)
    assert job.wait(PATIENCE_S)
    assert job.failed == {0, 1}
    assert engine.blocks.read(items[0].block_ids) == before


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_block_named_by_a_negative_number_is_not_written(engine, sync):
    tokens = prompt(2)
    engine.stored(tokens)
    result = engine.looked_up(tokens)
    items = engine.items(tokens, result, first_block=100)
    first, second = items[0].block_ids
    before = engine.blocks.read([first])
    items[0] = items[0]._replace(block_ids=[-1, second])
    job = engine.client.load(engine.identity(), result.lease, items, engine.blocks.plan, sync=sync)
    assert job.wait(PATIENCE_S)
    assert job.failed == set()
    assert engine.blocks.read([first]) == before
    engine.compute(engine.hasher(tokens), [0], first_block=200)
    assert engine.blocks.read([second]) == engine.blocks.read([engine.blocks_of(0, 200)[1]])


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_damaged_chunk_is_a_miss_and_is_dropped(server, engine, sync):
    tokens = prompt(5)
    engine.stored(tokens)
    result = engine.looked_up(tokens)
    item = engine.items(tokens, result)[2]
    with open(server.segment_dir / "extents", "r+b") as extents:
        extents.seek(item.offset_bytes + 5000)
        byte = extents.read(1)[0]
        extents.seek(item.offset_bytes + 5000)
        extents.write(bytes([byte ^ 4]))
    assert engine.check_load(tokens, result, sync=sync) == {2}
    eventually(
        "the bad chunk is dropped", lambda: engine.client.peek(engine.identity(), engine.hasher(tokens)) == 2
    )
    assert engine.looked_up(tokens).reason == "corrupt"
    assert "stored" in engine.stored(tokens), "the next store replaces the damaged chunk"
    assert engine.hit(tokens) == 5


def test_a_backlog_too_large_is_refused_and_frees_the_blocks(server, request, monkeypatch):
    monkeypatch.setattr(stores, "BACKLOG_BYTES", 100_000)
    with CacheEngine(server.socket_dir, model=request.node.name) as engine:
        engine.connect()
        with server.frozen():
            first = engine.store(prompt(8, seed=1), compute=False)
            second = engine.store(prompt(8, seed=2), compute=False)
            assert second.gathered.is_set()
            assert second.done.is_set()
            assert set(second.outcomes) == {StoreOutcome.BACKLOG}
        assert first.done.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chain": b"x"}, "chain has 1 bytes for 2 chunks"),
        ({"parent_chain": b"x"}, "parent_chain has 1 bytes"),
        ({"blocks": [[0, 1], [2]]}, "same number of blocks"),
    ],
)
def test_a_store_with_inconsistent_arguments_is_refused(engine, change, says):
    arguments = {"parent_chain": b"", "chain": bytes(2 * KEY_BYTES), "blocks": [[0, 1], [2, 3]], **change}
    with pytest.raises(ValueError, match=says):
        engine.client.store(engine.identity(), plan=engine.blocks.plan, **arguments)


def test_present_tells_for_each_chunk_whether_it_is_in_l1(engine):
    tokens = prompt(3)
    root, hasher = engine.identity().root, engine.hasher(tokens)
    chunks = [(root, hasher.key(chunk)) for chunk in range(3)]
    engine.stored(tokens[: 2 * CHUNK_TOKENS])
    assert engine.client.pool.present(chunks) == [True, True, False]
    assert engine.client.pool.present([chunks[2], chunks[0]]) == [False, True]
    engine.client.close()
    assert engine.client.pool.present(chunks) is None


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.long)])
def test_blocks_outside_the_engines_cache_are_refused(server, engine, sync):
    tokens = prompt(2)
    engine.stored(tokens)
    result = engine.looked_up(tokens)
    items = [item._replace(block_ids=[0, 1 << 20]) for item in engine.items(tokens, result)]
    with pytest.raises(ValueError):
        engine.client.load(engine.identity(), result.lease, items, engine.blocks.plan, sync=sync)
    eventually("the lease ends", lambda: server_leases(server) == 0)


def test_a_store_from_blocks_outside_fails_and_leaves_nothing_reserved(server, engine):
    job = engine.client.store(
        engine.identity(), b"", engine.hasher(prompt(1)).chain, engine.blocks.plan, [[0, 1 << 20]]
    )
    assert job.done.wait(PATIENCE_S)
    assert job.outcomes == [StoreOutcome.FAILED]
    eventually("nothing reserved", lambda: server.get("/v1/status")["pool"]["reserved_bytes"] == 0)


def test_a_scheduler_needs_no_slice_and_copies_nothing(server, engine, request):
    engine.stored(prompt(3))
    with CacheEngine(server.socket_dir, model=request.node.name, role=Role.SCHEDULER) as scheduler:
        scheduler.connect()
        result = scheduler.looked_up(prompt(3))
        assert result.n_chunks == 3
        with pytest.raises(ValueError, match="no slice"):
            scheduler.client.load(scheduler.identity(), result.lease, [], scheduler.blocks.plan)
        with pytest.raises(ValueError, match="no slice"):
            scheduler.client.store(scheduler.identity(), b"", b"", scheduler.blocks.plan, [])
        scheduler.client.release([result.lease])


def test_other_facts_for_the_same_layout_are_refused_with_the_field(server, engine, request):
    with CacheEngine(server.socket_dir, model=request.node.name, block_bytes=8192) as refused:
        said = eventually("the refusal", lambda: "refused" in refused.client.error and refused.client.error)
        assert "block_bytes" in said
        assert not refused.client.connected
        assert refused.lookup(prompt(1)).result.reason == "breaker_open"


def test_calls_return_before_the_server_answers(server, engine):
    """A call hands its message to a thread: all 200 lookups are made before the server, frozen, can answer any."""
    tokens = prompt(512)
    hasher = engine.hasher(tokens)
    identity = engine.identity()
    with server.frozen():
        calls, answered = [], []
        for number in range(200):
            calls.append(engine.client.lookup(identity, hasher, request_id=str(number), deadline_ms=60_000))
            # From here on only the client's breaker answers, and at once.
            answered.append(calls[-1].done and engine.client.connected)
    assert not any(answered), "a call waited for its answer"
    assert all(call.wait(PATIENCE_S) for call in calls)
    eventually("connected again", lambda: engine.client.connected)


def test_a_closed_client_refuses_everything(engine):
    engine.stored(prompt(2))
    result = engine.looked_up(prompt(2))
    engine.client.close()
    engine.client.close()
    assert engine.lookup(prompt(2)).done
    assert engine.lookup(prompt(2)).result.n_chunks == 0
    assert engine.client.peek(engine.identity(), engine.hasher(prompt(2))) == 0
    assert set(engine.store(prompt(2)).outcomes) == {StoreOutcome.UNAVAILABLE}
    items = [LoadItem(bytes(32), 0, 8192, [0, 1])]
    assert engine.client.load(engine.identity(), result.lease, items, engine.blocks.plan).failed == {0}


def test_a_client_in_a_forked_child_refuses_everything_and_keeps_no_file_open(server, engine):
    tokens = prompt(4)
    engine.stored(tokens)
    result = engine.looked_up(tokens)
    items = engine.items(tokens, result)
    assert files_of_the_pool(server)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"failed"
        try:
            hasher = engine.hasher(tokens)
            assert engine.client.peek(engine.identity(), hasher) == 0
            assert engine.lookup(tokens).result.n_chunks == 0
            assert set(engine.store(tokens, compute=False).outcomes) == {StoreOutcome.UNAVAILABLE}
            loaded = engine.client.load(engine.identity(), result.lease, items, engine.blocks.plan, sync=True)
            assert loaded.failed == {0, 1, 2, 3}
            engine.client.release([result.lease])
            engine.client.close()
            assert files_of_the_pool(server) == []
            said = b"fine"
        finally:
            os.write(writer, said)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"fine"
    os.waitpid(child, 0)
    assert engine.check_load(tokens, result, sync=True) == set(), "the parent's lease is untouched"


def files_of_the_pool(server) -> list[str]:
    """Files of the server's pool that this process has open."""
    return [name for name in open_files() if str(server.segment_dir) in name]


FORK_AND_EXIT = """
import os, sys
from pathlib import Path
from tests.harness.cache_engine import CacheEngine, prompt
engine = CacheEngine(Path(sys.argv[1]), model="fork-and-exit").__enter__().connect()
engine.stored(prompt(2))
child = os.fork()
if child == 0:
    sys.exit(7)  # through all of Python's own clean-up
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert engine.hit(prompt(2)) == 2
print("fine")
"""


def test_parent_and_child_of_a_fork_both_end_in_order(server):
    done = subprocess.run(
        [sys.executable, "-c", FORK_AND_EXIT, str(server.socket_dir)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_importing_the_client_imports_nothing_heavy():
    """The benchmarks measure how long the import takes."""
    heavy = {"asyncio", "uvloop", "torch", "numpy", "numba", "llvmlite", "fastapi"}
    code = "import sys, kvstrata.client; print(*[m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not heavy & set(loaded)


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.long)])
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
