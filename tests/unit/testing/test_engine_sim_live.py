"""The simulated engine in real time gives the times of virtual time, and its bodies ask for what they say."""

from __future__ import annotations

import asyncio

from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.kv_events import Event
from kvstrata.testing.engine_sim.live import LiveEngine
from kvstrata.testing.engine_sim.requests import End, SimRequest

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
