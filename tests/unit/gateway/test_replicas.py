"""When a gateway has a prefix copied, and where to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstrata.gateway.controllers.directory import Kind
from kvstrata.gateway.controllers.replicas import ORDER_S, Read, Replicas
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import KvKind, Replicate
from kvstrata.types import KEY_BYTES, RequestIdentity
from tests.harness.cache_engine import layout_identity

CHUNK = 16
LAYOUT = layout_identity(CHUNK)
SLICES = [bytes([number]) * KEY_BYTES for number in (1, 2)]
KIND = Kind(LAYOUT.model, CHUNK, 2, KvKind(LAYOUT, SLICES), tuple(SLICES))
LIFE_S = 100.0


class Scene:
    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.refusal: str | None = None
        self.orders: list[Replicate] = []
        self.hashing = ThreadPoolExecutor(1)
        self.supervisor = Supervisor(asyncio.get_running_loop())
        self.replicas = Replicas(self.send, self.supervisor, self.hashing, lambda: self.now_s)

    async def send(self, order: Replicate) -> str | None:
        self.orders.append(order)
        return self.refusal

    async def read(self, tokens: list[int], n: int, source: str = "one", **lacking: float) -> list[str]:
        """An engine reads the first n tokens from a peer; returns to whom copies have been ordered so far."""
        read = Read(Prompt(tokens), KIND, RequestIdentity(tenant="t"), n, source, lacking)
        self.replicas.read("gw", read, LIFE_S)
        await self.supervisor.idle()
        return [order.to for order in self.orders]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.supervisor.stop()
    assert not made.supervisor.failure.done()
    made.hashing.shutdown()


async def test_one_copy_at_a_time_leaves_an_instance_and_none_goes_twice_to_one(scene: Scene) -> None:
    tokens = list(range(4 * CHUNK))
    await scene.read(tokens, 4 * CHUNK, two=0.0, three=1.0)
    assert await scene.read(tokens, 4 * CHUNK, two=0.0, three=1.0) == ["two"]
    assert await scene.read(tokens, 4 * CHUNK, two=0.0, three=1.0) == ["two"], "a copy is under way"
    scene.now_s += ORDER_S
    assert await scene.read(tokens, 4 * CHUNK, two=0.0, three=1.0) == ["two", "three"]
    scene.now_s += ORDER_S
    assert await scene.read(tokens, 4 * CHUNK, two=0.0, three=1.0) == ["two", "three"]
    scene.now_s += LIFE_S
    await scene.read(tokens, 4 * CHUNK, two=0.0, three=1.0)
    assert await scene.read(tokens, 4 * CHUNK, two=0.0, three=1.0) == ["two", "three", "two"]


async def test_an_order_that_nobody_takes_is_counted(scene: Scene) -> None:
    scene.refusal = "it is not connected"
    tokens = list(range(CHUNK))
    for _ in range(2):
        await scene.read(tokens, CHUNK, two=0.0)
    assert scene.replicas.counts == {"ordered": 0, "failed": 1}
