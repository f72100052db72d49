"""The simulated engine in real time gives the times of virtual time, and its bodies ask for what they say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstrata.testing.engine_sim.app import parse
from kvstrata.testing.engine_sim.bodies import (
    ChatBody,
    CompletionBody,
    MessagesBody,
    ResponsesBody,
    ask_of,
    encode_chat,
    plan,
)
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.kv_events import Event
from kvstrata.testing.engine_sim.live import LiveEngine
from kvstrata.testing.engine_sim.requests import End, SimRequest

SERVED = ("m", "adapter")
LEAVER = 7


def request(number: int) -> SimRequest:
    """Requests of which each third shares a prompt of 40 tokens; LEAVER's is too long to end before its client goes."""
    prompt = [number % 3] * 40 + [number]
    return SimRequest(str(number), prompt, answer=[number] * (100_000 if number == LEAVER else 5 + number))


async def test_real_time_gives_the_times_of_virtual_time() -> None:
    model = EngineModel(max_num_seqs=4, step_us=2000)
    told: list[Event] = []
    ended: list[SimRequest] = []
    live = LiveEngine(SimEngine(model), speed=20, tell=told.extend, count=ended.append)

    async def one(number: int) -> SimRequest:
        for _ in range(number):
            await asyncio.sleep(0)
        each = request(number)
        changed = live.submit([each])
        while each.end is None:
            await changed.wait()
            changed.clear()
            if number == LEAVER and each.produced > 3:
                live.abort([each])
        return each

    served = await asyncio.gather(*(one(number) for number in range(16)))
    live.close()
    assert sorted(ended, key=lambda each: int(each.name)) == served
    aborted = served[LEAVER]
    assert aborted.end is End.ABORT

    virtual = SimEngine(model)
    again = {each.name: request(int(each.name)) for each in served}
    # The abort came while the step ran at whose end the request ended, so any time within it gives the same.
    calls = [(each.arrived_ps, int(each.name), "submit") for each in served]
    calls.append((aborted.ended_ps - 1, LEAVER, "abort"))
    for at_ps, number, kind in sorted(calls):
        if kind == "submit":
            virtual.submit(again[str(number)], at_ps)
        else:
            virtual.abort(str(LEAVER), at_ps)
    virtual.advance(1 << 100)
    for each in served:
        twin = again[each.name]
        assert each.token_times_ps == twin.token_times_ps
        assert (each.end, each.ended_ps, each.cached_tokens) == (twin.end, twin.ended_ps, twin.cached_tokens)
    assert told == [event for _, events in virtual.take_events() for event in events]


def test_the_answer_of_a_chat_goes_on_as_the_prompt_of_the_next_turn() -> None:
    first = parse(b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}', ChatBody)
    (choice,) = plan(ask_of(first, SERVED), EngineModel(), ["0"])
    answer = choice.text(0, 40)
    second = encode_chat([*first.messages, _said("assistant", answer), _said("user", "more")], None)
    assert list(second[: choice.request.prompt_tokens + 40]) == list(choice.request.tokens)


def _said(role: str, text: str) -> Any:
    return parse(b'{"role": "%s", "content": "%s"}' % (role.encode(), text.encode()), _message())


def _message() -> Any:
    from kvstrata.testing.engine_sim.bodies import Message

    return Message


def planned(raw: bytes, kind: Any = CompletionBody, **model: Any) -> list[tuple[int, int, End, str | None]]:
    """Tokens of the prompt and of the answer, the reason of the end, and what stopped it, for each prompt."""
    ask = ask_of(parse(raw, kind), SERVED)
    names = [str(number) for number in range(len(ask.prompts))]
    choices = plan(ask, EngineModel(**model), names)
    return [
        (each.request.prompt_tokens, each.request.answer_tokens, each.request.planned_end, each.stopped_by)
        for each in choices
    ]


@pytest.mark.parametrize(
    ("raw", "kind", "wanted"),
    [
        (b'{"prompt": "abc"}', CompletionBody, [(3, 16, End.LENGTH, None)]),
        (b'{"prompt": ["abc", [1, 2]], "max_tokens": 4}', CompletionBody,
         [(3, 4, End.LENGTH, None), (2, 4, End.LENGTH, None)]),
        (b'{"prompt": [1, 2], "max_tokens": 99}', CompletionBody, [(2, 50, End.STOP, None)]),
        (b'{"prompt": [1, 2], "max_tokens": 99, "ignore_eos": true}', CompletionBody, [(2, 99, End.LENGTH, None)]),
        (b'{"prompt": [1, 2], "max_tokens": 99, "min_tokens": 60}', CompletionBody, [(2, 60, End.STOP, None)]),
        (b'{"prompt": [1, 2], "max_tokens": null, "ignore_eos": true}', CompletionBody,
         [(2, 998, End.LENGTH, None)]),
        (b'{"messages": [{"role": "u", "content": [{"type": "text", "text": "x"}]}]}', ChatBody,
         [(29, 50, End.STOP, None)]),
        (b'{"messages": [{"role": "u", "content": "x"}], "kv_transfer_params": {"prompt_token_ids": [1, 2]}}',
         ChatBody, [(2, 50, End.STOP, None)]),
        (b'{"input": "x", "max_output_tokens": 3}', ResponsesBody, [(32, 3, End.LENGTH, None)]),
        (b'{"system": "s", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}', MessagesBody,
         [(52, 3, End.LENGTH, None)]),
    ],
)  # fmt: skip
def test_bodies_ask_for_what_they_say(raw: bytes, kind: Any, wanted: list[Any]) -> None:
    assert planned(raw, kind, max_model_tokens=1000, answer_tokens=50) == wanted
