"""Engines of one model with unlike geometries hit each other's chunks, through a real server."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.native.core import storage_keys
from tests.harness.cache_engine import eventually
from tests.harness.geometry import CHUNK, GeometryEngine
from tests.harness.records import Extents
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

SERVER = {"chunk_tokens": CHUNK}


def recuts(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v1/status")["recuts"]
    return found


@contextlib.contextmanager
def two_engines(server: ServerProcess, **more: Any) -> Iterator[tuple[GeometryEngine, GeometryEngine]]:
    """An engine of one rank and one of two."""
    with (
        GeometryEngine(server.socket_dir, **more) as first,
        GeometryEngine(server.socket_dir, heads_by=2, **more) as second,
    ):
        yield first, second


def prompt(chunks: int) -> list[int]:
    return [random.randrange(1 << 30) for _ in range(chunks * CHUNK + 5)]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ({"heads_by": 1}, {"heads_by": 2}),
        ({"layers_by": 2}, {"layers_by": 1, "heads_by": 2}),
        ({"layout": "LBNHC", "heads_by": 2, "block_tokens": 16}, {"layout": "LBHNC", "block_tokens": 96}),
        *(
            pytest.param(stored, wanted, marks=pytest.mark.long)
            for stored, wanted in (
                ({"heads_by": 2}, {"heads_by": 1}),
                ({"heads_by": 4}, {"heads_by": 2}),
                ({"layers_by": 1}, {"layers_by": 2}),
                ({"block_tokens": 16}, {"block_tokens": 48}),
                ({"block_tokens": 48}, {"block_tokens": 32}),
                ({"layout": "LBHNC"}, {"layout": "LBNHC"}),
            )
        ),
    ],
    ids=str,
)
def test_an_engine_hits_what_one_of_another_geometry_has_stored(server, request, stored, wanted):
    model, before = request.node.name, recuts(server)
    with GeometryEngine(server.socket_dir, model=model, **stored) as first:
        tokens = prompt(4)
        assert set(first.stored(tokens)) == {"stored"}
    with GeometryEngine(server.socket_dir, model=model, **wanted) as second:
        eventually("it is planned", lambda: recuts(server)["plans"] >= before["plans"] + 2)
        assert second.hit(tokens) == 4
        assert recuts(server)["chunks"] == before["chunks"] + 4
        # From now on these are chunks like any others, and can be continued.
        longer = [*tokens[: 4 * CHUNK], *prompt(2)]
        assert second.hit(longer) == 4
        assert set(second.stored(longer)) <= {"stored", "present"}
        assert second.hit(longer) == 6
        assert recuts(server)["chunks"] == before["chunks"] + 4


def test_records_in_l2_are_loaded_and_recut_also_by_a_server_that_has_just_started(start):
    tokens, longer = prompt(3), prompt(2)
    server = start(l1_mb=32, chunk_tokens=CHUNK, l2="fs")
    with GeometryEngine(server.socket_dir, heads_by=2) as first:
        first.stored(tokens)
        first.stored(longer)
        eventually("all is on disk", lambda: stored_in_l2(server) == 2 * 5)
    server.kill()
    server.wipe_segment()
    server.start()
    with GeometryEngine(server.socket_dir, block_tokens=48) as second:
        assert second.hit(tokens) == 0, "the server cannot know of the other geometry yet"
        with GeometryEngine(server.socket_dir, heads_by=2):
            eventually("it is planned", lambda: recuts(server)["plans"] == 2)
        assert second.hit(tokens) == 3
        assert second.hit(longer) == 2


def stored_in_l2(server: ServerProcess) -> int:
    (adapter,) = server.get("/v1/status")["l2_store"]["adapters"].values()
    return int(adapter["outcomes"].get("stored", 0))


def test_a_damaged_record_ends_the_hit_before_it_and_is_dropped(server: ServerProcess) -> None:
    planned = recuts(server)["plans"]
    with (
        GeometryEngine(server.socket_dir, model="damaged", heads_by=2) as first,
        GeometryEngine(server.socket_dir, model="damaged") as second,
    ):
        eventually("it is planned", lambda: recuts(server)["plans"] >= planned + 2)
        tokens = prompt(4)
        extents = Extents(server.segment_dir)
        before = {header.key for header in extents.records().values()}
        first.stored(tokens)
        key = first.hasher(tokens).key(2)
        identity = first.ranks[1].identity
        damaged = storage_keys(identity.root, key, first.ranks[1].client.slice_digest)
        (at, header), *others = [
            (at, header) for at, header in extents.records().items() if header.key == damaged
        ]
        assert damaged not in before and not others
        extents.flip_a_byte(at, header)
        extents.close()
        assert second.hit(tokens) == 2
        assert recuts(server)["ended"]["corrupt"] == 1
        assert first.hit(tokens) == 2, "the damaged record is gone"
        first.stored(tokens)
        assert second.hit(tokens) == 4


def test_other_salts_models_and_scales_share_nothing(server: ServerProcess) -> None:
    tokens = prompt(3)
    with GeometryEngine(server.socket_dir, model="apart") as first:
        first.stored(tokens)
        planned = recuts(server)
        others = ({"model": "another"}, {"salt": "s"}, {"scales": ("0x1p+0", "0x1p+1")})
        for other in others:
            with GeometryEngine(server.socket_dir, **{"model": "apart", "heads_by": 2, **other}) as second:
                assert second.hit(tokens) == 0
        eventually("it is refused", lambda: recuts(server)["impossible"] == planned["impossible"] + 4)


def test_a_lookup_without_time_gets_none_or_some_and_a_later_one_all(server: ServerProcess) -> None:
    tokens = prompt(6)
    with (
        GeometryEngine(server.socket_dir, model="late") as first,
        GeometryEngine(server.socket_dir, model="late", heads_by=4) as second,
    ):
        first.stored(tokens)
        second.hit(tokens, deadline_ms=5)  # right in every byte, however many
        assert second.hit(tokens) == 6


@pytest.mark.long
def test_a_mistake_of_ours_while_a_chunk_is_made_shortens_the_hit(start):
    environment = {**os.environ, "KVSTRATA_FAILPOINTS": "recut.made=crash@3"}
    server = start(chunk_tokens=CHUNK, environment=environment)
    with two_engines(server) as (first, second):
        tokens = prompt(4)
        first.stored(tokens)
        eventually("it is planned", lambda: recuts(server)["plans"] == 2)
        assert second.hit(tokens) == 2
        assert recuts(server)["ended"] == {"crashed": 1}
        eventually("the log says where", lambda: "failpoint recut.made" in server.log.read_text())
        assert second.hit(tokens) == 4
        eventually("nothing stays held", lambda: server.get("/v1/status")["pool"]["holds"] == 0)


def test_a_server_that_is_killed_while_it_makes_a_chunk_has_lost_nothing(start):
    environment = {**os.environ, "KVSTRATA_FAILPOINTS": "recut.made=kill@3"}
    server = start(chunk_tokens=CHUNK, environment=environment)
    with two_engines(server) as (first, second):
        tokens = prompt(4)
        first.stored(tokens)
        eventually("it is planned", lambda: recuts(server)["plans"] == 2)
        assert second.hit(tokens) == 0
        server.kill()
        del server._environment["KVSTRATA_FAILPOINTS"]
        server.start()
    with two_engines(server) as (first, second):
        assert first.hit(tokens) == 4
        eventually("it is planned", lambda: recuts(server)["plans"] == 2)
        assert second.hit(tokens) == 4
        assert recuts(server)["chunks"] == 2, "two were made before"


@pytest.mark.long
def test_a_recut_for_which_l1_has_no_room_gives_the_leading_chunks(start):
    """What is made takes the place of the sources of later chunks, and of nothing that is being read."""
    server = start(chunk_tokens=CHUNK)
    with two_engines(server, chunks=200) as (first, second):
        tokens = prompt(200)
        assert set(first.stored(tokens)) == {"stored"}
        found = second.hit(tokens)
        assert 50 < found < 200
        assert 1 <= first.hit(tokens) < 200
        assert second.hit(tokens) >= 1
    eventually("all leases are given back", lambda: server.get("/v1/status")["pool"]["leased_bytes"] == 0)
