"""A simulator of vLLM whose blocks are in device memory: scheduler, block tables and steps, without a model or torch.

The connector's two sides are the real ones, on real clients, and are called as vLLM 0.32 calls them
(`v1/core/sched/scheduler.py`, `v1/worker/kv_connector_model_runner_mixin.py`).  A step has a budget of tokens: running
requests come first, one token each or the next piece of their prompt; what is left goes to waiting ones.  Where blocks
run out, the newest running request is preempted and computed again later.

Attention is left out, and so are vLLM's own prefix cache and its sampling: what a request will answer is known when it
comes.  What the model would write into a block follows from the tokens (`gpu_kv`), layer after layer on the engine's
stream; between them `products` may compute what a layer computes.  With `checks` everything loaded is read by that
stream at the layer that needs it and compared, all that a request had in its blocks is read when it gives them up, and
then they are poisoned.
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

from kvstrata.client import CacheClient, LoadItem
from kvstrata.client.pinning import Pinner
from kvstrata.client.warmup import PageWarmer
from kvstrata.config.model import ClientSettings
from kvstrata.connectors.vllm.device import DeviceMover, choose_way, open_engine
from kvstrata.connectors.vllm.identity import fidelity_of
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Load, StepPlan, WorkerReport
from kvstrata.connectors.vllm.scheduler import SYNC_LOAD_BYTES, SchedulerSide
from kvstrata.connectors.vllm.weights import WeightsVersion
from kvstrata.connectors.vllm.worker import WorkerSide
from kvstrata.native.cuda import device_facts
from kvstrata.types import LayoutIdentity, RequestIdentity, Role
from tests.harness.cache_engine import PATIENCE_S, eventually
from tests.harness.gpu_kv import POISON, TINY, Device, DeviceKv, Later, PagedKv, Shape, block_keys


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One request; the connector reads it by the names that vLLM has."""

    request_id: str
    tokens: list[int]
    """The prompt, and all that will be answered."""
    num_prompt_tokens: int
    keys: list[int]
    """Of its blocks, see `block_keys`."""
    arrived_s: float
    answered: int = 0
    num_computed_tokens: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    external_tokens: int = 0
    """Loaded, or being loaded, since it last began."""
    cached_tokens: int = 0
    """Of its prompt: what came from the cache at its first begin."""
    receiving: bool = False
    first_token_s: float | None = None
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
        """Prompt, and what is answered by now."""
        return self.num_prompt_tokens + self.answered

    @property
    def all_token_ids(self) -> list[int]:
        """Those of `num_tokens`."""
        return self.tokens[: self.num_tokens]


class Step(NamedTuple):
    """What a step did, and the seconds until the device had done it."""

    prefill_tokens: int
    decodes: int
    seconds: float
    copies: bool
    """Loads or stores were under way at its begin or its end."""


class Heard(NamedTuple):
    """What the worker says after a step."""

    sent: set[str]
    received: set[str]
    bad_blocks: set[int]
    report: WorkerReport | None


class NoCache:
    """An engine without a connector."""

    def arrived(self, request: Request) -> None:
        """vLLM's `add_request`."""

    def matched(self, request: Request) -> tuple[int | None, bool]:
        """Tokens that can be loaded (None: ask again), and whether beside other work."""
        return 0, False

    def allocated(self, request: Request) -> None:
        """Its blocks are there, `external_tokens` are to be loaded."""

    def plan(self, output: Any) -> StepPlan:
        """Of the step."""
        return StepPlan(0)

    def begin_step(self, plan: StepPlan) -> None:
        """Before anything of the step runs: blocks of preempted requests are let go."""

    def begin_loads(self, *, layerwise: bool) -> None:
        """Before the forward pass."""

    def layer(self, name: str) -> None:
        """Before the layer."""

    def end_step(self) -> Heard:
        """After the forward pass was given to the device."""
        return Heard(set(), set(), set(), None)

    def heard(self, heard: Heard) -> None:
        """The scheduler learns of it."""

    def finished(self, request: Request) -> bool:
        """Whether the blocks of a request that is over must be kept."""
        return False

    @property
    def busy(self) -> bool:
        """Whether a store or a load is under way."""
        return False

    def close(self) -> None:
        """Leave the server."""


def client_of(settings: ClientSettings, kv: PagedKv, role: Role, group: bytes, **more: Any) -> CacheClient:
    """A client of the engine whose blocks these are."""
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


class Cache(NoCache):
    """The connector's two sides, as `connectors/vllm/connector.py` makes them."""

    def __init__(
        self,
        settings: ClientSettings,
        device: Device,
        kv: PagedKv,
        *,
        pin: bool = True,
        measure: bool = False,
        sync_load_bytes: int = SYNC_LOAD_BYTES,
        mover: type[DeviceMover] = DeviceMover,
    ) -> None:
        group = secrets.token_bytes(16)
        self.engine, plan = open_engine(settings, kv.view, "GPU 0", 0)
        if measure:
            choose_way(self.engine, "GPU 0", plan, kv.view.chunk_blocks)
        self.client = client_of(
            settings,
            kv,
            Role.WORKER,
            group,
            engine=self.engine,
            pages=Pinner(self.engine, 0) if pin else PageWarmer(),
            registers_memory=True,
        )
        self.mover = mover(
            self.client,
            self.engine,
            plan,
            sections=kv.sections,
            current_stream=lambda: device.computes,
        )
        self.worker = WorkerSide(
            self.client,
            self.mover,
            slice_digest=kv.view.slice.digest(),
            chunk_blocks=kv.view.chunk_blocks,
            make_item=LoadItem,
        )
        self.scheduler_client = client_of(settings, kv, Role.SCHEDULER, group)
        weights = WeightsVersion(1)
        weights.known, weights.can_tell = True, False  # there is no model that could be sampled
        self.scheduler = SchedulerSide(
            self.scheduler_client,
            settings,
            block_tokens=kv.block_tokens,
            chunk_blocks=kv.view.chunk_blocks,
            chunk_bytes=kv.view.payload_bytes,
            world_size=1,
            weights=weights,
            sync_load_bytes=sync_load_bytes,
        )
        self.client.start()
        self.scheduler_client.start()
        self.identity = self.scheduler_client.identity(RequestIdentity(tenant=settings.tenant))

    def connect(self) -> None:
        """Wait until the cache is in use."""
        for client in (self.client, self.scheduler_client):
            eventually("the client connects", lambda client=client: client.connected)
        eventually("the identity is ready", lambda: self.identity.ready)

    def arrived(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def matched(self, request: Request) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, 0)

    def allocated(self, request: Request) -> None:
        self.scheduler.allocated(request, request.blocks, request.external_tokens)

    def plan(self, output: Any) -> StepPlan:
        return self.scheduler.plan_step(output)

    def begin_step(self, plan: StepPlan) -> None:
        self.worker.before_step(plan)

    def begin_loads(self, *, layerwise: bool) -> None:
        self.worker.start_loads(layerwise=layerwise)

    def layer(self, name: str) -> None:
        self.worker.wait_layer(name)

    def end_step(self) -> Heard:
        self.worker.start_stores()
        sent, received = self.worker.finished()
        return Heard(sent, received, self.worker.take_bad_blocks(), self.worker.report())

    def heard(self, heard: Heard) -> None:
        reports = [heard.report] if heard.report is not None else []
        self.scheduler.heard(reports, heard.received, heard.bad_blocks)

    def finished(self, request: Request) -> bool:
        return self.scheduler.finished(request, request.blocks)

    @property
    def busy(self) -> bool:
        return bool(self.worker._stores or self.worker._loads)

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


class _Check(NamedTuple):
    """What was read on the engine's stream, and what has to be there."""

    what: str
    block: int
    parts: list[Later]
    wanted: bytes


class GpuEngine:
    """One engine of one worker. Belongs to the thread that made it."""

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
        cache: type[Cache] = Cache,
        **more: Any,
    ) -> None:
        """`settings` None: no cache; `more` goes to `cache`.

        `products(tokens)` gives one layer's products to `device.computes`.  Without `write_tokens` the KV of a block is
        written whole with its first token, which takes fewer copies.
        """
        chunk_tokens = settings.chunk_size if settings is not None else block_tokens
        device_facts(0)  # says it where there is none
        self.device = device or Device()
        self.kv = DeviceKv(
            self.device,
            shape,
            layout=layout,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            chunk_tokens=chunk_tokens,
            rounded=settings is not None and settings.gpu_fp8,
        )
        self.cache = NoCache()
        if settings is not None:
            self.cache = cache(settings, self.device, self.kv, **more)
        self.chance = random.Random(0)
        self.layerwise: bool | None = True
        """None: as it comes."""
        self.preempt_share = 0.0
        """Of the steps: in so many a request is preempted though there are blocks."""
        self.wait_share = 1.0
        """Of the steps: the others begin while the device still computes the last one."""
        self.free = list(range(1, num_blocks))  # vLLM's block 0 stands for "no block"
        self.running: list[Request] = []
        self.skipped: list[Request] = []
        """Waiting requests that wait for something: their lookup or their load."""
        self.waiting: collections.deque[Request] = collections.deque()
        self.requests: dict[str, Request] = {}
        """All whose blocks are not free yet."""
        self.received: set[str] = set()
        self.ended: list[Request] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.steps: list[Step] = []
        self._budget = budget_tokens
        self._max_running = max_running
        self._products = products
        self._checks = checks
        self._write_tokens = write_tokens
        self._pending: list[_Check] = []
        self._given_up: list[tuple[Request, list[int], int]] = []
        """Preempted in this step: request, blocks and computed tokens it had."""
        self._number = 0
        if checks:
            self.kv.poison(range(num_blocks))

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, tokens: Sequence[int], output_tokens: int, arrived_s: float | None = None) -> Request:
        """A prompt, and how many tokens will be answered."""
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
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.cache.arrived(request)
        self.counts["requests"] += 1
        return request

    def abort(self, request: Request) -> None:
        """Its client went away."""
        for queue in (self.running, self.skipped, self.waiting):
            if request in queue:
                queue.remove(request)
        self.counts["aborted"] += 1
        self._end(request)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits, and no block is kept."""
        return not self.requests

    def _end(self, request: Request) -> None:
        request.ended = True
        self.ended.append(request)
        received = request.request_id in self.received
        self.received.discard(request.request_id)
        keep = self.cache.finished(request)
        if not keep and (not request.receiving or received):
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """The request is over, its blocks are nobody's."""
        del self.requests[request.request_id]
        self._free_blocks(request, request.blocks, 0 if request.receiving else request.num_computed_tokens)
        self.free += request.blocks

    def _free_blocks(self, request: Request, blocks: Sequence[int], computed_tokens: int) -> None:
        """Look at what was in them for the last time, and let anybody write into them."""
        if self._checks:
            self._read(request, blocks, 0, computed_tokens, range(self.kv.shape.layers), self._pending)
            self.kv.poison(blocks)
        assert not set(self.free) & set(blocks), "blocks were given back twice"

    # -- scheduling --------------------------------------------------------------------------------------------

    def _blocks_for(self, request: Request, tokens: int) -> bool:
        """Give it blocks for so many tokens; False and nothing changed where there are too few."""
        missing = -(-tokens // self.kv.block_tokens) - len(request.blocks)
        if missing > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(missing)]
        return True

    def _preempt(self, request: Request) -> None:
        self.counts["preempted"] += 1
        self._given_up.append((request, request.blocks, request.num_computed_tokens))
        self.free += request.blocks
        request.blocks = []
        request.num_computed_tokens = request.external_tokens = 0
        self.waiting.appendleft(request)

    def _schedule(self) -> dict[Request, int]:
        """Tokens of each request in this step; blocks are theirs afterwards."""
        budget = self._budget
        scheduled: dict[Request, int] = {}
        at = 0
        if self.running and self.chance.random() < self.preempt_share:
            self._preempt(self.running.pop(self.chance.randrange(len(self.running))))
        while at < len(self.running) and budget:
            request = self.running[at]
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._blocks_for(request, request.num_computed_tokens + tokens):
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                scheduled[request] = tokens
                budget -= tokens
                at += 1
        if not self._given_up:
            self._admit(scheduled, budget)
        return scheduled

    def _admit(self, scheduled: dict[Request, int], budget: int) -> None:
        """Begin what waits, in its order."""
        queue = collections.deque([*self.skipped, *self.waiting])
        skipped: list[Request] = []
        while queue and budget and len(self.running) < self._max_running:
            request = queue[0]
            name = request.request_id
            if request.receiving:
                if name not in self.received:
                    skipped.append(queue.popleft())
                    continue
                self.received.remove(name)
                request.receiving = False
                # The last token is computed in any case: something has to be sampled from.
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            external, beside = 0, False
            if not request.num_computed_tokens:
                found, beside = self.cache.matched(request)
                if found is None:
                    skipped.append(queue.popleft())
                    continue
                external = found
            there = request.num_computed_tokens + external
            tokens = 0 if beside else min(request.num_tokens - there, budget)
            fits = not beside or -(-request.num_tokens // self.kv.block_tokens) <= len(self.free)
            if not fits or not self._blocks_for(request, there + tokens):
                break
            queue.popleft()
            request.external_tokens = external
            self.cache.allocated(request)
            request.num_computed_tokens = there
            if request.first_token_s is None:
                request.cached_tokens = max(request.cached_tokens, external)
            if beside:
                request.receiving = True
                skipped.append(request)
                continue
            self.running.append(request)
            scheduled[request] = tokens
            budget -= tokens
        self.skipped = skipped + [one for one in queue if one in self.skipped]
        self.waiting = collections.deque(one for one in queue if one not in self.skipped)
        holding = [one for one in self.skipped if one.blocks]
        if (
            holding
            and not self.running
            and all(not one.receiving or one.request_id in self.received for one in holding)
        ):
            # What was loaded for some keeps all from going on.
            victim = holding[-1]
            self.skipped.remove(victim)
            self.received.discard(victim.request_id)
            victim.receiving = False
            self._preempt(victim)

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> int:
        """One step of the engine; the tokens that it computed."""
        if self.device.is_full:
            self.look()
        scheduled = self._schedule()
        output = SimpleNamespace(
            num_scheduled_tokens={one.request_id: tokens for one, tokens in scheduled.items()},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one in scheduled],
                num_computed_tokens=[one.num_computed_tokens for one in scheduled],
            ),
            preempted_req_ids={one.request_id for one, _, _ in self._given_up},
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (self.requests[name].blocks,)
            ),
        )
        plan = self.cache.plan(output)
        self._check_stores(plan, scheduled)
        n_tokens = sum(scheduled.values())
        copies = self.cache.busy
        begun_s = time.perf_counter()
        self.cache.begin_step(plan)
        for request, blocks, computed_tokens in self._given_up:
            if self._checks:
                self._read(request, blocks, 0, computed_tokens, range(self.kv.shape.layers), self._pending)
                self.kv.poison(blocks)
        self._given_up.clear()
        layerwise = self.chance.random() < 0.7 if self.layerwise is None else self.layerwise
        self.cache.begin_loads(layerwise=layerwise and bool(scheduled))
        seen = self._forward(plan.loads, scheduled)
        heard = self.cache.end_step()
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
        self._update(scheduled, heard, seen)
        if waits:
            self.look()
        return n_tokens

    def _check_stores(self, plan: StepPlan, scheduled: dict[Request, int]) -> None:
        """Only what this step completes is stored."""
        for store in plan.stores:
            request = self.requests.get(store.request_id)
            assert request is not None, "a request is stored whose blocks are free"
            computed = request.num_computed_tokens + scheduled.get(request, 0)
            last = request.blocks.index(store.blocks[-1])
            assert (last + 1) * self.kv.block_tokens <= computed, "a block is stored before it is computed"

    def _forward(self, loads: Iterable[Load], scheduled: dict[Request, int]) -> list[_Check]:
        """Layer after layer: read what was loaded, compute, write. Given to the device, not waited for."""
        seen: list[_Check] = []
        resting = [(self.requests[load.request_id], load.blocks) for load in loads if not load.asynchronous]
        n_tokens = sum(scheduled.values())
        for layer in range(self.kv.shape.layers):
            if not scheduled:
                break
            self.cache.layer(f"layers.{layer}")
            for request, blocks in resting if self._checks else ():
                self._read(request, blocks, 0, request.external_tokens, [layer], seen)
            self._products(n_tokens)
            for request, tokens in scheduled.items():
                self._write(request, layer, request.num_computed_tokens, tokens)
        return seen

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

    def _read(
        self,
        request: Request,
        blocks: Sequence[int],
        start: int,
        end: int,
        layers: Iterable[int],
        checks: list[_Check],
    ) -> None:
        """Read tokens of a request on the engine's stream, to be compared when they are there."""
        block_tokens = self.kv.block_tokens
        for layer in layers:
            for at in range(start // block_tokens, -(-end // block_tokens)):
                if blocks[at] == SKIP_BLOCK:
                    continue
                last = min(block_tokens, end - at * block_tokens)
                checks.append(
                    _Check(
                        f"{request.request_id}: layer {layer}, block {at} of the request",
                        blocks[at],
                        self.kv.read(layer, blocks[at], 0, last),
                        self.kv.expected(request.keys[at], layer, 0, last),
                    )
                )

    def look(self) -> None:
        """Wait for the device and compare all that was read."""
        self.device.finish()
        for check in self._pending:
            found = b"".join(part.raw for part in check.parts)
            what = "poison" if bytes([POISON]) * 16 in found else "wrong"
            assert found == check.wanted, f"{check.what} is {what}"
        self.counts["compared blocks"] += len(self._pending)
        self._pending.clear()

    def _update(self, scheduled: dict[Request, int], heard: Heard, seen: list[_Check]) -> None:
        """What vLLM's scheduler does with a step's outcome, in its order."""
        for request, tokens in scheduled.items():
            request.num_computed_tokens += tokens
        failed = self._lost(heard.bad_blocks)
        right = [check for check in seen if check.block not in heard.bad_blocks]
        self.counts["bad blocks"] += len(seen) - len(right)
        self.counts["loaded blocks"] += len(right)
        self._pending += right
        now_s = time.perf_counter()
        for request in scheduled:
            if request in failed or request.num_computed_tokens < request.num_tokens:
                continue
            request.answered += 1
            if request.first_token_s is None:
                request.first_token_s = now_s
            if request.num_tokens == len(request.tokens):
                self.running.remove(request)
                self._end(request)
        self.cache.heard(heard)
        if heard.report is not None:
            self.counts["stored"] += sum(mask.bit_count() for _, mask in heard.report.stored)
            self.counts["broken"] = int(heard.report.broken)
        for name in heard.received:
            request = self.requests[name]
            if request.ended:
                self._give_back(request)
                continue
            self.received.add(name)
            self.counts["received"] += 1
            if self._checks:
                before = len(self._pending)
                end = request.num_computed_tokens  # less where a part failed
                self._read(request, request.blocks, 0, end, range(self.kv.shape.layers), self._pending)
                self.counts["loaded blocks"] += len(self._pending) - before
        for name in heard.sent:
            self._give_back(self.requests[name])

    def _lost(self, bad_blocks: set[int]) -> set[Request]:
        """Requests that go back to before the first of these blocks."""
        failed = set()
        if bad_blocks:
            for request in self.requests.values():
                at = next((at for at, block in enumerate(request.blocks) if block in bad_blocks), None)
                if at is not None and not request.ended:
                    failed.add(request)
                    if request.receiving:
                        self.counts["bad blocks"] += (
                            len(bad_blocks & set(request.blocks)) * self.kv.shape.layers
                        )
                    request.num_computed_tokens = min(request.num_computed_tokens, at * self.kv.block_tokens)
        return failed

    # -- many steps --------------------------------------------------------------------------------------------

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Steps until it holds; RuntimeError when nothing was computed for `PATIENCE_S`."""
        moved_s = time.monotonic()
        while not holds():
            if self.step():
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > PATIENCE_S:
                raise RuntimeError(f"the engine stands still: {self.requests}")
            else:
                time.sleep(0.0005)

    def settle(self) -> None:
        """Until all is over and no store is under way, and all that was read is right."""
        self.run_until(lambda: self.idle and not self.cache.busy)
        self.look()
        assert sorted(self.free) == list(range(1, self.kv.num_blocks)), "blocks were lost"

    def close(self) -> None:
        """Leave the server and free the memory."""
        self.cache.close()
        self.device.finish()
        self.kv.close()
