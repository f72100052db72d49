"""Our storage for SGLang over a real server: pages come back, prefixes are counted, and faults are misses.

SGLang is a double here (tests/harness/sglang_double.py); `make test-sglang` runs its own code.
"""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import pytest

from kvstrata.cli.asking import Ask, ask
from tests.harness.cache_engine import eventually
from tests.harness.server_process import ServerProcess
from tests.harness.sglang_double import Arguments, HitPolicy, HostPool, StorageConfig, Transfer, modules

pytestmark = pytest.mark.integration

ARGUMENTS = Arguments()
TIMEOUT_S = 60.0
NAMES = [f"{number:064x}" for number in range(1, 9)]
SERVER = {"l2": "fs"}


@pytest.fixture(scope="module")
def storage_class():
    yield from modules(ARGUMENTS)


@pytest.fixture
def open_storage(storage_class, server, request):
    """Opens storages of an engine that no other test has; `wait` waits for the server."""
    opened = []

    def open_one(pool: HostPool, *, wait: bool = True, **config):
        ARGUMENTS.weight_version = request.node.name
        extra = {
            "kvstrata.socket_dir": str(server.socket_dir),
            "kvstrata.lookup_timeout_ms": round(1000 * TIMEOUT_S),
        }
        storage = storage_class(StorageConfig(extra_config=extra, **config), {})
        opened.append(storage)
        storage.register_mem_pool_host(pool)
        if wait:
            connected(storage)
        return storage

    yield open_one
    for storage in opened:
        storage.close()


def connected(storage) -> None:
    caches = storage._caches.values()
    eventually(
        "the storage has a server", lambda: all(c._client.connected and c._identity.ready for c in caches)
    )


def stored(storage, pool: HostPool, names, first_page: int = 0) -> list[bytes]:
    data = [pool.fill(first_page + i, name) for i, name in enumerate(names)]
    eventually(
        "the pages are stored",
        lambda: storage.batch_set_v1(names, pool.slots(first_page, len(names))) == [True] * len(names),
    )
    return data


@pytest.mark.parametrize(
    ("layout", "latent"),
    [
        ("layer_first", False),
        ("page_first", True),
        *(
            pytest.param(*rare, marks=pytest.mark.long)
            for rare in (("layer_first", True), ("page_first", False))
        ),
    ],
)
def test_pages_come_back_and_prefixes_are_counted(open_storage, layout, latent):
    pool = HostPool(layout, latent=latent)
    storage = open_storage(pool, is_mla_model=latent)
    data = stored(storage, pool, NAMES[:4])
    assert storage.batch_exists(NAMES) == 4
    assert storage.batch_exists([NAMES[6], *NAMES[:4]]) == 0, "behind a missing page nothing counts"
    assert storage.batch_exists([*NAMES[:2], NAMES[6], *NAMES[2:4]]) == 2
    assert storage.exists(NAMES[3]) and not storage.exists(NAMES[4])
    for page in range(10, 16):
        pool.fill(page, "not loaded")
    untouched = pool.read(14)
    assert storage.batch_get_v1(NAMES[:6], pool.slots(10, 6)) == [True] * 4 + [False] * 2
    assert [pool.read(10 + i) for i in range(4)] == data
    assert pool.read(14) == untouched, "a missing page's place keeps its bytes"


@pytest.mark.long
def test_slots_that_are_not_whole_pages_are_refused(open_storage):
    pool = HostPool()
    storage = open_storage(pool)
    assert storage.batch_set_v1(NAMES[:2], pool.slots(0, 1)) == [False] * 2
    crooked = pool.slots(0, 2)
    crooked[:] = [slot + 1 for slot in crooked]
    assert storage.batch_set_v1(NAMES[:2], crooked) == [False] * 2
    assert storage.batch_exists(NAMES[:2]) == 0


def records(server: ServerProcess) -> list[Path]:
    return [path for path in (server.folder / "l2").rglob("*") if path.is_file()]


def test_pages_that_only_l2_has_are_found_and_loaded(open_storage, server):
    pool = HostPool()
    storage = open_storage(pool)
    before = len(records(server))
    data = stored(storage, pool, NAMES[:3])
    cache = storage._caches["kv"]

    def left_l1() -> bool:
        """Chunks that are still being put stay in L1, so L1 is cleared again."""
        ask(server.url, Ask("/v1/clear", {"tier": "l1", "wait": True}))
        return cache._client.peek(cache._identity, cache.chain(NAMES[:3])) == 0

    eventually("the files of L2 are there", lambda: len(records(server)) >= before + 3)
    eventually("the pages have left L1", left_l1)
    eventually("the pages of L2 are found", lambda: storage.batch_exists(NAMES[:4]) == 3)
    eventually(
        "the pages are loaded", lambda: storage.batch_get_v1(NAMES[:3], pool.slots(20, 3)) == [True] * 3
    )
    assert [pool.read(20 + i) for i in range(3)] == data


def test_a_damaged_page_is_missing_and_the_others_are_not(open_storage, server):
    pool, names = HostPool(), [f"damaged {i}" for i in range(3)]
    storage = open_storage(pool)
    data = stored(storage, pool, names)
    with (
        open(next(server.segment_dir.rglob("extents")), "r+b") as file,
        mmap.mmap(file.fileno(), 0) as extents,
    ):
        at = extents.find(data[1][:64])
        extents[at] ^= 1
    assert storage.batch_get_v1(names, pool.slots(8, 3)) == [True, False, True]


def test_engines_with_other_weights_or_heads_share_nothing_and_ranks_with_latents_all(open_storage):
    pools = [HostPool(), HostPool()]
    first = open_storage(pools[0], tp_rank=0, tp_size=2)
    stored(first, pools[0], NAMES[:2])
    other_rank = open_storage(pools[1], tp_rank=1, tp_size=2)
    assert other_rank.batch_exists(NAMES[:2]) == 0
    latents = [HostPool(latent=True), HostPool(latent=True)]
    writer = open_storage(latents[0], tp_rank=0, tp_size=2, is_mla_model=True)
    data = stored(writer, latents[0], NAMES[:2])
    reader = open_storage(latents[1], tp_rank=1, tp_size=2, is_mla_model=True)
    assert reader.batch_get_v1(NAMES[:2], latents[1].slots(4, 2)) == [True] * 2
    assert [latents[1].read(4 + i) for i in range(2)] == data


def test_several_pools_limit_the_prefix_by_their_policies(open_storage):
    pool, indexer, states = HostPool(), HostPool(layers=1), HostPool(layers=5)
    storage = open_storage(pool)
    storage.register_mem_host_pool_v2(indexer, "indexer")
    storage.register_mem_host_pool_v2(states, "mamba")
    connected(storage)
    stored(storage, pool, NAMES[:5])
    indexed = [indexer.fill(i, f"indexer {i}") for i in range(4)]
    states.fill(1, "state")
    transfers = [
        Transfer("indexer", indexer.slots(0, 4), NAMES[:4]),
        Transfer("mamba", states.slots(1), [NAMES[1]], HitPolicy.TRAILING_PAGES),
    ]
    done = storage.batch_set_v2(transfers)
    assert done == {"indexer": [True] * 4, "mamba": [True]}

    def found(*asked: Transfer):
        return storage.batch_exists_v2(NAMES[:7], list(asked))

    window = Transfer("mamba", keys=["x"], hit_policy=HitPolicy.TRAILING_PAGES)
    assert found().kv_hit_pages == 5
    assert found(Transfer("indexer")).kv_hit_pages == 4
    both = found(Transfer("indexer"), window)
    assert (both.kv_hit_pages, both.restorable_prefix_pages) == (2, [2])
    assert both.extra_pool_hit_pages == {"kv": 5, "indexer": 4, "mamba": 2}
    assert found(Transfer("indexer"), Transfer("x", hit_policy=HitPolicy.BLOCK_GROUPS)).kv_hit_pages == 4
    assert found(Transfer("unknown")).kv_hit_pages == 0
    got = storage.batch_get_v2(
        [Transfer("indexer", indexer.slots(8, 4), NAMES[:4]), Transfer("unknown", pool.slots(0), NAMES[:1])]
    )
    assert got == {"indexer": [True] * 4, "unknown": [False]}
    assert [indexer.read(8 + i) for i in range(4)] == indexed


def test_without_a_server_everything_is_missing_and_one_warning_says_so(
    open_storage, storage_class, server, tmp_path: Path, caplog
):
    pool = HostPool()
    with caplog.at_level(logging.INFO, "kvstrata"):
        storage = storage_class(
            StorageConfig(extra_config={"kvstrata.socket_dir": str(tmp_path / "nowhere")}), {}
        )
        storage.register_mem_pool_host(pool)
        client = storage._caches["kv"]._client
        eventually("the client has tried", lambda: "no server" in client.error)
        for _ in range(3):
            assert storage.batch_exists(NAMES) == 0
            assert storage.batch_get_v1(NAMES[:2], pool.slots(0, 2)) == [False] * 2
            assert storage.batch_set_v1(NAMES[:2], pool.slots(0, 2)) == [False] * 2
        storage.close()
    warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([text for text in warnings if "no cache server answers" in text]) == 1
    assert all("a page has" in text or "no cache server" in text for text in warnings)


@pytest.mark.parametrize(
    "fault", [pytest.param("SIGSTOP", marks=[pytest.mark.long, pytest.mark.silence]), "SIGKILL"]
)
def test_a_server_that_stops_means_misses_that_do_not_wait_for_it_and_is_used_again(
    open_storage, server, fault
):
    pool = HostPool()
    storage = open_storage(pool)
    data = stored(storage, pool, NAMES[:3])
    client = storage._caches["kv"]._client
    stop, go_on = (server.freeze, server.thaw) if fault == "SIGSTOP" else (server.kill, server.start)
    stop()
    for _ in range(3):
        assert storage.batch_exists(NAMES[:3]) in (0, 3), "it may not be known yet that the server is away"
        got = storage.batch_get_v1(NAMES[:3], pool.slots(8, 3))
        storage.batch_set_v1(NAMES[3:5], pool.slots(3, 2))
        assert all(pool.read(8 + i) == data[i] for i in range(3) if got[i])
    eventually("the server counts as silent", lambda: not client.connected)
    assert storage.batch_exists(NAMES[:3]) == 0
    assert storage.batch_get_v1(NAMES[:3], pool.slots(8, 3)) == [False] * 3
    assert storage.batch_set_v1(NAMES[5:7], pool.slots(5, 2)) == [False] * 2
    go_on()
    eventually("the pages are found again", lambda: storage.batch_exists(NAMES[:3]) == 3)
    assert storage.batch_get_v1(NAMES[:3], pool.slots(8, 3)) == [True] * 3
    assert [pool.read(8 + i) for i in range(3)] == data


def test_a_page_whose_store_took_too_long_never_gets_the_bytes_that_came_after_it(
    open_storage, server, monkeypatch
):
    """The engine uses the place again as soon as the call returns."""
    pool = HostPool()
    storage = open_storage(pool)
    stored(storage, pool, NAMES[:1])
    cache = storage._caches["kv"]
    pool.fill(1, NAMES[1])
    with server.frozen():
        monkeypatch.setattr(cache, "_wait_s", 0.01)
        assert storage.batch_set_v1([NAMES[1]], pool.slots(1)) == [False]
        pool.fill(1, "another page")
    monkeypatch.setattr(cache, "_wait_s", TIMEOUT_S)
    data = stored(storage, pool, [NAMES[2]], first_page=2)
    assert storage.batch_get_v1([NAMES[1]], pool.slots(9)) == [False]
    assert storage.batch_get_v1([NAMES[2]], pool.slots(9)) == [True] and pool.read(9) == data[0]
