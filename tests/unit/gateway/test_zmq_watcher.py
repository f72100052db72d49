"""The thread that hears KV events, before a publisher whose connections, batches and replays the test decides."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from kvstrata.gateway.residency import zmq_watcher
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.residency.sources import Source
from kvstrata.testing.engine_sim.kv_events import BlockStored, KVEventBatch
from tests.harness.cache_engine import eventually
from tests.harness.waiting import HANG_S

SIZE = 4


class Publisher:
    """An engine's sockets. Its batch n stores the only block of the prompt `prompt_of(n)`."""

    def __init__(self, folder: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.source = Source(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(self.source.replay)
        self._events: zmq.Socket[bytes] | None = None

    def listen(self) -> None:
        """Let subscribers connect; those of before lose their connections."""
        if self._events is not None:
            self._events.close(linger=0)
        self._events = self._context.socket(zmq.XPUB)
        self._events.bind(self.source.endpoint)
        assert self._events.poll(int(HANG_S * 1000)) and self._events.recv() == b"\x01", "a subscription"

    def publish(self, number: int) -> None:
        assert self._events is not None
        self._events.send_multipart((b"", number.to_bytes(8, "big"), batch(number)))

    def replays(self, *numbers: int) -> int:
        """Wait until somebody asks for a replay, and send these batches; returns from which number on he asked."""
        assert self._replay.poll(int(HANG_S * 1000)), "nobody asks for a replay"
        asker, empty, first = self._replay.recv_multipart()
        for number in numbers:
            self._replay.send_multipart((asker, empty, b"", number.to_bytes(8, "big"), batch(number)))
        self._replay.send_multipart((asker, empty, b"", zmq_watcher.END, b""))
        return int.from_bytes(first, "big")

    def close(self) -> None:
        self._context.destroy(linger=0)


def prompt_of(number: int) -> list[int]:
    return [number] * SIZE


def batch(number: int) -> bytes:
    event = BlockStored([number], None, prompt_of(number), SIZE, None, "GPU", None, group_idx=0)
    return msgspec.msgpack.encode(KVEventBatch(0.0, [event], 0))


@pytest.fixture
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publisher]:
    made = Publisher(str(tmp_path_factory.mktemp("zmq")))
    yield made
    made.close()


@pytest.fixture
def residency(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Residency]:
    """It hears the publisher, and asks for no replay because of a silence."""
    monkeypatch.setattr(zmq_watcher, "IDLE_S", math.inf)
    made = Residency(time.monotonic)
    made.watch("e", publisher.source)
    yield made
    made.close()


def until_known(residency: Residency, *numbers: int) -> None:
    """Wait until exactly the blocks of these batches are known, of the first five."""

    def exactly() -> bool:
        return [n for n in range(5) if residency.known(Prompt(prompt_of(n)))] == sorted(numbers)

    eventually(f"the blocks of {numbers} are known", exactly)


def test_what_was_published_between_the_first_replay_and_the_connection_is_asked_for(publisher, residency):
    assert publisher.replays(0, 1) == 0
    publisher.listen()
    assert publisher.replays(2) == 2
    until_known(residency, 0, 1, 2)


def test_a_batch_that_shows_a_gap_is_applied_after_a_replay_that_lacks_it(publisher, residency):
    publisher.replays(0)
    publisher.listen()
    publisher.replays()
    publisher.publish(3)
    assert publisher.replays(1, 2) == 1
    until_known(residency, 0, 1, 2, 3)


def test_after_a_connection_was_lost_what_was_known_is_forgotten_and_another_life_is_heard_from_its_begin(
    publisher, residency
):
    publisher.replays(0, 1, 2)
    publisher.listen()
    publisher.replays()
    until_known(residency, 0, 1, 2)
    publisher.listen()
    first = publisher.replays(0)
    assert first == 0
    until_known(residency, 0)
    publisher.publish(1)
    until_known(residency, 0, 1)
