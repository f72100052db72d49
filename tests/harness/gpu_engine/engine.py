"""A simulator of vLLM whose blocks are in device memory: scheduler, block tables and steps, without a model or torch.

The connector's two sides are the real ones, on real clients (`connector`); `scheduler` decides which requests run.

The simulator leaves out attention, vLLM's own prefix cache and sampling: the answer of a request is known when the
request arrives.  The content of a block follows from the tokens (`gpu_kv`).  The engine's stream writes that content
layer after layer; between the layers `products` may compute a layer's matrix products.  With `checks`, the stream reads
all loaded KV at the layer that needs it, and the KV is compared; when a request gives up its blocks, their whole
content is compared, and then the blocks are poisoned.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.vllm.metadata import Load, StepPlan
from kvstrata.native.cuda import device_facts
from tests.harness.cache_engine import PATIENCE_S
from tests.harness.gpu_engine.checks import BlockChecks, Check
from tests.harness.gpu_engine.connector import Cache, NoCache, Request, StepOutcome
from tests.harness.gpu_engine.scheduler import Scheduler
from tests.harness.gpu_kv import TINY, Device, DeviceKv, Shape, block_keys


class Step(NamedTuple):
    """The work of one step, and the seconds until the device had done it."""

    prefill_tokens: int
    decodes: int
    seconds: float
    copies: bool
    """Whether loads or stores were under way when the step began or ended."""


class GpuEngine:
    """An engine with one worker. Belongs to the thread that made it."""

    def __init__(
        self,
        settings: ClientSettings | None,
        *,
        shape: Shape = TINY,
        layout: str = "LBNHC",
        block_tokens: int = 8,
        num_blocks: int = 96,
        budget_tokens: int = 64,
        max_running: int = 16,
        products: Callable[[int], None] = lambda tokens: None,
        checks: bool = True,
        write_tokens: bool = True,
        device: Device | None = None,
        **more: Any,
    ) -> None:
        """`settings` None: no cache; `more` goes to `Cache`.

        `products(tokens)` queues one layer's matrix products on `device.computes`.  Without `write_tokens` the KV of a
        block is written whole with its first token, which takes fewer copies.
        """
        chunk_tokens = settings.chunk_size if settings is not None else block_tokens
        device_facts(0)  # raises if the machine has no device
        self.device = device or Device()
        self.kv = DeviceKv(
            self.device,
            shape,
            layout=layout,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            chunk_tokens=chunk_tokens,
            rounded=settings is not None and settings.fidelity == "fp8",
        )
        self.cache = NoCache()
        if settings is not None:
            self.cache = Cache(settings, self.device, self.kv, **more)
        self.counts: collections.Counter[str] = collections.Counter()
        self.checks = BlockChecks(self.device, self.kv, self.counts, enabled=checks)
        self.scheduler = Scheduler(
            self.cache,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            budget_tokens=budget_tokens,
            max_running=max_running,
            counts=self.counts,
            before_free=self.checks.last_look,
        )
        self.chance = random.Random(0)
        self.layerwise: bool | None = True
        """Whether loads are awaited layer after layer; None: 70 % of the steps, chosen at random."""
        self.preempt_share = 0.0
        """Share of the steps that preempt a running request although blocks are free."""
        self.wait_share = 1.0
        """Share of the steps that wait for the device; after the others, the next begins while the device computes."""
        self.steps: list[Step] = []
        self._products = products
        self._write_tokens = write_tokens
        self._number = 0

    def submit(self, tokens: Sequence[int], output_tokens: int, arrived_s: float | None = None) -> Request:
        """Queue a prompt that will be answered with `output_tokens` tokens."""
        self._number += 1
        answer = [1_000_000_000 + (at * 7919 + len(tokens)) % 32_000 for at in range(output_tokens)]
        whole = [*tokens, *answer]
        assert len(whole) <= (self.kv.num_blocks - 1) * self.kv.block_tokens, "the request never fits"
        request = Request(
            f"request-{self._number}",
            whole,
            len(tokens),
            block_keys(whole, self.kv.block_tokens),
            time.perf_counter() if arrived_s is None else arrived_s,
        )
        self.scheduler.add(request)
        self.counts["requests"] += 1
        return request

    def abort(self, request: Request) -> None:
        self.counts["aborted"] += 1
        self.scheduler.abort(request)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits and the blocks of all ended requests are free."""
        return not self.scheduler.requests

    def step(self) -> int:
        """Run one step of the engine; return how many tokens it computed."""
        if self.device.is_full:
            self.checks.compare()
        scheduled = self.scheduler.schedule(self._victim())
        plan = self.cache.plan(self._output(scheduled))
        self._check_stores(plan, scheduled)
        n_tokens = sum(scheduled.values())
        copies = self.cache.busy
        begun_s = time.perf_counter()
        self.cache.begin_step(plan)
        for preempted in self.scheduler.preempted:
            self.checks.last_look(*preempted)
        layerwise = self.chance.random() < 0.7 if self.layerwise is None else self.layerwise
        self.cache.begin_loads(layerwise=layerwise and bool(scheduled))
        loaded = self._forward(plan.loads, scheduled)
        outcome = self.cache.end_step()
        waits = self.chance.random() < self.wait_share
        if waits:
            self.device.synchronize(self.device.computes)
        seconds = time.perf_counter() - begun_s
        decodes = sum(
            tokens == 1 and one.num_computed_tokens >= one.num_prompt_tokens
            for one, tokens in scheduled.items()
        )
        if scheduled:
            self.steps.append(Step(n_tokens - decodes, decodes, seconds, copies or self.cache.busy))
        self.counts["steps"] += 1
        self._update(scheduled, outcome, loaded)
        if waits:
            self.checks.compare()
        return n_tokens

    def _victim(self) -> int | None:
        """Choose the index of the running request that this step preempts; None: it preempts none."""
        running = self.scheduler.running
        if running and self.chance.random() < self.preempt_share:
            return self.chance.randrange(len(running))
        return None

    def _output(self, scheduled: dict[Request, int]) -> Any:
        """Return the parts of vLLM's `SchedulerOutput` that the connector reads."""
        return SimpleNamespace(
            num_scheduled_tokens={one.request_id: tokens for one, tokens in scheduled.items()},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one in scheduled],
                num_computed_tokens=[one.num_computed_tokens for one in scheduled],
            ),
            preempted_req_ids={preempted.request.request_id for preempted in self.scheduler.preempted},
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (self.scheduler.requests[name].blocks,)
            ),
        )

    def _check_stores(self, plan: StepPlan, scheduled: dict[Request, int]) -> None:
        """Assert that the plan stores only blocks that are complete after this step."""
        for store in plan.stores:
            request = self.scheduler.requests.get(store.request_id)
            assert request is not None, "a request is stored whose blocks are free"
            computed = request.num_computed_tokens + scheduled.get(request, 0)
            last = request.blocks.index(store.blocks[-1])
            assert (last + 1) * self.kv.block_tokens <= computed, "a block is stored before it is computed"

    def _forward(self, loads: Iterable[Load], scheduled: dict[Request, int]) -> list[Check]:
        """Queue the forward pass on the device: layer after layer, read the loaded KV, compute, and write.

        Return the checks of the loads that the pass needs.
        """
        checks: list[Check] = []
        requests = self.scheduler.requests
        awaited = [(requests[load.request_id], load.blocks) for load in loads if not load.asynchronous]
        n_tokens = sum(scheduled.values())
        for layer in range(self.kv.shape.layers):
            if not scheduled:
                break
            self.cache.layer(f"layers.{layer}")
            for request, blocks in awaited:
                checks += self.checks.read(request, blocks, request.external_tokens, [layer])
            self._products(n_tokens)
            for request, tokens in scheduled.items():
                self._write(request, layer, request.num_computed_tokens, tokens)
        return checks

    def _write(self, request: Request, layer: int, start: int, tokens: int) -> None:
        block_tokens = self.kv.block_tokens
        end = start + tokens
        for at in range(start // block_tokens, -(-end // block_tokens)):
            first, last = max(0, start - at * block_tokens), min(block_tokens, end - at * block_tokens)
            if not self._write_tokens:
                if first:
                    continue
                last = block_tokens
            self.kv.write(request.keys[at], layer, request.blocks[at], first, last)

    def _update(self, scheduled: dict[Request, int], outcome: StepOutcome, loaded: list[Check]) -> None:
        """Apply the outcome of a step in the order of vLLM's scheduler."""
        for request, tokens in scheduled.items():
            request.num_computed_tokens += tokens
        failed = self.scheduler.roll_back(outcome.bad_blocks)
        for request in failed:
            if request.receiving:
                lost = outcome.bad_blocks.intersection(request.blocks)
                self.counts["bad blocks"] += len(lost) * self.kv.shape.layers
        right = [check for check in loaded if check.block not in outcome.bad_blocks]
        self.counts["bad blocks"] += len(loaded) - len(right)
        self.counts["loaded blocks"] += len(right)
        self.checks.expect(right)
        now_s = time.perf_counter()
        for request in scheduled:
            if request in failed or request.num_computed_tokens < request.num_tokens:
                continue
            request.answered += 1
            if request.first_token_s is None:
                request.first_token_s = now_s
            if request.num_tokens == len(request.tokens):
                self.scheduler.finish(request)
        self.cache.heard(outcome)
        if outcome.report is not None:
            self.counts["stored"] += sum(mask.bit_count() for _, mask in outcome.report.stored)
            self.counts["broken"] = int(outcome.report.broken)
        for name in outcome.received:
            self._received(self.scheduler.requests[name])
        for name in outcome.sent:
            self.scheduler.give_back(self.scheduler.requests[name])

    def _received(self, request: Request) -> None:
        """After an asynchronous load: compare the loaded KV, or free the blocks if the request has ended."""
        if request.ended:
            self.scheduler.give_back(request)
            return
        self.scheduler.received.add(request.request_id)
        self.counts["received"] += 1
        # If a part failed to load, fewer tokens count as computed than were to be loaded.
        checks = self.checks.read(request, request.blocks, request.num_computed_tokens)
        self.counts["loaded blocks"] += len(checks)
        self.checks.expect(checks)

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Step until `holds()`. Raises RuntimeError when no step computes anything for `PATIENCE_S`."""
        moved_s = time.monotonic()
        while not holds():
            if self.step():
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > PATIENCE_S:
                raise RuntimeError(f"the engine stands still: {self.scheduler.requests}")
            else:
                time.sleep(0.0005)

    def settle(self) -> None:
        """Step until every request and every copy has ended; assert that all KV was right and no block was lost."""
        self.run_until(lambda: self.idle and not self.cache.busy)
        self.checks.compare()
        assert sorted(self.scheduler.free) == list(range(1, self.kv.num_blocks)), "blocks were lost"

    def close(self) -> None:
        self.cache.close()
        self.device.finish()
        self.kv.close()
