"""A simulator of vLLM whose blocks are in device memory: scheduler, block tables and steps, without a model or torch.

The connector is `Cache`: the real sides on real clients.  Its methods are in the order in which vLLM 0.32 calls them:
see its `v1/core/sched/scheduler.py` and `v1/worker/kv_connector_model_runner_mixin.py`.

The simulator leaves out attention, vLLM's own prefix cache and sampling: the answer of a request is known when the
request arrives.  The content of a block follows from the tokens (`gpu_kv`).  The engine's stream writes that content
layer after layer.  It reads all loaded KV at the layer that needs it, and the KV is compared; when a request gives up
its blocks, their whole content is compared, and then the blocks are poisoned.

Invariants
1. A block belongs to one request or is free.
2. The blocks of an ended request are kept while the cache reads or writes them.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from kvstrata.client import CacheClient
from kvstrata.client.pinning import Pinner
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.device import DeviceMover, open_engine
from kvstrata.connectors.vllm.engine import Engine
from kvstrata.connectors.vllm.identity import fidelity_of
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Load, StepPlan, WorkerReport
from kvstrata.connectors.vllm.scheduler import SchedulerSide
from kvstrata.connectors.vllm.weights import WeightsVersion
from kvstrata.connectors.vllm.worker import GroupSide, WorkerSide
from kvstrata.native.cuda import device_facts
from kvstrata.types import LayoutIdentity, RequestIdentity, Role
from tests.harness.cache_engine import PATIENCE_S, eventually
from tests.harness.gpu_kv import POISON, TINY, Device, DeviceKv, Later, PagedKv, block_keys


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One request, with the attribute names of vLLM's requests, by which the connector reads it."""

    request_id: str
    tokens: list[int]
    """The prompt followed by the whole answer."""
    num_prompt_tokens: int
    keys: list[int]
    """One key for each block, see `gpu_kv.block_keys`."""
    answered: int = 0
    """Tokens of the answer that have been sampled."""
    num_computed_tokens: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    external_tokens: int = 0
    """Tokens that the present attempt loads from the cache; a preemption sets them to 0."""
    cached_tokens: int = 0
    """Tokens of the prompt that came from the cache before the first token was sampled."""
    receiving: bool = False
    """An asynchronous load is under way."""
    ended: bool = False

    prompt_embeds: ClassVar[None] = None
    resumable: ClassVar[bool] = False
    lora_request: ClassVar[None] = None
    cache_salt: ClassVar[None] = None
    skip_reading_prefix_cache: ClassVar[bool] = False
    mm_features: ClassVar[tuple[()]] = ()
    kv_transfer_params: ClassVar[None] = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.num_prompt_tokens + self.answered

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens[: self.num_tokens]


class StepOutcome(NamedTuple):
    """The reports of the worker side after a step."""

    sent: set[str]
    received: set[str]
    bad_blocks: set[int]
    report: WorkerReport | None


def client_of(settings: ClientSettings, kv: PagedKv, role: Role, group: bytes, **more: Any) -> CacheClient:
    """Make a client of the engine that owns these blocks."""
    worker = role is not Role.SCHEDULER
    return CacheClient(
        settings,
        role=role,
        layout=LayoutIdentity(
            model="simulated",
            kv_dtype="bfloat16",
            fidelity=fidelity_of(settings),
            chunk_tokens=settings.chunk_size,
        ),
        group=group,
        engine_slices=1,
        slice=kv.view.slice if worker else None,
        facts=kv.view.facts if worker else None,
        **more,
    )


class Cache:
    """The connector's two sides, put together as in `connectors/vllm/build.py`."""

    def __init__(self, settings: ClientSettings, device: Device, kv: DeviceKv, sync_load_bytes: int) -> None:
        group = secrets.token_bytes(16)
        self.engine, plan = open_engine(settings, kv.view, "GPU 0", 0)
        pages = Pinner(self.engine, 0)
        self.client = client_of(
            settings, kv, Role.WORKER, group, engine=self.engine, pages=pages, registers_memory=True
        )
        mover = DeviceMover(
            self.client,
            self.engine,
            plan,
            pages=pages,
            sections=kv.sections,
            current_stream=lambda: device.computes,
        )
        self.worker = WorkerSide(
            [
                GroupSide(
                    self.client,
                    mover,
                    slice_digest=kv.view.slice.digest(),
                    record_blocks=kv.view.group.record_blocks,
                )
            ],
        )
        self.scheduler_client = client_of(settings, kv, Role.SCHEDULER, group)
        weights = WeightsVersion(1)
        weights.known, weights.can_tell = True, False  # no model runs whose weights could be sampled
        self.scheduler = SchedulerSide(
            Engine(
                self.scheduler_client,
                settings,
                [kv.view.group],
                kv.view.payload_bytes,
                1,
                weights,
                sync_load_bytes=sync_load_bytes,
            )
        )
        self.client.start()
        self.scheduler_client.start()
        self.identity = self.scheduler_client.identity(RequestIdentity(tenant=settings.tenant))

    def connect(self) -> None:
        """Wait until both clients are attached and the identity is ready."""
        for client in (self.client, self.scheduler_client):
            eventually("the client connects", lambda client=client: client.connected)
        eventually("the identity is ready", lambda: self.identity.ready)

    def arrived(self, request: Request) -> None:
        """Called when a request arrives (vLLM's `add_request`)."""
        self.scheduler.on_new_request(request)

    def matched(self, request: Request) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded (None: ask again) and whether the load is asynchronous."""
        return self.scheduler.matched_tokens(request, 0)

    def allocated(self, request: Request) -> None:
        """Called when the request has its blocks and `external_tokens` of its tokens are to be loaded."""
        self.scheduler.allocated(request, [request.blocks], request.external_tokens)

    def plan(self, output: Any) -> StepPlan:
        return self.scheduler.plan_step(output)

    def begin_step(self, plan: StepPlan) -> None:
        """Release the blocks of preempted requests, before anything of the step runs."""
        self.worker.before_step(plan)

    def begin_loads(self, *, layerwise: bool) -> None:
        """Begin the step's loads, before the forward pass."""
        self.worker.start_loads(layerwise=layerwise)

    def layer(self, name: str) -> None:
        """Make the layer's computation wait for its loads."""
        self.worker.wait_layer(name)

    def end_step(self) -> StepOutcome:
        """Begin the step's stores, after the forward pass was handed to the device."""
        self.worker.start_stores()
        sent, received = self.worker.finished()
        return StepOutcome(sent, received, self.worker.take_bad_blocks(), self.worker.report())

    def heard(self, outcome: StepOutcome) -> None:
        """Pass the worker side's reports to the scheduler side."""
        reports = [outcome.report] if outcome.report is not None else []
        self.scheduler.heard(reports, outcome.received, outcome.bad_blocks)

    def finished(self, request: Request) -> bool:
        """Return whether the blocks of a request that has ended must be kept."""
        return self.scheduler.finished(request, [request.blocks])

    @property
    def busy(self) -> bool:
        return bool(self.worker._stores or self.worker._loads)

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


class Check(NamedTuple):
    """A part of a block that the stream will read, and the bytes that it must hold."""

    what: str
    block: int
    parts: list[Later]
    wanted: bytes


class BlockChecks:
    """Reads blocks on the engine's stream, compares the bytes after the reads, and poisons free blocks."""

    def __init__(self, device: Device, kv: DeviceKv, counts: collections.Counter[str]) -> None:
        self._device = device
        self._kv = kv
        self._counts = counts
        self._pending: list[Check] = []
        kv.poison(range(kv.num_blocks))

    def read(
        self, request: Request, blocks: Sequence[int], end: int, layers: Iterable[int] | None = None
    ) -> list[Check]:
        """Queue reads of the first `end` tokens of a request, in these layers (None: in all)."""
        checks: list[Check] = []
        block_tokens = self._kv.block_tokens
        for layer in range(self._kv.shape.layers) if layers is None else layers:
            for at in range(-(-end // block_tokens)):
                if blocks[at] == SKIP_BLOCK:
                    continue
                last = min(block_tokens, end - at * block_tokens)
                checks.append(
                    Check(
                        f"{request.request_id}: layer {layer}, block {at} of the request",
                        blocks[at],
                        self._kv.read(layer, blocks[at], 0, last),
                        self._kv.expected(request.keys[at], layer, 0, last),
                    )
                )
        return checks

    def expect(self, checks: Iterable[Check]) -> None:
        """Compare these parts at the next `compare`."""
        self._pending += checks

    def last_look(self, request: Request, blocks: Sequence[int], computed_tokens: int) -> None:
        """Read the computed tokens of blocks that their request gives up, then poison the blocks."""
        self.expect(self.read(request, blocks, computed_tokens))
        self._kv.poison(blocks)

    def compare(self) -> None:
        """Wait for the device and compare everything that was read."""
        self._device.finish()
        for check in self._pending:
            found = b"".join(part.raw for part in check.parts)
            what = "poison" if bytes([POISON]) * 16 in found else "wrong"
            assert found == check.wanted, f"{check.what} is {what}"
        self._counts["compared blocks"] += len(self._pending)
        self._pending.clear()


class Preempted(NamedTuple):
    """A request that lost its blocks in this step, with the blocks and computed tokens that it had."""

    request: Request
    blocks: list[int]
    computed_tokens: int


BUDGET_TOKENS = 64
"""Tokens that a step computes at most."""
MAX_RUNNING = 16
NUM_BLOCKS = 96


class GpuEngine:
    """An engine with one worker. Belongs to the thread that made it."""

    def __init__(
        self, settings: ClientSettings, *, layout: str, block_tokens: int, sync_load_bytes: int
    ) -> None:
        device_facts(0)  # raises if the machine has no device
        self.device = Device()
        self.kv = DeviceKv(
            self.device,
            TINY,
            layout=layout,
            block_tokens=block_tokens,
            num_blocks=NUM_BLOCKS,
            chunk_tokens=settings.chunk_size,
            rounded=settings.fidelity == "fp8",
        )
        self.cache = Cache(settings, self.device, self.kv, sync_load_bytes)
        self.counts: collections.Counter[str] = collections.Counter()
        self.checks = BlockChecks(self.device, self.kv, self.counts)
        self.free = list(range(1, NUM_BLOCKS))  # block 0 is vLLM's null block
        self.running: list[Request] = []
        self.skipped: list[Request] = []
        """Requests that wait for their lookup or their load; they come before `waiting`."""
        self.waiting: collections.deque[Request] = collections.deque()
        self.requests: dict[str, Request] = {}
        """Requests that have blocks or may still get some, by id."""
        self.received: set[str] = set()
        """Requests whose asynchronous load has ended and that have not run since."""
        self.preempted: list[Preempted] = []
        """Preemptions of the last step."""
        self.chance = random.Random(0)
        self.layerwise: bool | None = True
        """Whether loads are awaited layer after layer; None: 70 % of the steps, chosen at random."""
        self.preempt_share = 0.0
        """Share of the steps that preempt a running request although blocks are free."""
        self.wait_share = 1.0
        """Share of the steps that wait for the device; after the others, the next begins while the device computes."""
        self._number = 0

    def submit(self, tokens: Sequence[int], output_tokens: int) -> Request:
        """Queue a prompt that will be answered with `output_tokens` tokens."""
        self._number += 1
        answer = [1_000_000_000 + (at * 7919 + len(tokens)) % 32_000 for at in range(output_tokens)]
        whole = [*tokens, *answer]
        assert len(whole) <= (self.kv.num_blocks - 1) * self.kv.block_tokens, "the request never fits"
        keys = block_keys(whole, self.kv.block_tokens)
        request = Request(f"request-{self._number}", whole, len(tokens), keys)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.cache.arrived(request)
        self.counts["requests"] += 1
        return request

    def abort(self, request: Request) -> None:
        self.counts["aborted"] += 1
        for queue in (self.running, self.skipped, self.waiting):
            if request in queue:
                queue.remove(request)
        self._end(request)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits and the blocks of all ended requests are free."""
        return not self.requests

    def step(self) -> int:
        """Run one step of the engine; return how many tokens it computed."""
        if self.device.is_full:
            self.checks.compare()
        scheduled = self._schedule()
        plan = self.cache.plan(self._output(scheduled))
        self._check_stores(plan, scheduled)
        self.cache.begin_step(plan)
        for preempted in self.preempted:
            self.checks.last_look(*preempted)
        layerwise = self.chance.random() < 0.7 if self.layerwise is None else self.layerwise
        self.cache.begin_loads(layerwise=layerwise and bool(scheduled))
        loaded = self._forward(plan.loads, scheduled)
        outcome = self.cache.end_step()
        waits = self.chance.random() < self.wait_share
        if waits:
            self.device.synchronize(self.device.computes)
        self.counts["steps"] += 1
        self._update(scheduled, outcome, loaded)
        if waits:
            self.checks.compare()
        return sum(scheduled.values())

    def _output(self, scheduled: dict[Request, int]) -> Any:
        """Return the parts of vLLM's `SchedulerOutput` that the connector reads."""
        return SimpleNamespace(
            num_scheduled_tokens={one.request_id: tokens for one, tokens in scheduled.items()},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one in scheduled],
                num_computed_tokens=[one.num_computed_tokens for one in scheduled],
            ),
            preempted_req_ids={preempted.request.request_id for preempted in self.preempted},
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (self.requests[name].blocks,)
            ),
        )

    def _check_stores(self, plan: StepPlan, scheduled: dict[Request, int]) -> None:
        """Assert that the plan stores only blocks that are complete after this step."""
        for store in plan.stores:
            request = self.requests.get(store.request_id)
            assert request is not None, "a request is stored whose blocks are free"
            computed = request.num_computed_tokens + scheduled.get(request, 0)
            last = request.blocks.index(store.blocks[-1])
            assert (last + 1) * self.kv.block_tokens <= computed, "a block is stored before it is computed"

    def _forward(self, loads: Iterable[Load], scheduled: dict[Request, int]) -> list[Check]:
        """Queue the forward pass on the device: layer after layer, read the loaded KV, compute, and write.

        Return the checks of the loads that the pass needs.
        """
        checks: list[Check] = []
        requests = self.requests
        awaited = [(requests[load.request_id], load.blocks) for load in loads if not load.asynchronous]
        for layer in range(self.kv.shape.layers):
            if not scheduled:
                break
            self.cache.layer(f"layers.{layer}")
            for request, blocks in awaited:
                checks += self.checks.read(request, blocks, request.external_tokens, [layer])
            for request, tokens in scheduled.items():
                self._write(request, layer, request.num_computed_tokens, tokens)
        return checks

    def _write(self, request: Request, layer: int, start: int, tokens: int) -> None:
        block_tokens = self.kv.block_tokens
        end = start + tokens
        for at in range(start // block_tokens, -(-end // block_tokens)):
            first, last = max(0, start - at * block_tokens), min(block_tokens, end - at * block_tokens)
            self.kv.write(request.keys[at], layer, request.blocks[at], first, last)

    def _update(self, scheduled: dict[Request, int], outcome: StepOutcome, loaded: list[Check]) -> None:
        """Apply the outcome of a step in the order of vLLM's scheduler."""
        for request, tokens in scheduled.items():
            request.num_computed_tokens += tokens
        failed = self._roll_back(outcome.bad_blocks)
        for request in failed:
            if request.receiving:
                lost = outcome.bad_blocks.intersection(request.blocks)
                self.counts["bad blocks"] += len(lost) * self.kv.shape.layers
        right = [check for check in loaded if check.block not in outcome.bad_blocks]
        self.counts["bad blocks"] += len(loaded) - len(right)
        self.counts["loaded blocks"] += len(right)
        self.checks.expect(right)
        for request in scheduled:
            if request in failed or request.num_computed_tokens < request.num_tokens:
                continue
            request.answered += 1
            if request.num_tokens == len(request.tokens):
                self._finish(request)
        self.cache.heard(outcome)
        if outcome.report is not None:
            self.counts["stored"] += sum(mask.bit_count() for _, mask in outcome.report.stored)
            self.counts["broken"] = int(outcome.report.broken)
        for name in outcome.received:
            self._received(self.requests[name])
        for name in outcome.sent:
            self._give_back(self.requests[name])

    def _received(self, request: Request) -> None:
        """After an asynchronous load: compare the loaded KV, or free the blocks if the request has ended."""
        if request.ended:
            self._give_back(request)
            return
        self.received.add(request.request_id)
        self.counts["received"] += 1
        # If a part failed to load, fewer tokens count as computed than were to be loaded.
        checks = self.checks.read(request, request.blocks, request.num_computed_tokens)
        self.counts["loaded blocks"] += len(checks)
        self.checks.expect(checks)

    # -- scheduling ------------------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self._end(request)

    def _end(self, request: Request) -> None:
        request.ended = True
        received = request.request_id in self.received
        self.received.discard(request.request_id)
        keep = self.cache.finished(request)
        if not keep and (not request.receiving or received):
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """Free the blocks of an ended request, which the cache needs no longer."""
        del self.requests[request.request_id]
        computed_tokens = 0 if request.receiving else request.num_computed_tokens
        self.checks.last_look(request, request.blocks, computed_tokens)
        assert not set(self.free) & set(request.blocks), "blocks were given back twice"
        self.free += request.blocks

    def _schedule(self) -> dict[Request, int]:
        """Choose the tokens of each request for a step and give the requests their blocks.

        As in vLLM's `v1/core/sched/scheduler.py`, running requests come first, one token each or the next piece of
        their prompt; the rest of a step's budget goes to waiting requests, in their order.  When blocks run out, the
        newest running request is preempted and computed again later.
        """
        self.preempted = []
        budget = BUDGET_TOKENS
        scheduled: dict[Request, int] = {}
        at = 0
        if self.running and self.chance.random() < self.preempt_share:
            self._preempt(self.running.pop(self.chance.randrange(len(self.running))))
        while at < len(self.running) and budget:
            request = self.running[at]
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._allocate(request, request.num_computed_tokens + tokens):
                newest = self.running.pop()
                self._preempt(newest)
                if newest is request:
                    break
            else:
                scheduled[request] = tokens
                budget -= tokens
                at += 1
        if not self.preempted:
            self._admit(scheduled, budget)
        return scheduled

    def _allocate(self, request: Request, tokens: int) -> bool:
        """Give a request blocks for its first `tokens` tokens. False, and nothing has changed, if too few are free."""
        missing = -(-tokens // self.kv.block_tokens) - len(request.blocks)
        if missing > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(missing)]
        return True

    def _preempt(self, request: Request) -> None:
        self.counts["preempted"] += 1
        self.preempted.append(Preempted(request, request.blocks, request.num_computed_tokens))
        self.free += request.blocks
        request.blocks = []
        request.num_computed_tokens = request.external_tokens = 0
        self.waiting.appendleft(request)

    def _admit(self, scheduled: dict[Request, int], budget: int) -> None:
        """Begin waiting requests, in their order, until the budget or the blocks run out."""
        queue = collections.deque([*self.skipped, *self.waiting])
        skipped: list[Request] = []
        while queue and budget and len(self.running) < MAX_RUNNING:
            request = queue[0]
            name = request.request_id
            if request.receiving:
                if name not in self.received:
                    skipped.append(queue.popleft())
                    continue
                self.received.remove(name)
                request.receiving = False
                # The last token is computed even when its KV was loaded: sampling needs its output.
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            external, is_async = 0, False
            if not request.num_computed_tokens:
                found, is_async = self.cache.matched(request)
                if found is None:
                    skipped.append(queue.popleft())
                    continue
                external = found
            computed = request.num_computed_tokens + external
            tokens = 0 if is_async else min(request.num_tokens - computed, budget)
            fits = not is_async or -(-request.num_tokens // self.kv.block_tokens) <= len(self.free)
            if not fits or not self._allocate(request, computed + tokens):
                break
            queue.popleft()
            request.external_tokens = external
            self.cache.allocated(request)
            request.num_computed_tokens = computed
            if not request.answered:
                request.cached_tokens = max(request.cached_tokens, external)
            if is_async:
                request.receiving = True
                skipped.append(request)
                continue
            self.running.append(request)
            scheduled[request] = tokens
            budget -= tokens
        self.skipped = skipped + [one for one in queue if one in self.skipped]
        self.waiting = collections.deque(one for one in queue if one not in self.skipped)
        self._unblock()

    def _unblock(self) -> None:
        """Preempt one loaded request when nothing runs and the loaded requests together hold too many blocks."""
        holding = [one for one in self.skipped if one.blocks]
        loading = any(one.receiving and one.request_id not in self.received for one in holding)
        if holding and not self.running and not loading:
            victim = holding[-1]
            self.skipped.remove(victim)
            self.received.discard(victim.request_id)
            victim.receiving = False
            self._preempt(victim)

    def _roll_back(self, bad_blocks: set[int]) -> set[Request]:
        """Set requests back to before the first of their blocks that was not loaded; return these requests."""
        failed = set()
        if bad_blocks:
            for request in self.requests.values():
                at = next((at for at, block in enumerate(request.blocks) if block in bad_blocks), None)
                if at is not None and not request.ended:
                    failed.add(request)
                    request.num_computed_tokens = min(request.num_computed_tokens, at * self.kv.block_tokens)
        return failed

    # -- as a whole ------------------------------------------------------------------------------------------

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Step until `holds()`. Raises RuntimeError when no step computes anything for `PATIENCE_S`."""
        moved_s = time.monotonic()
        while not holds():
            if self.step():
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > PATIENCE_S:
                raise RuntimeError(f"the engine stands still: {self.requests}")
            else:
                time.sleep(0.0005)

    def settle(self) -> None:
        """Step until every request and every copy has ended; assert that all KV was right and no block was lost."""
        self.run_until(lambda: self.idle and not self.cache.busy)
        self.checks.compare()
        assert sorted(self.free) == list(range(1, self.kv.num_blocks)), "blocks were lost"

    def close(self) -> None:
        self.cache.close()
        self.device.finish()
        self.kv.close()
