"""How fast the engine computes prompts, measured over its steps.

A step begins when it is planned, or when the step before it has ended, if that is later (vLLM plans ahead).  It ends
when a worker reports it.  A line fitted over many steps gives the time per token, weighted by its depth
(`prompt_work`), and the fixed time of a step with its decodes.  Time in vLLM's queue does not count, since a request
that loads waits there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.connectors.vllm.engine import Engine
from kvstrata.connectors.vllm.lookup_table import Tracked
from kvstrata.connectors.vllm.metadata import StepPlan, WorkerReport
from kvstrata.connectors.vllm.store_table import computed_before
from kvstrata.observability.load_line import LoadLine, prompt_work

LEAST_TOKENS = 128
"""Minimum number of prompt tokens of a measured step; smaller steps say little about the time per token."""
MAX_STEPS = 64
"""Maximum number of steps whose end is awaited, since a report may be lost."""
STEP_TOKENS = 8_192
"""Assumed number of tokens in a step of a long prompt, if the engine does not report it."""


class StepTimes:
    """Measures steps, as the module describes. Belongs to the scheduler's thread."""

    def __init__(self, engine: Engine, tracked: Mapping[str, Tracked]) -> None:
        """`tracked` are the lookup table's requests."""
        self._tracked, self._now = tracked, engine.now
        self._step_tokens = engine.step_tokens or STEP_TOKENS
        self._line = LoadLine()
        self._begun: dict[int, tuple[float, float]] = {}
        """Step → time when it was planned, and its work."""
        self._ended_s = 0.0
        """When the last step ended."""

    def planned(self, plan: StepPlan, output: Any) -> None:
        """Measure the step that vLLM's SchedulerOutput describes, if it computes enough and waits for no load."""
        scheduled = output.num_scheduled_tokens
        waits = plan.others_load or not all(load.asynchronous for load in plan.loads)
        if waits or sum(scheduled.values()) < LEAST_TOKENS + len(scheduled):
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
        """A step has ended. Returns the tokens per second that are computed at a prompt's start; 0: unknown."""
        before_s, self._ended_s = self._ended_s, self._now()
        for report in reports:
            planned_s, work = self._begun.pop(report.step, (0.0, 0.0))
            if work:
                self._line.add(work, self._ended_s - max(before_s, planned_s))
        if (fitted := self._line.fitted()) is None:
            return 0.0
        step_s, tokens_s = fitted
        return 1.0 / (1.0 / tokens_s + step_s / self._step_tokens)
