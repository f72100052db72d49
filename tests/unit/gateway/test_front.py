"""What the picker answers to Envoy's questions, whatever their heads are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.gateway.door import ArrivingBodies
from kvstrata.gateway.envoy import process as envoy
from kvstrata.gateway.envoy.configuration import heap_bytes
from kvstrata.gateway.marks import marks_of
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.picker.front import AuthzServer, EnvoyCheck
from kvstrata.gateway.picker.taskless import begin, in_task
from kvstrata.gateway.request import Requests


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


WORDS = st.binary(max_size=12) | st.sampled_from(
    (b"POST", b"/healthz", b"HTTP/1.1", b"9" * 40, b"-1", b"\xb2")
)


@given(st.lists(WORDS, max_size=5), WORDS)
def test_a_head_that_is_not_http_is_answered_400_and_never_raises(words: list[bytes], length: bytes) -> None:
    async def answered() -> Wire:
        wire, question = Wire(), EnvoyCheck(AuthzServer(cast(Parts, None)))
        question.connection_made(wire)
        head = b" ".join(words) + b"\r\ncontent-length: " + length
        question.data_received(head + b"\r\n\r\n")
        question.connection_lost(None)
        return wire

    wire = asyncio.run(answered())
    assert not wire.written or (wire.written.startswith(b"HTTP/1.1 400 ") and wire.closed)
    if len(words) == 1 and b" " not in words[0] and b"\r\n\r\n" not in words[0]:
        assert wire.written


async def test_connections_that_envoy_refuses_are_told_once(monkeypatch, caplog):
    told = b"http.clients.downstream_rq_active: 0\nlistener.127.0.0.1_1.downstream_global_cx_overflow: 16\n"

    class Requests:
        def end_all_lost(self, before_s: float) -> int:
            return 0

    one = envoy.Envoy.__new__(envoy.Envoy)
    one._requests, one._refused, one._log = cast(Any, Requests()), "0", envoy.EventLog("envoy")
    one._settings = envoy.GatewaySettings()

    async def tell(method: str, target: str) -> bytes:
        return told

    monkeypatch.setattr(one, "_tell", tell)
    await one._look()
    await one._look()
    assert sum("connections_refused" in record.getMessage() for record in caplog.records) == 1


async def test_a_coroutine_that_begins_at_once_ends_as_in_a_task_whatever_it_waits_for() -> None:
    seen: list[str] = []

    async def work(waits: asyncio.Event | None) -> None:
        try:
            if waits is not None:
                await in_task()
                async with asyncio.timeout(60):
                    await waits.wait()
            seen.append("ended")
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    assert begin(work(None)) is None
    going = asyncio.Event()
    again = begin(work(going))
    assert again is not None
    await asyncio.sleep(0)
    going.set()
    await again
    for steps in (0, 3):
        task = begin(work(asyncio.Event()))
        assert task is not None
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
    assert seen == ["ended", "ended", "GeneratorExit", "CancelledError"]


def test_a_body_is_counted_no_more_whether_its_end_is_told_before_it_or_behind_it() -> None:
    arriving, requests = ArrivingBodies(), Requests()
    requests.parts = cast(Any, SimpleNamespace(door=SimpleNamespace(arriving=arriving)))
    half = heap_bytes() // 8
    for number, ends_first in enumerate((True, False, True)):
        line = marks_of(f"- DownstreamEnd 0 - DC 0 - {number}".encode())
        assert line is not None
        if ends_first:
            requests.on_log_line(line, 0.0)
        assert arriving.begin(str(number), "red", half) is None, "what came before has ended"
        requests.on_body_begins(str(number))
        if not ends_first:
            assert arriving.begin("other", "red", 1) is not None
            requests.on_log_line(line, 0.0)
