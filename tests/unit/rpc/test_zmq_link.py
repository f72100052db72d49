"""rpc/zmq_link.py with real sockets: each question has one outcome, within the time limit of its asker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvstrata.errors import Unavailable
from kvstrata.rpc.cluster_wire import (
    TO_CONTROLLER,
    Done,
    Goodbye,
    WhereReply,
    encode,
)
from kvstrata.rpc.zmq_curve import ClusterKeys, read_cluster_keys
from kvstrata.rpc.zmq_link import MAX_OPEN, QUEUE_MESSAGES, AskLink, Links
from kvstrata.rpc.zmq_server import Address, ZmqServer
from tests.harness.daemon import free_port
from tests.harness.waiting import until

QUESTION = Goodbye(0, "a", 1)
SOON_S, LONG_S = 0.05, 30.0


class Other:
    """The other end of a link; `answer` makes the frames with which it replies."""

    def __init__(self, keys: ClusterKeys | None = None, port: int = 0) -> None:
        self.server = ZmqServer(asyncio.get_running_loop())
        self.port = self.server.bind_tcp("localhost", port, keys=keys, anywhere=False)
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.heard: list[tuple[Address, bytes]] = []
        self.answer: Callable[[int], list[bytes]] = lambda seq: [encode(Done(seq, 7))]
        self.server.start(self._on_frame, lambda address, count: b"frames")

    def _on_frame(self, address: Address, frame: bytes) -> None:
        self.heard.append((address, frame))
        for reply in self.answer(TO_CONTROLLER.decode(frame).seq):
            self.server.send(address, reply)


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    links = Links(asyncio.get_running_loop())
    yield links
    links.close()


@pytest.fixture
async def other() -> AsyncIterator[Other]:
    other = Other()
    yield other
    other.server.close()


@pytest.fixture
async def link(links: Links, other: Other) -> AsyncIterator[AskLink]:
    link = links.ask(other.endpoint)
    yield link
    link.close()


async def test_answers_find_their_questions_in_any_order(link: AskLink, other: Other) -> None:
    held: list[int] = []

    def all_at_the_end_backwards(seq: int) -> list[bytes]:
        held.append(seq)
        return [encode(Done(n, n)) for n in reversed(held)] if len(held) == 50 else []

    other.answer = all_at_the_end_backwards
    answers = await asyncio.gather(*(link.ask(QUESTION, Done, LONG_S) for _ in range(50)))
    assert [answer.epoch for answer in answers] == [answer.seq for answer in answers]
    assert len({answer.seq for answer in answers}) == 50


async def test_an_answer_of_another_kind_is_an_error(link: AskLink, other: Other) -> None:
    other.answer = lambda seq: [encode(WhereReply(seq, 1, []))]
    with pytest.raises(Unavailable, match="WhereReply for Done"):
        await link.ask(QUESTION, Done, LONG_S)


async def test_garbage_and_answers_to_nothing_are_dropped(link: AskLink, other: Other) -> None:
    other.answer = lambda seq: [b"\xc1", b"", encode(Done(seq + 1_000, 1)), encode(Done(seq, 2))]
    assert (await link.ask(QUESTION, Done, LONG_S)).epoch == 2
    assert link.garbage_count == 2


async def test_a_cancelled_question_is_never_sent(links: Links) -> None:
    port = free_port()
    link = links.ask(f"tcp://127.0.0.1:{port}")
    with pytest.raises(Unavailable):
        await link.ask(QUESTION, Done, SOON_S)
    assert not link.connected
    waiting = asyncio.create_task(link.ask(QUESTION, Done, LONG_S))
    await asyncio.sleep(0)
    present = Other(port=port)
    assert (await waiting).epoch == 7
    assert len(present.heard) == 1
    link.close()
    present.server.close()


async def test_questions_without_an_outcome_are_bounded(link: AskLink, other: Other) -> None:
    other.answer = lambda seq: []
    waiting = [asyncio.create_task(link.ask(QUESTION, Done, LONG_S)) for _ in range(MAX_OPEN)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="are open"):
        await link.ask(QUESTION, Done, LONG_S)
    link.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)


async def test_messages_without_an_answer_need_a_connection_and_arrive_in_order(
    links: Links, tmp_path: Path
) -> None:
    context = zmq.asyncio.Context()
    pull = context.socket(zmq.ROUTER)
    push = links.ask(f"ipc://{tmp_path}/pull")
    assert not push.try_send(b"too early")
    pull.bind(f"ipc://{tmp_path}/pull")
    await until(lambda: push.connected)
    for n in range(100):
        while not push.try_send(b"%d" % n):
            await until(lambda: push.connected)
    arrived = [await asyncio.wait_for(pull.recv_multipart(), LONG_S) for _ in range(100)]
    assert [frames[1:] for frames in arrived] == [[b"%d" % n] for n in range(100)]
    push.close()
    context.destroy(linger=0)


async def test_sending_to_a_peer_that_does_not_read_ends_in_false(links: Links) -> None:
    context = zmq.Context()
    pull = context.socket(zmq.ROUTER)
    pull.setsockopt(zmq.RCVHWM, 1)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    push = links.ask(f"tcp://127.0.0.1:{port}")
    await until(lambda: push.connected)
    sent = 0
    while push.try_send(bytes(1 << 20)):
        sent += 1
        assert sent < 4 * QUEUE_MESSAGES
    push.close()
    context.destroy(linger=0)


def shared_key(tmp_path: Path, name: str) -> ClusterKeys:
    path = tmp_path / name
    path.write_text(f"secret {zmq.curve_keypair()[1].decode()}\n")
    path.chmod(0o600)
    return read_cluster_keys(str(path), "controller.curve_file")


async def test_a_refused_handshake_is_told_and_a_process_that_does_not_answer_is_none(links, tmp_path):
    keys, foreign = shared_key(tmp_path, "ours"), shared_key(tmp_path, "theirs")
    guarded = Other(keys)
    with contextlib.closing(guarded.server):
        unlisted = keys._replace(secret=foreign.secret)
        for wrong in (foreign, unlisted, None):
            told = asyncio.Event()
            links.ask(guarded.endpoint, keys=wrong, refused=told.set)
            async with asyncio.timeout(LONG_S):
                await told.wait()
        refused: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as silent:
            waits = links.ask(
                f"tcp://127.0.0.1:{silent.getsockname()[1]}",
                keys=keys,
                refused=lambda: refused.append("silent"),
            )
            with pytest.raises(Unavailable):
                await waits.ask(QUESTION, Done, SOON_S)
            member = links.ask(guarded.endpoint, keys=keys, refused=lambda: refused.append("member"))
            assert (await member.ask(QUESTION, Done, LONG_S)).epoch == 7
            await asyncio.to_thread(silent.accept)
        with pytest.raises(Unavailable):
            await waits.ask(QUESTION, Done, SOON_S)
        assert refused == []


async def test_a_handshake_that_is_refused_once_and_for_all_is_told_on_a_busy_machine(
    links: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = zmq.Socket.get_monitor_socket

    def late(link: zmq.Socket[bytes], events: int | None = None) -> Any:
        time.sleep(1)  # libzmq's threads go on meanwhile
        return begin(link, events)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", late)
    guarded, told = Other(shared_key(tmp_path, "ours")), asyncio.Event()
    with contextlib.closing(guarded.server):
        links.ask(guarded.endpoint, refused=told.set)
        async with asyncio.timeout(LONG_S):
            await told.wait()


def connections_of(port: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """Connections that this process has accepted on `port`, and those that it has opened to it."""
    accepted: list[socket.socket] = []
    opened: list[socket.socket] = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    if found.getpeername()[1] == port:
                        opened.append(found.dup())
                    elif found.getsockname()[1] == port:
                        accepted.append(found.dup())
    return accepted, opened


async def test_a_host_that_vanishes_is_noticed_by_both_ends(link: AskLink, other: Other) -> None:
    """By TCP, since there are no ZMTP heartbeats: keepalive while nothing is sent, a time limit while something is."""
    await link.ask(QUESTION, Done, LONG_S)
    [accepted], [opened] = connections_of(other.port)
    with accepted, opened:
        for connection, idle_s, limit_ms in ((accepted, 10, 30_000), (opened, 2, 6_000)):
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle_s
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == limit_ms
