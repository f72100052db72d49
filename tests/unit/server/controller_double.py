"""An instance and its controllers on virtual time; a test chooses what the controllers answer."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstrata.config.model import ServerSettings
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.native.core import crc32c, storage_keys
from kvstrata.p2p.serving import PeerServer
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import cluster_wire, wire
from kvstrata.rpc.cluster_wire import TAG_BYTES
from kvstrata.server.cluster import link as link_module
from kvstrata.server.cluster.events import TierNews
from kvstrata.server.cluster.membership import PeersServed, make_membership
from kvstrata.server.cluster.told_tiers import ToldTiers
from kvstrata.tiers.set import TierSet
from kvstrata.types import RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess, said
from tests.harness.rpc_client import RECORD_BYTES, chain_of, part
from tests.harness.virtual import VirtualLoop

SESSION = b"s" * 16
EPOCH = 5
WAY_S = 0.001
"""Time that a message travels."""
HANG_S = 60.0


class ControllerDouble:
    """Answers as a controller would, except for the requests that `silent`, `slow` and `failures` name."""

    def __init__(self, name: str = "double", *, token: int = 0) -> None:
        self.url = f"tcp://{name}:1"
        self.token = token
        self.cluster_id = 0
        self.frozen = False
        """Nothing is answered, and the queue of events is full."""
        self.silent: set[str] = set()
        self.slow: set[str] = set()
        """Names of requests whose answers are kept until `release`."""
        self._released = asyncio.Event()
        self.failures: dict[str, list[str]] = {}
        """Name of a request → the codes with which the next requests of that name are refused."""
        self.commands: list[cluster_wire.Command] = []
        self.results: dict[int, cluster_wire.CommandResult] = {}
        self.asked: list[Any] = []
        self.beats: list[cluster_wire.Heartbeat] = []
        self.events: list[cluster_wire.Events] = []
        self.held: dict[str, set[bytes]] = {}
        """Tags by tier, as the instance reported them."""
        self._fill: dict[str, set[bytes]] = {}

    def asked_for(self, kind: type[msgspec.Struct]) -> list[Any]:
        return [one for one in self.asked if isinstance(one, kind)]

    def release(self) -> None:
        """Send the answers that were kept, and keep none from now on."""
        self.slow.clear()
        self._released.set()

    async def answer(self, request: Any) -> Any:
        self.asked.append(request)
        word = type(request).__name__
        if self.frozen or word in self.silent:
            await asyncio.Event().wait()
        codes = self.failures.get(word)
        if codes:
            return cluster_wire.Failure(request.seq, EPOCH, codes.pop(0), "the test says so", "", True)
        answer = self._answer(request)
        if word in self.slow:
            await self._released.wait()
        return answer

    def _answer(self, request: Any) -> Any:
        match request:
            case cluster_wire.Register():
                return cluster_wire.Registered(request.seq, EPOCH, "double", 2, 3, 100, True)
            case cluster_wire.Heartbeat():
                self.beats.append(request)
                self.results.update((result.number, result) for result in request.results)
                waiting = [command for command in self.commands if command.number not in self.results]
                return cluster_wire.Beat(request.seq, EPOCH, waiting, self.token, self.cluster_id)
            case cluster_wire.SyncBegin():
                self._fill = {}
            case cluster_wire.SyncPart():
                assert request.crc == crc32c(request.tags)
                self._fill.setdefault(request.tier, set()).update(split(request.tags))
            case cluster_wire.SyncEnd():
                assert request.tags == {tier: len(self._fill.get(tier, ())) for tier in request.tags}
                self.held = self._fill
        return cluster_wire.Done(request.seq, EPOCH)

    def take(self, events: cluster_wire.Events) -> None:
        """Note what has changed in L1."""
        self.events.append(events)
        for run in events.runs:
            tags = self.held.setdefault(run.tier, set())
            change = tags.update if run.change is cluster_wire.Change.ADMIT else tags.difference_update
            change(split(run.tags))


def split(tags: bytes) -> list[bytes]:
    return [tags[at : at + TAG_BYTES] for at in range(0, len(tags), TAG_BYTES)]


class Link:
    """A link to a controller, both of an AskLink and of a PushLink."""

    def __init__(self, controller: ControllerDouble, changed: Callable[[bool], None] | None) -> None:
        self._controller = controller
        self._numbers = itertools.count(1)
        if changed is not None:
            asyncio.get_running_loop().call_soon(changed, True)

    async def ask(self, request: Any, kind: type[Any], timeout_s: float) -> Any:
        frame = cluster_wire.encode(msgspec.structs.replace(request, seq=next(self._numbers)))
        beats = isinstance(request, cluster_wire.Heartbeat)
        decoder: Any = cluster_wire.HEARTBEATS if beats else cluster_wire.REPLY_REQUESTS
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(WAY_S)
                reply = await self._controller.answer(decoder.decode(frame))
                await asyncio.sleep(WAY_S)
        except TimeoutError:
            raise Unavailable("no answer") from None
        reply = cluster_wire.ANSWERS.decode(cluster_wire.encode(reply))
        if isinstance(reply, cluster_wire.Failure):
            raise ClusterFailure(reply.code, reply.message, field="", retryable=True, retry_after_ms=0)
        assert isinstance(reply, kind)
        return reply

    def try_send(self, frame: bytes) -> bool:
        if not self._controller.frozen:
            self._controller.take(cluster_wire.EVENTS.decode(frame))
        return not self._controller.frozen

    def close(self) -> None:
        pass


class Member:
    """An instance with one process attached, which registers with these controllers once `start` is called."""

    def __init__(self, patch: pytest.MonkeyPatch, *controllers: ControllerDouble) -> None:
        self.loop = VirtualLoop()
        self._controllers = controllers
        told = ToldTiers(TierSet(), Supervisor(self.loop))
        self._news = {one.url: TierNews(told) for one in controllers}
        self.instance = InstanceInProcess(16 << 20, loop=self.loop, news=list(self._news.values()))
        self.instance.attach(SESSION, b"g" * 16)
        self._numbers = itertools.count(1)
        [identity] = self.feed(lambda number: wire.Identify(number, RequestIdentity()))
        assert isinstance(identity, wire.IdentifyReply)
        self._identity = identity
        by_host = {one.url.rpartition(":")[0]: one for one in controllers}

        def link(endpoint: str, *, changed: Callable[[bool], None] | None = None, **_: Any) -> Link:
            return Link(by_host[endpoint.rpartition(":")[0]], changed)

        links = SimpleNamespace(ask=link, push=link, close=lambda: None)
        patch.setattr(link_module, "Links", lambda loop: links)
        # A supervisor of its own, since the tasks of a membership never end by themselves.
        parts = copy.copy(self.instance.parts)
        parts.supervisor = self.supervisor = Supervisor(self.loop)

        async def make() -> None:
            peers = PeerServer(
                parts.pool, parts.clock, None, instance_id="ours", incarnation=parts.facts.epoch, engine="",
                metadata=bytes,
            )  # fmt: skip
            plan = cast(Any, SimpleNamespace(settings=ServerSettings()))
            keys = cast(Any, SimpleNamespace(own=None, refused_why=""))
            self.membership = make_membership(
                plan, keys, parts, told, self._news, PeersServed(peers, None, "")
            )
            self.membership.start()

        self.run(make())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.run(asyncio.sleep(seconds))

    def until(self, condition: Callable[[], Any]) -> None:
        """Let time pass until the condition holds."""
        ends_s = self.loop.time() + HANG_S
        while not condition():
            assert self.loop.time() < ends_s, [type(one).__name__ for one in self._controllers[0].asked[-20:]]
            assert not self.supervisor.failure.done(), self.supervisor.failure.result()
            self.passes(0.01)

    def feed(self, request: Callable[[int], wire.AnyRequest]) -> list[wire.AnyReply]:
        """The answers to a request of the attached process, which gets the next number."""
        return self.instance.feed(said(SESSION, request(next(self._numbers))))

    def keys(self, prompt: int) -> bytes:
        """The keys of a prompt of ten chunks."""
        return storage_keys(self._identity.root, self._chain(prompt), part().digest())

    def _chain(self, prompt: int) -> bytes:
        return chain_of(self._identity.root, 10, prompt)

    def store(self, prompt: int) -> None:
        number = next(self._numbers)
        next(self._numbers)
        self.instance.store(SESSION, number, self._identity, self._chain(prompt))

    def reserves(self, prompt: int) -> set[int]:
        """Try to reserve a prompt; returns the outcomes."""
        identity, chain = self._identity.identity_id, self._chain(prompt)
        [reply] = self.feed(lambda number: wire.Reserve(number, 1000, identity, b"", chain, RECORD_BYTES))
        assert isinstance(reply, wire.ReserveReply)
        self.feed(lambda number: wire.Abort(number, reply.seq))
        return set(reply.outcomes)

    def hits(self, prompt: int) -> int:
        """Chunks of a prompt in L1."""
        return self.instance.pool.peek(self.keys(prompt))

    def close(self) -> None:
        """Stop, and assert that nothing is held."""
        self.run(self.membership.stop())
        self.run(self.supervisor.stop())
        assert not self.supervisor.failure.done(), self.supervisor.failure.result()
        self.instance.close()
