"""Engines of one model with unlike geometries hit each other's chunks, through a real server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cache_engine import eventually
from tests.harness.geometry import CHUNK, GeometryEngine
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=64, chunk_tokens=CHUNK) as server:
        server.start()
        yield server


def recuts(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v1/status")["recuts"]
    return found


def prompt(chunks: int) -> list[int]:
    return [random.randrange(1 << 30) for _ in range(chunks * CHUNK + 5)]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ({"heads_by": 1}, {"heads_by": 2}),
        ({"heads_by": 2}, {"heads_by": 1}),
        ({"heads_by": 4}, {"heads_by": 2}),
        ({"layers_by": 1}, {"layers_by": 2}),
        ({"layers_by": 2}, {"layers_by": 1, "heads_by": 2}),
        ({"block_tokens": 16}, {"block_tokens": 48}),
        ({"block_tokens": 48}, {"block_tokens": 32}),
        ({"layout": "LBHNC"}, {"layout": "LBNHC"}),
        ({"layout": "LBNHC", "heads_by": 2, "block_tokens": 16}, {"layout": "LBHNC", "block_tokens": 96}),
    ],
    ids=str,
)
def test_an_engine_hits_what_one_of_another_geometry_has_stored(
    server: ServerProcess, request: pytest.FixtureRequest, stored: dict[str, Any], wanted: dict[str, Any]
) -> None:
    model, before = request.node.name, recuts(server)
    with GeometryEngine(server.socket_dir, model=model, **stored) as first:
        first.connect()
        tokens = prompt(4)
        assert set(first.stored(tokens)) == {"stored"}
    with GeometryEngine(server.socket_dir, model=model, **wanted) as second:
        second.connect()
        eventually("it is planned", lambda: recuts(server)["plans"] >= before["plans"] + 2)
        assert second.hit(tokens) == 4
        assert recuts(server)["chunks"] == before["chunks"] + 4
        # From now on these are chunks like any others, and can be continued.
        longer = [*tokens[: 4 * CHUNK], *prompt(2)]
        assert second.hit(longer) == 4
        assert set(second.stored(longer)) <= {"stored", "present"}
        assert second.hit(longer) == 6
        assert recuts(server)["chunks"] == before["chunks"] + 4
