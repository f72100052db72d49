"""How fast the engine computes prompts, measured over its steps.

A step begins when it is planned, or when the step before it has ended, if that is later (vLLM plans ahead).  It ends
when a worker reports it.  A line over many steps tells what a token costs beyond the step itself and its decodes;
tokens deep in a prompt count as more (`prompt_work`).  Waiting in vLLM's queue is no part of it: a request that loads
waits there too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.connectors.vllm.lookup_table import Tracked
from kvstrata.connectors.vllm.metadata import StepPlan, WorkerReport
from kvstrata.connectors.vllm.store_table import computed_before
from kvstrata.observability.load_line import LoadLine, prompt_work

LEAST_TOKENS = 128
"""A step with fewer tokens of prompts tells little of what a token costs."""
MAX_STEPS = 64
"""Steps whose end is awaited; a report may be lost."""


class StepTimes:
    """See the module. Belongs to the scheduler's thread."""

    def __init__(self, tracked: Mapping[str, Tracked], now: Callable[[], float]) -> None:
        """`tracked` are the lookup table's requests."""
        self._tracked, self._now = tracked, now
        self._line = LoadLine()
        self._begun: dict[int, tuple[float, float]] = {}
        """Step → time when it was planned, and its work."""
        self._ended_s = 0.0
        """When the last step ended."""

    def planned(self, plan: StepPlan, output: Any) -> None:
        """Measure the step that vLLM's SchedulerOutput describes, if it computes enough and waits for no load."""
        scheduled = output.num_scheduled_tokens
        if sum(scheduled.values()) < LEAST_TOKENS + len(scheduled):
            return
        if plan.others_load or not all(load.asynchronous for load in plan.loads):
            return
        tokens, work = 0, 0.0
        for request_id, before in computed_before(output).items():
            tracked, count = self._tracked.get(request_id), scheduled.get(request_id, 0)
            end = min(before + count, tracked.request.num_prompt_tokens if tracked else 0)
            if end > before:
                tokens += end - before
                work += prompt_work(before, end)
        if tokens >= LEAST_TOKENS:
            plan.timed = True
            self._begun[plan.step] = self._now(), work
            if len(self._begun) > MAX_STEPS:
                del self._begun[next(iter(self._begun))]

    def heard(self, reports: Sequence[WorkerReport]) -> float:
        """A step has ended. Returns the tokens at a prompt's start that are computed in a second; 0: not known."""
        now_s, begun_s = self._now(), self._ended_s
        self._ended_s = now_s
        for report in reports:
            planned_s, work = self._begun.pop(report.step, (now_s, 0.0))
            if work and now_s > (begun_s := max(begun_s, planned_s)):
                self._line.add(work, now_s - begun_s)
        fitted = self._line.fitted()
        return fitted[1] if fitted else 0.0
