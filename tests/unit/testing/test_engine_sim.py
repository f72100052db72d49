"""The simulated engine's scheduler, by small cases that can be computed by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_US, EngineModel
from kvstrata.testing.engine_sim.kv_events import BlockStored
from kvstrata.testing.engine_sim.requests import End, SimRequest, root_key

FOREVER = 1 << 100
PLAIN = {
    "block_tokens": 4,
    "kv_blocks": 100,
    "max_model_tokens": 200,
    "max_num_batched_tokens": 32,
    "step_us": 100,
    "prefill_token_us": 10,
    "prefill_pair_us": 0,
    "decode_sequence_us": 1,
    "decode_context_token_us": 0,
}


def make(**changes: Any) -> SimEngine:
    """An engine whose step takes 100 µs, 10 µs more for a prompt token and 1 µs for a sequence that decodes."""
    return SimEngine(msgspec.convert(PLAIN | changes, EngineModel))


def ask(name: str, prompt: int, answer: int, *, first: int = 0, **more: Any) -> SimRequest:
    """A request whose tokens count up from `first`."""
    tokens = range(first, first + prompt + answer)
    return SimRequest(name, tokens[:prompt], answer=tokens[prompt:], **more)


def times_us(request: SimRequest) -> list[float]:
    """When each token came."""
    return [at / PS_PER_US for at in request.token_times_ps]


def submit(engine: SimEngine, request: SimRequest, at_us: int) -> SimRequest:
    """Submit a request at a time in microseconds."""
    engine.submit(request, at_us * PS_PER_US)
    return request


def test_a_step_takes_what_the_model_says() -> None:
    engine = make(prefill_pair_us=1, decode_context_token_us=0.5)
    request = submit(engine, ask("a", 4, 3), 1000)
    engine.advance(FOREVER)
    first = 1000 + 100 + 4 * 10 + (1 + 2 + 3 + 4)
    second = first + 100 + 1 + 5 * 0.5
    assert times_us(request) == [first, second, second + 100 + 1 + 6 * 0.5]
    assert (request.end, request.scheduled_ps) == (End.LENGTH, 1000 * PS_PER_US)


def test_a_long_prompt_is_computed_in_chunks_and_delays_who_decodes() -> None:
    engine = make()
    decoding = submit(engine, ask("a", 4, 6), 0)
    long = submit(engine, ask("b", 70, 1, first=500), 150)
    engine.advance(FOREVER)
    # Each step has 32 tokens, one of which the decoding request takes: 31, 31, and the last 8.
    assert times_us(decoding) == [140, 241, 652, 1063, 1244, 1345]
    assert times_us(long) == [1244]


@pytest.mark.parametrize(("adapter", "salt"), [("x", None), (None, "x")])
def test_another_adapter_or_salt_shares_nothing(adapter: str | None, salt: str | None) -> None:
    engine = make()
    submit(engine, ask("a", 12, 1), 0)
    other = ask("b", 12, 1, root=root_key(adapter, salt), adapter=adapter, salt=salt)
    submit(engine, other, 1000)
    engine.advance(FOREVER)
    assert other.cached_tokens == 0
    (stored,) = [e for _, events in engine.take_events()[1:] for e in events if isinstance(e, BlockStored)]
    assert stored.extra_keys == [("x",)] * 3 if adapter else [("x",), None, None]
    assert stored.lora_name == adapter


def test_an_abort_ends_with_the_step_in_flight_and_frees_the_blocks() -> None:
    engine = make()
    gone, waits = submit(engine, ask("a", 40, 5), 0), submit(engine, ask("b", 4, 1, first=99), 1)
    engine.advance(10 * PS_PER_US)
    assert engine.abort("a", 20 * PS_PER_US)
    assert not engine.abort("a", 21 * PS_PER_US)
    engine.advance(FOREVER)
    assert (gone.end, gone.ended_ps, gone.produced) == (End.ABORT, 420 * PS_PER_US, 0)
    assert times_us(waits) == [420 + 140]
    assert engine.used_share == 0
    assert not engine.abort("b", FOREVER)
