"""A stand-in for an instance: it speaks the cluster's protocol and has no KV bytes.

A test registers it, blocking; a thread of all stand-ins answers the followers at its control port from what the test
says that it holds.  Operations wait until the test answers them.
"""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import secrets
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Self, TypeVar

import msgspec
import zmq

from kvstrata.errors import BadRequest, TooOld
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_curve import ClusterKeys, KeyKind, SharedKey
from kvstrata.rpc.zmq_server import Address

KEYS: defaultdict[str, tuple[bytes, bytes]] = defaultdict(zmq.curve_keypair)
"""Public and secret key of each instance id, which every process of the instance keeps."""
R = TypeVar("R", bound=msgspec.Struct)

HANG_S = 120.0
LOAD = wire.Load({}, {}, {}, 0, 0, 0, 0)
PAGE_TAGS = 65_536
MAX_RUNS = 64


def tags_of(numbers: Iterable[int]) -> bytes:
    """Return a tag for each number; the tags differ in the bits that the registry stores."""
    return b"".join(struct.pack("<Q", (number * 0x9E3779B97F4A7C15) & (2**64 - 1)) for number in numbers)


def key_of(number: int) -> str:
    """Return a storage key, in hexadecimal, with the tag that `tags_of` makes."""
    return (tags_of([number]) + bytes(24)).hex()


def holders(owners: list[wire.Owner]) -> dict[str, int]:
    """Return how many keys each owner has, by the name of its instance."""
    return {owner.instance: owner.n_keys for owner in owners}


class Refused(Exception):
    """The controller answered with a Failure."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.code = failure.code
        self.field = failure.field
        self.retryable = failure.retryable
        self.retry_after_ms = failure.retry_after_ms


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="stand-ins", daemon=True).start()
    return loop


def on_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on the loop of the stand-ins."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(HANG_S)


class Holdings:
    """What a stand-in holds, and its control port. Belongs to the loop, except for what is said otherwise."""

    def __init__(self, incarnation: int, secret: bytes) -> None:
        self.held: dict[str, dict[bytes, None]] = {}
        self.log: list[wire.Run] = []
        self.forgotten = 0
        """Changes that are not in the log any more."""
        self.condition = wire.Condition("ready", LOAD, [])
        self.silent = False
        self.unlistable: set[str] = set()
        self.lists = 0
        self.operations: queue.Queue[wire.Do] = queue.Queue()
        """May be read on any thread."""
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.in_step, self.told = threading.Event(), threading.Event()
        """Set when a follower waits for the next change, and when a condition was told."""
        self._incarnation = incarnation
        self._secret = secret
        self._changed = asyncio.Event()
        self.listen(0)

    def listen(self, number: int) -> None:
        """Open the control port; 0 takes a free one."""
        self.port = ControlPort(asyncio.get_running_loop(), self._incarnation)
        self.number = self.port.server.bind_tcp(
            "127.0.0.1", number, keys=ClusterKeys(self._secret), anywhere=False
        )
        both = (KeyKind.CONTROLLER, KeyKind.GATEWAY)
        self.port.serve(both, {wire.Changes: self._changes, wire.List: self._list})
        self.port.serve((KeyKind.CONTROLLER,), {wire.Do: self._do})
        self.port.start()

    async def change(self, runs: Iterable[wire.Run], *, held: bool = True) -> None:
        for run in runs:
            self.log.append(run)
            if not held:
                continue
            tags = self.held.setdefault(run.tier, {})
            parts = [run.tags[at : at + 8] for at in range(0, len(run.tags), 8)]
            if run.change is wire.Change.CLEAR:
                tags.clear()
            elif run.change is wire.Change.ADMIT:
                tags.update(dict.fromkeys(parts))
            else:
                for tag in parts:
                    tags.pop(tag, None)
        self.in_step.clear()
        self._wake()

    async def forget(self) -> None:
        """Forget all changes, as a ring that has gone round does."""
        self.forgotten += len(self.log) + 1
        self.log.clear()
        self.in_step.clear()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _changes(self, asked: wire.Changes, _: Address) -> wire.Changed:
        await self._if_silent()
        if asked.cursor >= 0 and asked.wait_ms and asked.cursor == self._end:
            self.in_step.set()
            try:
                await asyncio.wait_for(self._changed.wait(), asked.wait_ms / 1000)
            except TimeoutError:
                pass
            await self._if_silent()
        condition = self.condition if asked.condition else None
        if condition is not None:
            self.told.set()
        if asked.cursor < 0:
            return wire.Changed(asked.seq, self._incarnation, self._end, [], condition)
        if not self.forgotten <= asked.cursor <= self._end:
            raise TooOld("cursor: too old")
        runs: list[wire.Run] = []
        n_tags = 0
        for run in self.log[asked.cursor - self.forgotten : asked.cursor - self.forgotten + MAX_RUNS]:
            runs.append(run)
            n_tags += len(run.tags) // 8
            if n_tags >= wire.MAX_CHANGES:
                break
        return wire.Changed(asked.seq, self._incarnation, asked.cursor + len(runs), runs, condition)

    @property
    def _end(self) -> int:
        return self.forgotten + len(self.log)

    async def _list(self, asked: wire.List, _: Address) -> wire.Listed:
        await self._if_silent()
        self.lists += 1
        if asked.tier in self.unlistable:
            return wire.Listed(asked.seq, self._incarnation, 0, b"", False)
        tags = list(self.held.get(asked.tier, ()))
        page = tags[asked.cursor : asked.cursor + PAGE_TAGS]
        following = asked.cursor + PAGE_TAGS if asked.cursor + PAGE_TAGS < len(tags) else 0
        return wire.Listed(asked.seq, self._incarnation, following, b"".join(page))

    async def _do(self, asked: wire.Do, _: Address) -> wire.Outcome:
        await self._if_silent()
        answer = self.answers[asked.seq] = asyncio.get_running_loop().create_future()
        if not isinstance(asked.operation, wire.AskShared):  # which a leader asks all the time
            self.operations.put(asked)
        return wire.Outcome(asked.seq, self._incarnation, await answer)

    async def _if_silent(self) -> None:
        if self.silent:
            await asyncio.Event().wait()


class ClusterInstance:
    """One instance, which is told the controller's `reply_port`."""

    def __init__(
        self,
        reply_port: int,
        name: str,
        *,
        incarnation: int = 0,
        tiers: tuple[str, ...] = ("l1", "disk-0"),
        keys: tuple[bytes, bytes] | None = None,
        environment: Mapping[str, str] = os.environ,
        holds: type[Holdings] = Holdings,
        **more: Any,
    ) -> None:
        self.name = name
        self.public_key, self._secret_key = KEYS[name] if keys is None else keys
        self.incarnation = incarnation or secrets.randbelow(1 << 62) + 1
        self.tiers = list(tiers)
        self.more = {"host": "here", "pid": 1, "l1_bytes": 1 << 30, "gives_to_peers": True, **more}
        self.seq = 0
        self.epoch = 0
        self._server_key = SharedKey("controller.curve_file", environment).keys.server
        self._context = zmq.Context()
        self.reply = self._socket(reply_port)

        async def made() -> Holdings:
            return holds(self.incarnation, self._secret_key)

        self.holdings: Holdings = on_loop(made())
        self.endpoint = f"tcp://127.0.0.1:{self.holdings.number}"

    def _socket(self, port: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, round(1000 * HANG_S))
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        socket.curve_serverkey = self._server_key
        socket.curve_publickey, socket.curve_secretkey = self.public_key, self._secret_key
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    # --- questions to the controller --------------------------------------------------------------------------

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def ask(self, request: Any, kind: type[R], timeout_s: float = HANG_S) -> R:
        """Send a request; return its answer, and skip other answers. Raises TimeoutError, Refused."""
        self.reply.send(wire.encode(request))
        end_s = time.monotonic() + timeout_s
        while True:
            if not self.reply.poll(max(0, round(1000 * (end_s - time.monotonic())))):
                raise TimeoutError(f"no answer to {request.seq} within {timeout_s} s")
            answer = wire.ANSWERS.decode(self.reply.recv())
            if answer.seq not in (request.seq, 0):
                continue
            self.epoch = answer.epoch
            if isinstance(answer, wire.Failure):
                raise Refused(answer)
            assert isinstance(answer, kind), answer
            return answer

    def register(self, timeout_s: float = HANG_S, **changes: Any) -> wire.Registered:
        fields: dict[str, Any] = {
            "protocol": wire.CLUSTER_PROTOCOL_VERSION,
            "instance": self.name,
            "incarnation": self.incarnation,
            "version": "test",
            "tiers": self.tiers,
            "chunk_tokens": 16,
            "control_endpoint": self.endpoint,
            "http_url": "",
            **self.more,
            **changes,
        }
        return self.ask(wire.Register(seq=self.next_seq(), **fields), wire.Registered, timeout_s)

    def goodbye(self) -> None:
        self.ask(wire.Goodbye(self.next_seq(), self.name, self.incarnation), wire.Done)

    def join(self, held: Mapping[str, bytes]) -> Self:
        """Register, holding this, and wait until the controller knows it."""
        self.hold(held)
        self.register()
        self.until_followed()
        return self

    def where(self, tags: bytes, n_slices: int = 1) -> list[wire.Owner]:
        """Ask the controller which other instances hold a leading part of these keys."""
        request = wire.Where(self.next_seq(), self.name, tags, n_slices, 8)
        return self.ask(request, wire.WhereReply).owners

    def until_where(self, tags: bytes, wanted: Callable[[list[wire.Owner]], bool]) -> list[wire.Owner]:
        """Ask `where` until `wanted` accepts the answer. Raises TimeoutError."""
        end_s = time.monotonic() + HANG_S
        while True:
            owners = self.where(tags)
            if wanted(owners):
                return owners
            if time.monotonic() > end_s:
                raise TimeoutError(f"still {owners}")
            time.sleep(0.005)

    # --- what the followers of this instance read -------------------------------------------------------------

    def hold(self, held: Mapping[str, bytes]) -> None:
        """Hold this from now on, without a change that says so."""
        tags = {
            tier: dict.fromkeys(of[at : at + 8] for at in range(0, len(of), 8)) for tier, of in held.items()
        }
        self.holdings.held = tags
        self.holdings.in_step.clear()

    def change(self, *runs: wire.Run) -> None:
        on_loop(self.holdings.change(runs))

    def log(self, runs: Iterable[wire.Run]) -> None:
        """As `change`, but a list of the tiers would not show it; for benchmarks."""
        on_loop(self.holdings.change(runs, held=False))

    def admit(self, tags: bytes, tier: str = "l1") -> None:
        self.change(wire.Run(wire.Change.ADMIT, tier, tags))

    def evict(self, tags: bytes, tier: str = "l1") -> None:
        self.change(wire.Run(wire.Change.EVICT, tier, tags))

    def forget_changes(self) -> None:
        """Know no earlier change any more, so that followers list again."""
        on_loop(self.holdings.forget())

    def until_followed(self) -> None:
        """Wait until a follower waits for the next change."""
        assert self.holdings.in_step.wait(HANG_S), "nobody follows"

    def tell(self, **changes: Any) -> None:
        """Change the condition, and wait until a follower has asked for it."""
        self.holdings.condition = msgspec.structs.replace(self.holdings.condition, **changes)
        for _ in range(2):  # the first answer may have been under way
            self.holdings.told.clear()
            assert self.holdings.told.wait(HANG_S), "nobody asks for the condition"

    def be_silent(self, silent: bool = True) -> None:
        """Answer nothing at the control port; or answer again."""
        self.holdings.silent = silent

    def operation(self, timeout_s: float = HANG_S) -> wire.Do:
        """Wait for an operation of a controller. Raises queue.Empty."""
        return self.holdings.operations.get(timeout=timeout_s)

    def has_operation(self) -> bool:
        return not self.holdings.operations.empty()

    def answer(self, asked: wire.Do, body: dict[str, Any] | None = None, *, refused: str = "") -> None:
        """Answer an operation, or refuse it with this message."""

        async def end() -> None:
            future = self.holdings.answers.pop(asked.seq)
            if future.done():
                return
            if refused:
                future.set_exception(BadRequest(refused))
            else:
                future.set_result(body or {})

        on_loop(end())

    def reopen(self) -> None:
        """End all connections of followers, and listen again at the same port."""

        async def again() -> None:
            holdings = self.holdings
            await holdings.port.close()
            holdings.in_step.clear()
            holdings.listen(holdings.number)

        on_loop(again())

    def close(self) -> None:
        """Close all sockets without a goodbye."""
        on_loop(self.holdings.port.close())
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
