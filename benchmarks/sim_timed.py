"""Serves a load with real vLLM at its times, and notes each step; `vllm_engine.Engine.serve` runs this."""

from __future__ import annotations

import time
from typing import Any

IDLE_S = 0.0002


class Clock:
    """Seconds since it was made, by the wall; or seconds of the processor that this process had, where waiting for
    something takes no time at all. With one thread that computes, other work on the machine hardly changes these."""

    def __init__(self, own: bool) -> None:
        self._own = own
        self._read = time.process_time if own else time.perf_counter
        self._begun_s = self._read()

    def now_s(self) -> float:
        return self._read() - self._begun_s

    def wait_until(self, at_s: float) -> None:
        """Return at a time, or shortly before."""
        left_s = at_s - self.now_s()
        if self._own:
            self._begun_s -= max(0.0, left_s)
        elif left_s > 2 * IDLE_S:
            time.sleep(left_s - IDLE_S)


def serve(engine: Any, arrivals: list[list[Any]], own_time: bool) -> dict[str, Any]:
    """Serve (seconds from the start, prompt, tokens of the answer); in process only. `own_time`: see `Clock`.

    Returns for each request the seconds at which its first and last tokens came and its cached tokens; and for each
    step the µs that it took with the admissions before it, and what it computed: prompt tokens, their pairs with tokens
    that they attend to, sequences that decode, and tokens that these attend to.
    """
    scheduler = engine.scheduler()
    schedule, planned = scheduler.schedule, []

    def noted(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        sums = [0, 0, 0, 0]
        for name, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            before = request.num_computed_tokens - tokens
            if tokens == 1 and request.num_output_tokens:
                sums[2] += 1
                sums[3] += before + 1
            else:
                sums[0] += tokens
                sums[1] += tokens * before + tokens * (tokens + 1) // 2
        planned.append(sums)
        return output

    scheduler.schedule = noted
    names: dict[str, int] = {}
    told: list[dict[str, Any]] = [{} for _ in arrivals]
    steps = []
    clock = Clock(own_time)
    free_s, at = 0.0, 0
    try:
        while at < len(arrivals) or engine.core.has_unfinished_requests():
            now = clock.now_s()
            if not engine.core.has_unfinished_requests():
                if now < arrivals[at][0]:
                    clock.wait_until(arrivals[at][0])
                    continue
                free_s = now
            while at < len(arrivals) and arrivals[at][0] <= now:
                _, prompt, answer_tokens = arrivals[at]
                names[engine.submit(prompt, max_tokens=answer_tokens)] = at
                at += 1
            planned.clear()
            outputs = engine.core.step()
            ended = clock.now_s()
            steps += [[(ended - free_s) * 1e6, *sums] for sums in planned]
            free_s = ended
            for output in outputs:
                record = told[names[output.request_id]]
                record.setdefault("first_s", ended)
                if output.finished:
                    record |= {"last_s": ended, "cached_tokens": output.num_cached_tokens}
    finally:
        scheduler.schedule = schedule
        engine.live.clear()
    return {"requests": told, "steps": steps}
