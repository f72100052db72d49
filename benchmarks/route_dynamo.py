"""Dynamo's own choice in virtual time: `SelectionService` of ai-dynamo-runtime 1.6.1, as it comes from PyPI.

The service runs in this process on its own threads.  It hears the engines' KV events over ZMQ, as it hears vLLM's, and
is told of each request what Dynamo's frontend tells it: selected and reserved, prefill complete, freed.  Nothing of its
choice depends on the clock with the knobs that are tried here.  Before each choice the benchmark waits until the
service has applied every event that was published: a marker follows them, a block that no prompt has, which the service
must know before it is asked.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.common import NotHere, sized
from benchmarks.route_gateway import Outside
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.kv_events import KIND, MEDIUM, BlockStored, KVEventBatch
from kvstrata.testing.engine_sim.requests import SimRequest

VERSION = "1.6.1"
BLOCK_TOKENS = 16
MARKER_TOKEN = 1 << 30
"""Above every token of a prompt."""
WAIT_S = 20.0
AGAIN_S = 0.05
"""Until a marker is published again to a subscriber that may not have been there."""


def service_type() -> Any:
    """The class `SelectionService`, fetched into the cache folder; None with `--small`. Raises NotHere."""
    if not sized(full=True, small=False):
        return None
    cache = Path(os.environ.get("KVSTRATA_CACHE", "~/.cache/kvstrata")).expanduser()
    folder = cache / f"ai-dynamo-runtime-{VERSION}"
    if not (folder / "whole").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--no-deps"]
        wanted = f"ai-dynamo-runtime=={VERSION}"
        if subprocess.run([*pip, "--target", folder, wanted], check=False).returncode:
            raise NotHere(f"pip cannot fetch {wanted}; give it a package index, or put it into {folder}")
        (folder / "whole").touch()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    os.environ.setdefault("DYN_LOG", "error")
    return importlib.import_module("dynamo._core").SelectionService


class Worker:
    """An engine, as the service sees it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], number: int) -> None:
        self.number = number
        self.sent = 0
        self.behind = True
        """Whether something was published that the service may not have applied."""
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.record = {
            "worker_id": number,
            "endpoint": f"http://127.0.0.1:{port}",
            "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
            "block_size": BLOCK_TOKENS,
        }

    def publish(self, encoded: bytes) -> None:
        """Send a batch as vLLM does."""
        self._socket.send_multipart((b"", self.sent.to_bytes(8, "big"), encoded))
        self.sent += 1
        self.behind = True

    def close(self) -> None:
        """Publish no more."""
        self._socket.close()


class Dynamo(Outside):
    """See the module. `knobs` are Dynamo's environment variables."""

    def __init__(self, service: Any, knobs: Mapping[str, str]) -> None:
        self.name = f"Dynamo {VERSION}"
        self.knobs = dict(knobs)
        self._type = service
        self._marks = 0

    def begin(self, names: list[str]) -> None:
        """A service without memory, for engines without caches."""
        os.environ.update(self.knobs)
        self._loop = asyncio.new_event_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._service = self._type(indexer_threads=1)
        for knob in self.knobs:
            del os.environ[knob]
        self._workers: dict[str, Worker] = {}
        self._numbers = 0
        for name in names:
            self.back(name)

    def finish(self) -> None:
        """The service ends."""
        self._service.shutdown()
        for worker in self._workers.values():
            worker.close()
        self._context.term()
        self._loop.close()

    def engine_for(self, engines: Mapping[str, SimEngine], request: SimRequest, at_ps: int) -> str:
        """The worker that the service selects; its load is reserved."""
        tokens = request.tokens[: request.prompt_tokens].tolist()
        name: str = self._do(self._select(request.name, tokens))
        return name

    async def _select(self, name: str, tokens: list[int]) -> str:
        await self._catch_up()
        found = await self._service.select_and_reserve({"token_ids": tokens, "selection_id": name})
        return next(one for one, worker in self._workers.items() if worker.number == found["worker_id"])

    async def _catch_up(self) -> None:
        """Wait until the service has applied what was published."""
        behind = {worker.number: worker for worker in self._workers.values() if worker.behind}
        if not behind:
            return
        self._marks += 1
        tokens = [MARKER_TOKEN + self._marks] * BLOCK_TOKENS
        block = BlockStored(
            [(1 << 63) + self._marks], None, tokens, BLOCK_TOKENS, None, MEDIUM, None, None, 0, KIND
        )
        marker = msgspec.msgpack.encode(KVEventBatch(0.0, [block], 0))
        give_up_s = time.monotonic() + WAIT_S
        again_s = 0.0
        while behind:
            now_s = time.monotonic()
            if now_s > give_up_s:
                raise RuntimeError(f"Dynamo did not hear the workers {sorted(behind)} within {WAIT_S:.0f} s")
            if now_s > again_s:
                again_s = now_s + AGAIN_S
                for worker in behind.values():
                    worker.publish(marker)
            for score in (await self._service.overlap_scores({"token_ids": tokens}))["workers"]:
                if score["device_blocks"] and score["worker_id"] in behind:
                    behind.pop(score["worker_id"]).behind = False

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def event(self, engine: str, encoded: bytes | None) -> None:
        """Publish a batch; the number of a lost one is missing."""
        worker = self._workers.get(engine)
        if worker is None:
            return  # what a killed engine told last comes to nobody
        if encoded is None:
            worker.sent += 1
        else:
            worker.publish(encoded)

    def gone(self, engine: str) -> None:
        """The worker is deleted, as by Dynamo's discovery."""
        worker = self._workers.pop(engine)
        self._do(_awaited(self._service.delete_worker, worker.number))
        worker.close()

    def back(self, engine: str) -> None:
        """A worker is registered; it must be heard before it publishes what matters."""
        self._numbers += 1
        worker = self._workers[engine] = Worker(self._context, self._numbers)
        self._do(_awaited(self._service.upsert_worker, worker.record))
        self._do(self._catch_up())

    def first_token(self, request: SimRequest) -> None:
        """Its prefill is complete."""
        self._do(_awaited(self._service.prefill_complete, request.name))

    def ended(self, request: SimRequest) -> None:
        """It is freed."""
        self._do(_awaited(self._service.free_reservation, request.name))


async def _awaited(call: Any, *words: Any) -> Any:
    """The service's calls must be made inside of a running loop."""
    return await call(*words)


KNOBS: list[dict[str, str]] = [
    {},
    {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "2"},
    {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "2", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "1"},
    {"DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": "8"},
]
"""Those that are tried."""


def grid() -> Sequence[Outside]:
    """The service with each set of knobs; none with `--small`."""
    service = service_type()
    return [] if service is None else [Dynamo(service, knobs) for knobs in KNOBS]
