"""A stand-in for an instance: it speaks the cluster's protocol and has no KV bytes.  Blocking, one thread, no retries.

Tests decide which messages are sent, lost or repeated; only `answer_commands` acts by itself, as a real instance would.
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar

import msgspec
import zmq

from kvstrata.native.core import crc32c
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.cluster_wire import KvKind
from kvstrata.rpc.zmq_curve import SharedKey

KEYS: defaultdict[str, tuple[bytes, bytes]] = defaultdict(zmq.curve_keypair)
"""Public and secret key of each instance id, which every process of the instance keeps."""
R = TypeVar("R", bound=msgspec.Struct)

HANG_S = 120.0
LOAD = wire.Load({}, {}, {}, {}, 0, 0, 0, 0)


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


class ClusterInstance:
    """One instance. It is told the controller's `reply_port` and learns the other ports when it registers."""

    def __init__(
        self,
        reply_port: int,
        name: str,
        *,
        incarnation: int = 0,
        tiers: tuple[str, ...] = ("l1", "disk-0"),
        peer: str = "tcp://127.0.0.1:9",
        keys: tuple[bytes, bytes] | None = None,
        environment: Mapping[str, str] = os.environ,
        **more: Any,
    ) -> None:
        self.name = name
        self.public_key, self._secret_key = KEYS[name] if keys is None else keys
        self.incarnation = incarnation or secrets.randbelow(1 << 62) + 1
        self.tiers = list(tiers)
        self.peer = peer
        self.more = {"host": "here", "pid": 1, "l1_bytes": 1 << 30, **more}
        self.seq = 0
        self.event_seq = 0
        self.sync_number = 0
        self.commands: list[wire.Command] = []
        self.epoch = 0
        self.registered: wire.Registered | None = None
        self._server_key = SharedKey("controller.curve_file", environment).keys.server
        self._context = zmq.Context()
        self.reply = self._socket(zmq.DEALER, reply_port)
        self.pull: zmq.Socket[bytes] | None = None
        self.heart: zmq.Socket[bytes] | None = None

    def _socket(self, kind: int, port: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, round(1000 * HANG_S))
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        socket.curve_serverkey = self._server_key
        socket.curve_publickey, socket.curve_secretkey = self.public_key, self._secret_key
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def receive(self, socket: zmq.Socket[bytes], seq: int, timeout_s: float = HANG_S) -> msgspec.Struct:
        """Return the answer to a request, and skip other answers and nudges. Raises TimeoutError, Refused."""
        end_s = time.monotonic() + timeout_s
        while True:
            if not socket.poll(max(0, round(1000 * (end_s - time.monotonic())))):
                raise TimeoutError(f"no answer to {seq} within {timeout_s} s")
            answer = wire.ANSWERS.decode(socket.recv())
            if isinstance(answer, wire.Nudge) or answer.seq not in (seq, 0):
                continue
            self.epoch = answer.epoch
            if isinstance(answer, wire.Failure):
                raise Refused(answer)
            return answer

    def ask(self, request: Any, kind: type[R], timeout_s: float = HANG_S) -> R:
        """Send a request on the reply socket; return its answer. Raises TimeoutError, Refused."""
        self.reply.send(wire.encode(request))
        answer = self.receive(self.reply, request.seq, timeout_s)
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
            "peer_endpoint": self.peer,
            "http_url": "",
            "last_event": self.event_seq,
            **self.more,
            **changes,
        }
        answer = self.ask(wire.Register(seq=self.next_seq(), **fields), wire.Registered, timeout_s)
        for socket in (self.pull, self.heart):
            if socket is not None:
                socket.close()
        self.pull = self._socket(zmq.PUSH, answer.pull_port)
        self.heart = self._socket(zmq.DEALER, answer.heartbeat_port)
        self.registered = answer
        return answer

    def goodbye(self) -> None:
        self.ask(wire.Goodbye(self.next_seq(), self.name, self.incarnation), wire.Done)

    def sync_parts(self, held: Mapping[str, bytes], part_bytes: int = 65_536) -> list[wire.SyncPart]:
        """Make the parts of a new sync, without sending them."""
        self.sync_number += 1
        cut = [
            (tier, tags[at : at + part_bytes])
            for tier, tags in held.items()
            for at in range(0, len(tags), part_bytes)
        ]
        return [
            wire.SyncPart(
                self.next_seq(),
                self.name,
                self.incarnation,
                self.sync_number,
                index,
                tier,
                tags,
                crc32c(tags),
            )
            for index, (tier, tags) in enumerate(cut)
        ]

    def begin(self, events_seq: int | None = None) -> None:
        """Begin the sync whose parts `sync_parts` returned last."""
        seq = self.event_seq if events_seq is None else events_seq
        self.ask(
            wire.SyncBegin(self.next_seq(), self.name, self.incarnation, self.sync_number, seq), wire.Done
        )

    def end(self, n_parts: int, held: Mapping[str, bytes]) -> None:
        counts = {tier: len(tags) // 8 for tier, tags in held.items()}
        self.ask(
            wire.SyncEnd(self.next_seq(), self.name, self.incarnation, self.sync_number, n_parts, counts),
            wire.Done,
        )

    def sync(self, held: Mapping[str, bytes], part_bytes: int = 65_536) -> None:
        """Make a full sync, with up to four parts unanswered at a time."""
        parts = self.sync_parts(held, part_bytes)
        self.begin()
        unanswered: list[int] = []
        for part in parts:
            self.reply.send(wire.encode(part))
            unanswered.append(part.seq)
            if len(unanswered) >= 4:
                self.receive(self.reply, unanswered.pop(0))
        for seq in unanswered:
            self.receive(self.reply, seq)
        self.end(len(parts), held)

    def join(self, held: Mapping[str, bytes]) -> Self:
        """Register, sync if the controller asks for it, and send one heartbeat."""
        if self.register().sync:
            self.sync(held)
        self.heartbeat()
        return self

    def tell(self, *runs: wire.Run, seq: int | None = None) -> None:
        """Send one batch of events, with the next number or, without counting the batch, with `seq`."""
        assert self.pull is not None
        if seq is None:
            self.event_seq += 1
            seq = self.event_seq
        self.pull.send(wire.encode(wire.Events(self.name, self.incarnation, seq, list(runs))))

    def admit(self, tags: bytes, tier: str = "l1") -> None:
        """Tell the controller that these chunks were admitted to a tier."""
        self.tell(wire.Run(wire.Change.ADMIT, tier, tags))

    def evict(self, tags: bytes, tier: str = "l1") -> None:
        """Tell the controller that these chunks were evicted from a tier."""
        self.tell(wire.Run(wire.Change.EVICT, tier, tags))

    def heartbeat(
        self,
        results: Iterable[wire.CommandResult] = (),
        *,
        state: str = "ready",
        load: wire.Load = LOAD,
        models: Iterable[KvKind] = (),
        timeout_s: float = HANG_S,
        **more: Any,
    ) -> list[wire.Command]:
        """Send one heartbeat; return the commands that wait for this instance."""
        assert self.heart is not None
        told = wire.Heartbeat(
            self.next_seq(),
            self.name,
            self.incarnation,
            self.event_seq,
            state,
            load,
            list(models),
            list(results),
            **more,
        )
        self.heart.send(wire.encode(told))
        answer = self.receive(self.heart, told.seq, timeout_s)
        assert isinstance(answer, wire.Beat)
        self.commands = answer.commands
        return answer.commands

    def nudged(self, timeout_s: float = HANG_S) -> bool:
        """Wait for a Nudge; False when none comes."""
        assert self.heart is not None
        if not self.heart.poll(round(1000 * timeout_s)):
            return False
        return isinstance(wire.ANSWERS.decode(self.heart.recv()), wire.Nudge)

    def answer_commands(self, answer: Callable[[wire.Command], dict[str, Any]]) -> list[wire.Command]:
        """Wait for a Nudge, carry out the waiting commands and report their results; return these commands."""
        assert self.nudged(), "no Nudge came"
        commands = self.heartbeat()
        self.heartbeat([wire.CommandResult(one.number, True, "", answer(one)) for one in commands])
        return commands

    def where(self, tags: bytes, n_slices: int = 1) -> list[wire.Owner]:
        """Ask the controller which other instances hold a leading part of these keys."""
        request = wire.Where(self.next_seq(), self.name, tags, n_slices, 8)
        return self.ask(request, wire.WhereReply).owners

    def until_where(self, tags: bytes, wanted: Callable[[list[wire.Owner]], bool]) -> list[wire.Owner]:
        """Ask `where` until `wanted` accepts the answer, since events have no answer. Raises TimeoutError."""
        end_s = time.monotonic() + HANG_S
        while True:
            owners = self.where(tags)
            if wanted(owners):
                return owners
            if time.monotonic() > end_s:
                raise TimeoutError(f"still {owners}")
            time.sleep(0.005)

    def close(self) -> None:
        """Close all sockets without a goodbye."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
