"""What the watcher does in a real Envoy: the module and the Lua program are held to the same promises."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.envoy import configuration
from kvstrata.gateway.envoy.process import MODULE
from kvstrata.gateway.fleet import EngineState, Place, ServingEngine
from kvstrata.gateway.marks import Marks, marks_of
from kvstrata.gateway.routing.rates import PrefillRates
from tests.harness.daemon import free_port
from tests.harness.envoy_program import program
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
FRAGMENT = '"cache_salt":"red","kv_transfer_params":{"kvstrata.tenant":"red"},'


class Scene(NamedTuple):
    url: str
    engine: ScriptedEngine
    lines: int
    """Where the access log comes."""

    def told(self) -> list[Marks]:
        """The lines since the last call."""
        with contextlib.suppress(BlockingIOError):
            found = [marks_of(line) for line in os.read(self.lines, 1 << 20).splitlines()]
            return [one for one in found if one is not None]
        return []

    async def end(self) -> Marks:
        """The line of the end of the only request."""
        ends: list[Marks] = []

        def came() -> bool:
            ends.extend(one for one in self.told() if one.is_end and one.number == 17)
            return bool(ends)

        await eventually_async("the request's line comes", came)
        return ends[0]


async def choose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endpoint: str) -> None:
    """A picker that sends everything to one engine."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = head.partition("content-length: ")[2].partition("\r")[0]
            await reader.readexactly(int(length or 0))
            fragment = f"x-kv-fragment: {FRAGMENT}\r\n" if "x-session-id: red" in head else ""
            said = f"{configuration.ENDPOINT}: {endpoint}\r\nx-kv-number: 17\r\n{fragment}"
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n{said}\r\n".encode())
    writer.transport.abort()


@pytest.fixture(params=["module", "lua"])
async def scene(request: pytest.FixtureRequest, tmp_path_factory: Any) -> AsyncIterator[Scene]:
    """An engine, Envoy with one of the watchers, and a picker that chooses the engine."""
    folder = Path(tmp_path_factory.mktemp("e"))
    engine = ScriptedEngine()
    lines, tells_lines = os.pipe()
    os.set_blocking(lines, False)
    firsts, tells_firsts = os.pipe2(os.O_NONBLOCK)
    place = configuration.Place(folder, "127.0.0.1", free_port())
    pipe = tells_firsts if request.param == "module" else -1
    async with engine:
        known = ServingEngine(Place("e", Address("127.0.0.1", engine.port, False)), PrefillRates(1.0))
        known.state = EngineState.UP
        place.engines.write_bytes(configuration.engines_file([known]))
        picker = await asyncio.start_unix_server(
            lambda reader, writer: choose(reader, writer, engine.name), str(place.picker), limit=1 << 26
        )
        file = folder / "envoy.json"
        file.write_bytes(msgspec.json.encode(configuration.configuration(GatewaySettings(), place, pipe)))
        words = [program(), "-c", file, "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
        process = await asyncio.to_thread(
            subprocess.Popen,
            [*map(str, words), "--file-flush-interval-msec", "10"],
            stdout=tells_lines,
            pass_fds=[tells_firsts],
            env={**os.environ, "ENVOY_DYNAMIC_MODULES_SEARCH_PATH": str(MODULE.parent)},
        )
        try:
            found = Scene(f"http://127.0.0.1:{place.port}", engine, lines)

            async def listens() -> bool:
                assert process.poll() is None
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", place.port)
                    writer.close()
                    return True
                return False

            await eventually_async("Envoy listens", listens)
            yield found
        finally:
            process.kill()
            process.wait()
            picker.close()
            for fd in (lines, tells_lines, firsts, tells_firsts):
                os.close(fd)


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def part(**delta: Any) -> bytes:
    return event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta}]})


USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 7}}
ALL = {"prompt": 11, "cached": 7, "completion": 5}
OWN = {"a": '}]" {[', "content": "x", "error": {"b": [{"c": {}}]}, "id": "resp_2", "prompt_tokens": 99}
"""A client's own words: what a tool is called with, the names of its parameters, metadata."""
BEGIN = part(role="assistant", content="")
REASONS = {
    "a chat": "stop",
    "reasoning, calls": "tool_calls",
    "messages": "tool_use",
    "responses with calls": "function_call",
}
STREAMS: dict[str, tuple[bytes, int, dict[str, int]]] = {
    "a chat": (
        BEGIN
        + part(content="a")
        + part(content='"b"')
        + event({"choices": [{"finish_reason": "stop", "stop_reason": "a\n, word"}]})
        + event({"choices": [], "usage": USAGE}),
        2,
        ALL,
    ),
    "comments and roles are no tokens": (b": ping\n\n" * 3 + BEGIN + part(content=None), 0, {}),
    "a quote in a comment": (b': a " of its own\n\n' + part(content="a") + event({"usage": USAGE}), 1, ALL),
    "reasoning, calls": (
        part(reasoning_content="r")
        + part(tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{"}}])
        + event({"choices": [{"finish_reason": "tool_calls", "stop_reason": None}]}),
        2,
        {},
    ),
    "content that looks like content": (
        part(content='"content": "x", "prompt_tokens": 99, "error": {, "finish_reason": "stop"')
        + event({"usage": USAGE}),
        1,
        ALL,
    ),
    "a completion": (
        event({"choices": [{"text": "a"}]}) + event({"choices": [{"text": ""}], "usage": USAGE}),
        1,
        ALL,
    ),
    "usage with every event": (
        part(content="a")
        + event({"usage": {"prompt_tokens": 11, "completion_tokens": 1}})
        + event({"usage": USAGE}),
        1,
        ALL,
    ),
    "messages": (
        b"event: message_start\n"
        + event({"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 1}}})
        + event({"type": "content_block_start", "content_block": {"type": "text", "text": ""}})
        + event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}})
        + event({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "b"}})
        + event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": "tool_use", "stop_sequence": None},
                "usage": {
                    "input_tokens": 3,
                    "cache_read_input_tokens": 7,
                    "cache_creation_input_tokens": 1,
                    "output_tokens": 5,
                },
            }
        ),
        2,
        ALL,
    ),
    "responses": (
        event({"type": "response.created", "response": {"id": "resp_1", "error": None, "output": []}})
        + event({"type": "response.output_text.delta", "item_id": "msg_1", "delta": "a"})
        + event(
            {"type": "x", "response": {"id": "resp_1", "usage": {"input_tokens": 11, "output_tokens": 5}}}
        ),
        1,
        {"prompt": 11, "completion": 5},
    ),
    "responses that tell what was asked": (
        event({"type": "response.created", "response": {"id": "resp_1", "metadata": OWN, "tools": [OWN, {}]}})
        + event({"type": "x", "response": {"text": {"format": {"schema": OWN}}, "tools": []}})
        + event({"type": "response.output_text.delta", "item_id": "msg_1", "delta": "a"})
        + event({"type": "x", "response": {"tools": [OWN], "usage": USAGE}}),
        1,
        ALL,
    ),
    "responses with calls": (
        event({"type": "response.created", "response": {"id": "resp_1", "tools": [{"type": "function"}]}})
        + event({"type": "response.function_call_arguments.delta", "delta": "{"})
        + event({"type": "response.output_item.done", "item": {"type": "function_call", "name": "f"}})
        + event({"type": "response.completed", "response": {"id": "resp_1", "output": []}}),
        1,
        {},
    ),
}


@pytest.mark.parametrize("size", [1 << 20, 7, 1])
async def test_tokens_of_streams_are_told_however_they_are_cut(scene: Scene, size: int) -> None:
    async with aiohttp.ClientSession() as session:
        for name, (body, events, tokens) in STREAMS.items():

            async def answers(got: Got, line: Line, body: bytes = body) -> None:
                await line.begin()
                for at in range(0, len(body), size):
                    await line.part(body[at : at + size])
                await line.end()

            scene.engine.behaviour = answers
            before_s = time.time()
            async with session.post(scene.url + CHAT, json={"model": "m"}) as response:
                assert await response.read() == body, name
            marks = await scene.end()
            assert (marks.events, marks.tokens, marks.whole) == (events, tokens, True), name
            assert (marks.outcome, marks.failed, marks.served) == ("ok", False, scene.engine.name), name
            assert bool(marks.first_s) == bool(events)
            assert not events or before_s <= marks.first_s <= marks.last_s <= time.time(), name
            assert marks.response == ("resp_1" if name.startswith("responses") else ""), name
            assert marks.reason == REASONS.get(name, ""), name


async def test_usage_of_whole_answers_is_found_wherever_it_stands(scene: Scene) -> None:
    long = {"prompt_logprobs": [{"1": {"logprob": -1.5, "decoded_token": '"a"\\'}}] * 4_000}
    called = {"content": [{"type": "tool_use", "input": OWN}]}
    for document in (
        {"usage": USAGE, **long},
        {**long, "usage": USAGE},
        {"choices": [], "usage": USAGE},
        {"usage": USAGE, **called},
    ):
        for indent in (None, 2):
            body = json.dumps(document, indent=indent).encode()

            async def answers(got: Got, line: Line, body: bytes = body) -> None:
                await line.answer(body)

            scene.engine.behaviour = answers
            async with (
                aiohttp.ClientSession() as session,
                session.post(scene.url + CHAT, json={"model": "m"}) as response,
            ):
                assert await response.read() == body
            marks = await scene.end()
            assert (marks.tokens, marks.whole, marks.failed, marks.response) == (ALL, True, False, "")
            assert marks.first_s > 0


async def test_ends_are_told_apart(scene: Scene) -> None:
    go_on = asyncio.Event()

    async def fails(got: Got, line: Line) -> None:
        await line.begin()
        await line.part(event({"error": {"message": "out of memory"}}))
        await line.end()

    async def breaks(got: Got, line: Line) -> None:
        await line.begin()
        await line.part(part(content="a"))
        await go_on.wait()
        line.cut()

    async def waits(got: Got, line: Line) -> None:
        await line.begin()
        await line.part(part(content="a") + part(content="b"))
        await line.gone()

    async with aiohttp.ClientSession() as session:
        scene.engine.behaviour = fails
        async with session.post(scene.url + CHAT, json={"model": "m"}) as response:
            await response.read()
        marks = await scene.end()
        assert (marks.outcome, marks.failed, marks.events) == ("ok", True, 0)
        scene.engine.behaviour = breaks
        async with session.post(scene.url + CHAT, json={"model": "m"}) as response:
            await response.content.readany()
            go_on.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        marks = await scene.end()
        assert (marks.outcome, marks.events, marks.whole) == ("broke_off", 1, False)
        scene.engine.behaviour = waits
        async with session.post(scene.url + CHAT, json={"model": "m"}) as response:
            await response.content.readany()
            response.close()
        marks = await scene.end()
        assert (marks.outcome, marks.events, marks.whole) == ("cancelled", 2, False)


async def test_a_fragment_goes_behind_the_first_brace(scene: Scene) -> None:
    async def slices(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    async with aiohttp.ClientSession() as session:
        for body in (
            b'{"model":"m"}',
            b' \n{"model": "m", "user": "{"}  ',
            b'{"model":"' + b"m" * 3_000_000 + b'", "user": {}}',
        ):
            for data in (body, slices(body)):
                scene.engine.got.clear()
                headers = {"x-session-id": "red"}
                async with session.post(scene.url + CHAT, data=data, headers=headers) as response:
                    assert response.status == 200
                [got] = scene.engine.got
                brace = body.index(b"{") + 1
                assert got.body == body[:brace] + FRAGMENT.encode() + body[brace:]
        scene.engine.got.clear()
        async with session.post(scene.url + CHAT, data=b'{"model":"m"}') as response:
            assert response.status == 200
        assert scene.engine.got[0].body == b'{"model":"m"}'
