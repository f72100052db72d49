"""The Python packages by which people ask, before a real gateway: answers, streams, their own exceptions, leaving."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.harness import api_clients
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start, at_rest
from tests.integration.gateway.test_door import KEYS, tenants
from tests.tools import fetch_wheels

pytestmark = [pytest.mark.integration, pytest.mark.long]

TEXT = api_clients.TEXT
USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
OF_ANTHROPIC = {"input_tokens": 11, "output_tokens": 5}
CHAT = {"id": "chatcmpl-1", "created": 1, "model": "m"}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "tools": [],
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "usage": {
        **OF_ANTHROPIC,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    },
}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "stop_sequence": None,
    "content": [{"type": "text", "text": TEXT}],
    "stop_reason": "end_turn",
    "usage": OF_ANTHROPIC,
}
REFUSALS = {
    "bad": (400, "invalid_request_error"),
    "busy": (429, "rate_limit_error"),
    "crash": (500, "api_error"),
}


def whole(path: str) -> dict[str, Any]:
    """An answer, as vLLM gives it."""
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    message = {"role": "assistant", "content": TEXT}
    return {
        "/v1/chat/completions": {
            **CHAT,
            "object": "chat.completion",
            "choices": [{**choice, "message": message}],
            "usage": USAGE,
        },
        "/v1/completions": {
            **CHAT,
            "object": "text_completion",
            "choices": [{**choice, "text": TEXT}],
            "usage": USAGE,
        },
        "/v1/responses": RESPONSE,
        "/v1/messages": MESSAGE,
    }[path]


def events(path: str) -> list[dict[str, Any]]:
    """The same as a stream."""
    if path == "/v1/responses":
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        found = [{"type": "response.output_text.delta", **at, "delta": text, "logprobs": []} for text in TEXT]
        begun = {**RESPONSE, "status": "in_progress", "output": []}
        found = [{"type": "response.created", "response": begun}, *found]
        found.append({"type": "response.completed", "response": RESPONSE})
        return [{**one, "sequence_number": number} for number, one in enumerate(found)]
    if path == "/v1/messages":
        begun = {**MESSAGE, "content": [], "stop_reason": None}
        deltas = [{"type": "text_delta", "text": text} for text in TEXT]
        return [
            {"type": "message_start", "message": begun},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "usage": OF_ANTHROPIC,
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            },
            {"type": "message_stop"},
        ]
    chat = path == "/v1/chat/completions"
    chunk = {**CHAT, "object": "chat.completion.chunk" if chat else "text_completion"}
    texts = [{"delta": {"content": text}} if chat else {"text": text} for text in TEXT]
    found = [{**chunk, "choices": [{"index": 0, "finish_reason": None, **text}]} for text in texts]
    found[-1]["choices"][0]["finish_reason"] = "stop"
    return found


class Engine(ScriptedEngine):
    """Speaks the four APIs."""

    left = 0
    """Clients that left an answer without end."""

    async def answers(self, got: Got, line: Line) -> None:
        path, text = got.target, got.body.decode()
        for word, (status, kind) in REFUSALS.items():
            if f'"{word}"' in text:
                error = {"type": kind, "message": f"{status} from the engine", "code": status}
                await line.answer({"type": "error", "error": error}, status)
                return
        if not got.document.get("stream"):
            await line.answer(whole(path))
            return
        await line.begin()
        while True:
            for number, one in enumerate(events(path)):
                name = f"event: {one['type']}\n" if "type" in one else ""
                await line.part(f"{name}data: {json.dumps(one)}\n\n".encode())
                if '"broken"' in text and number == 2:
                    line.cut()
                    return
                if '"endless"' in text and number == 2:
                    await line.gone()
                    self.left += 1
                    return
            break
        if path in ("/v1/chat/completions", "/v1/completions"):
            await line.part(b"data: [DONE]\n\n")
        await line.end()


@pytest.mark.parametrize("name", ["openai", "anthropic", "litellm"])
async def test_a_client_that_people_use_gets_what_an_engine_would_answer(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, vllm_python: Path, name: str
) -> None:
    engine = Engine()
    engine.behaviour = engine.answers
    gateway = await start(engine, tenants=tenants(tmp_path))
    variables = {**os.environ, "PYTHONNOUSERSITE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if name == "litellm":
        variables |= {"PYTHONPATH": str(await asyncio.to_thread(fetch_wheels.ensure, fetch_wheels.LITELLM))}
    words = [str(vllm_python), api_clients.__file__, name, gateway.url, KEYS["red"]]
    child = await asyncio.create_subprocess_exec(*words, env=variables, stderr=asyncio.subprocess.PIPE)
    said = (await child.communicate())[1].decode()
    assert child.returncode == 0, said[-4_000:]
    if name != "litellm":
        await eventually_async("the engine knows that its client has left", lambda: engine.left == 1)
    await at_rest(gateway, session)
    assert not {"authorization", "x-api-key"} & {header for got in engine.got for header in got.headers}
