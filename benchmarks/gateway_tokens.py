"""`gateway_tokens_*`: the time in which the gateway knows a chat's token ids, and what that does to its event loop.

A byte-level tokenizer with 8,000 tokens, trained on the sources of Python's library; conversations of these sources,
of drawn lengths up to 50,000 tokens, with turns of 50 to 600 tokens.  What is timed is `Tokens.of`: the body's JSON,
the template, the ids, and the way to a thread and back.

- `gateway_tokens_first`: the first time that a conversation is seen, beside a bare call of `tokenizers` for its text
- `gateway_tokens_next`: each further turn of conversations of 40,000 to 50,000 tokens, p99
- `gateway_tokens_stall`: how late a timer of 1 ms fires meanwhile, p99

Sketch of a further turn: its new text at the bare call's rate, and one pass over the body's bytes at 200 MB/s.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import figure, sized
from kvstrata.config.gateway_model import TokenSettings
from kvstrata.gateway.engine_link import Address, Links
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.tokens.prompts import CHAT, COMPLETIONS, Chat, prompt_in
from kvstrata.gateway.tokens.source import Tokens
from kvstrata.gateway.tokens.tokenizer import Memory, OwnTokenizer
from kvstrata.process.supervisor import SWITCH_S
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.tokenizer_folder import CHATML, byte_level, save

MOST_TOKENS = sized(50_000, 2_000)
VOCABULARY = sized(8_000, 600)
CONVERSATIONS = sized(30, 2)
TURNS = sized(20, 3)
TICK_S = 0.001
BYTES_S = 200e6
TARGET_MS, STALL_MS = 2.0, 1.0


def corpus() -> str:
    """Sources of Python's library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: sized(120, 3)]
    return "".join(file.read_text("utf-8", "replace") for file in files)


class Conversation:
    """Turns of drawn lengths."""

    def __init__(self, text: str, draw: random.Random) -> None:
        self._text, self._draw = text, draw
        self.messages: list[dict[str, str]] = [{"role": "system", "content": self.piece(800)}]

    def piece(self, chars: int) -> str:
        """A piece of the corpus."""
        at = self._draw.randrange(max(1, len(self._text) - chars))
        return self._text[at : at + chars]

    def grow(self, chars: int) -> None:
        """Add a question, and before it an answer to the last one, with so many characters in all."""
        if len(self.messages) > 1:
            self.messages.append({"role": "assistant", "content": self.piece(chars // 2)})
        self.messages.append({"role": "user", "content": self.piece(chars // 2)})

    @property
    def body(self) -> bytes:
        """The request."""
        return json.dumps({"model": "m", "messages": self.messages}, ensure_ascii=False).encode()


class Ticks:
    """How late a timer fires, in ms."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def _tick(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.late_ms.append(1e3 * (time.perf_counter() - begun - TICK_S))

    async def __aenter__(self) -> Ticks:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()


def share(values: list[float], part: float) -> float:
    """A percentile."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


async def verified(tokenizer: OwnTokenizer, engine: ScriptedEngine, links: Links) -> Tokens:
    """A source of ids for the model of an engine that tokenises as `tokenizer` does."""

    async def answer(got: Got, line: Line) -> None:
        prompt = prompt_in(COMPLETIONS if "prompt" in got.document else CHAT, got.body)
        ids = tokenizer.ids_of(prompt, parted=False) if prompt is not None else None
        await line.answer({"tokens": list(ids or [])})

    engine.behaviour = answer
    fleet = Fleet(time.monotonic)
    [one] = fleet.set_places([Place("e", Address("127.0.0.1", engine.port, False))])
    fleet.up(one, {"m": {"id": "m"}})
    settings = TokenSettings(deadline_ms=10_000)
    tokens = Tokens(settings, {"m": tokenizer}, fleet, links, time.monotonic)
    await tokens.verify()
    assert ("plain", False) in tokens.agreed("m") and ("system", False) in tokens.agreed("m")
    return tokens


class Asked(NamedTuple):
    """A request to time."""

    body: bytes
    new_chars: int
    """Of its text, those that no request before had; 0 for a conversation's first."""


def requests(text: str, per_token: float) -> Iterator[Asked]:
    """Conversations, half of them of 80 to 95 % of the greatest length, with further turns."""
    draw = random.Random(20_26)
    for number in range(CONVERSATIONS):
        conversation = Conversation(text, draw)
        wanted = MOST_TOKENS if number % 2 else int(1_000 * (MOST_TOKENS / 1_000) ** draw.random())
        wanted = int(wanted * draw.uniform(0.8, 0.95))
        while len(conversation.body) < (wanted - 300) * per_token:
            conversation.grow(int(draw.uniform(50, 2_000) * per_token))
        yield Asked(conversation.body, 0)
        for _ in range(TURNS if number % 2 else 0):
            chars = int(draw.uniform(50, 600) * per_token)
            conversation.grow(chars)
            yield Asked(conversation.body, chars)


def bare_ms(tokenizer: OwnTokenizer, body: bytes) -> float:
    """The time of one call of `tokenizers` for the text of a chat."""
    prompt = prompt_in(CHAT, body)
    assert isinstance(prompt, Chat) and tokenizer.template is not None
    whole = tokenizer.template.render(prompt, parted=False)
    begun = time.perf_counter()
    tokenizer.tokenizer.encode(whole, add_special_tokens=False)
    return 1e3 * (time.perf_counter() - begun)


def cpu_ms(tokenizer: OwnTokenizer, body: bytes, memory: Memory) -> float:
    """The CPU time of what a thread does for a request."""
    begun = time.thread_time()
    prompt = prompt_in(CHAT, body)
    assert prompt is not None and tokenizer.ids_of(prompt, parted=False, memory=memory) is not None
    return 1e3 * (time.thread_time() - begun)


async def measure(tokenizer: OwnTokenizer, text: str) -> dict[str, list[float]]:
    """Times in ms, by kind."""
    seen: dict[str, list[float]] = {"first": [], "next": [], "tokens": []}
    links = Links()
    sample = text[:200_000]
    per_token = len(sample) / len(tokenizer.encode(sample) or [])
    asked = list(requests(text, per_token))
    async with ScriptedEngine("m") as engine:
        tokens = await verified(tokenizer, engine, links)
        async with Ticks() as idle:
            await asyncio.sleep(sized(1.0, 0.05))
        async with Ticks() as ticks:
            for one in asked:
                begun = time.perf_counter()
                ids = (await tokens.of(CHAT, one.body, "m", "")).ids
                seen["next" if one.new_chars else "first"].append(1e3 * (time.perf_counter() - begun))
                assert ids is not None
                seen["tokens"].append(len(ids))
        await tokens.close()
        await links.close()
    memory = Memory()
    for one in asked:
        kind = "next_cpu" if one.new_chars else "first_cpu"
        seen.setdefault(kind, []).append(cpu_ms(tokenizer, one.body, memory))
    seen["bare"] = [bare_ms(tokenizer, one.body) for one in asked if not one.new_chars]
    rate = sum(seen["bare"]) / sum(len(one.body) for one in asked if not one.new_chars)
    seen["sketch"] = [one.new_chars * rate + 1e3 * len(one.body) / BYTES_S for one in asked if one.new_chars]
    return seen | {"idle_late": idle.late_ms, "late": ticks.late_ms}


def run() -> list[dict[str, Any]]:
    """Measure all figures."""
    import uvloop

    text = corpus()
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)  # as the gateway does
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = byte_level(text=[text], vocabulary=VOCABULARY)
            tokenizer = OwnTokenizer("m", str(save(Path(folder) / "m", made, CHATML)), "path")
            seen = uvloop.run(measure(tokenizer, text))
    finally:
        sys.setswitchinterval(before)
    first, following, late = seen["first"], seen["next"], seen["late"]
    return [
        figure(
            "gateway_tokens_first",
            value=share(first, 0.5),
            unit="ms",
            ratio=sum(first) / sum(seen["bare"]),
            ratio_to="a bare call of `tokenizers`",
            target="reported",
            ok=True,
            p99=share(first, 0.99),
            bare_p50=share(seen["bare"], 0.5),
            bare_p99=share(seen["bare"], 0.99),
            tokens_p50=share(seen["tokens"], 0.5),
        ),
        figure(
            "gateway_tokens_next",
            value=share(following, 0.99),
            unit="ms",
            ratio=share(following, 0.5) / share(seen["sketch"], 0.5),
            ratio_to="the sketch",
            target=f"≤ {TARGET_MS:.0f} ms",
            ok=share(following, 0.99) <= TARGET_MS,
            p50=share(following, 0.5),
            cpu_p50=share(seen["next_cpu"], 0.5),
            cpu_p99=share(seen["next_cpu"], 0.99),
            turns=len(following),
        ),
        figure(
            "gateway_tokens_stall",
            value=share(late, 0.99),
            unit="ms",
            ratio=share(late, 0.99) / max(0.01, share(seen["idle_late"], 0.99)),
            ratio_to="an idle loop",
            target=f"≤ {STALL_MS:.0f} ms",
            ok=share(late, 0.99) <= STALL_MS,
            p50=share(late, 0.5),
            most=max(late),
            idle_p99=share(seen["idle_late"], 0.99),
            idle_most=max(seen["idle_late"]),
        ),
    ]
