"""The connector of the simulated engine (`engine.py`): `NoCache`, or `Cache` with the real sides and clients.

The methods are in the order in which vLLM 0.32 calls them: see its `v1/core/sched/scheduler.py` and
`v1/worker/kv_connector_model_runner_mixin.py`.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any, ClassVar, NamedTuple

from kvstrata.client import CacheClient
from kvstrata.client.pinning import Pinner
from kvstrata.client.warmup import PageWarmer
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.device import DeviceMover, open_engine
from kvstrata.connectors.vllm.engine import SYNC_LOAD_BYTES, Engine
from kvstrata.connectors.vllm.identity import fidelity_of
from kvstrata.connectors.vllm.metadata import StepPlan, WorkerReport
from kvstrata.connectors.vllm.scheduler import SchedulerSide
from kvstrata.connectors.vllm.weights import WeightsVersion
from kvstrata.connectors.vllm.worker import GroupSide, WorkerSide
from kvstrata.types import LayoutIdentity, RequestIdentity, Role
from tests.harness.cache_engine import eventually
from tests.harness.gpu_kv import Device, DeviceKv, PagedKv


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One request, with the attribute names of vLLM's requests, by which the connector reads it."""

    request_id: str
    tokens: list[int]
    """The prompt followed by the whole answer."""
    num_prompt_tokens: int
    keys: list[int]
    """One key for each block, see `gpu_kv.block_keys`."""
    arrived_s: float
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


class NoCache:
    """The calls of an engine without a connector; each answers that nothing is cached."""

    def arrived(self, request: Request) -> None:
        """Called when a request arrives (vLLM's `add_request`)."""

    def matched(self, request: Request) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded (None: ask again) and whether the load is asynchronous."""
        return 0, False

    def allocated(self, request: Request) -> None:
        """Called when the request has its blocks and `external_tokens` of its tokens are to be loaded."""

    def plan(self, output: Any) -> StepPlan:
        return StepPlan(0)

    def begin_step(self, plan: StepPlan) -> None:
        """Release the blocks of preempted requests, before anything of the step runs."""

    def begin_loads(self, *, layerwise: bool) -> None:
        """Begin the step's loads, before the forward pass."""

    def layer(self, name: str) -> None:
        """Make the layer's computation wait for its loads."""

    def end_step(self) -> StepOutcome:
        """Begin the step's stores, after the forward pass was handed to the device."""
        return StepOutcome(set(), set(), set(), None)

    def heard(self, outcome: StepOutcome) -> None:
        """Pass the worker side's reports to the scheduler side."""

    def finished(self, request: Request) -> bool:
        """Return whether the blocks of a request that has ended must be kept."""
        return False

    @property
    def busy(self) -> bool:
        return False

    def close(self) -> None:
        """Leave the server."""


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


class Cache(NoCache):
    """The connector's two sides, put together as in `connectors/vllm/build.py`."""

    def __init__(
        self,
        settings: ClientSettings,
        device: Device,
        kv: DeviceKv,
        *,
        pin: bool = True,
        sync_load_bytes: int = SYNC_LOAD_BYTES,
        mover: type[DeviceMover] = DeviceMover,
    ) -> None:
        group = secrets.token_bytes(16)
        self.engine, plan = open_engine(settings, kv.view, "GPU 0", 0)
        pages = Pinner(self.engine, 0) if pin else PageWarmer()
        self.client = client_of(
            settings, kv, Role.WORKER, group, engine=self.engine, pages=pages, registers_memory=True
        )
        self.mover = mover(
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
                    self.mover,
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
        self.scheduler.on_new_request(request)

    def matched(self, request: Request) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, 0)

    def allocated(self, request: Request) -> None:
        self.scheduler.allocated(request, [request.blocks], request.external_tokens)

    def plan(self, output: Any) -> StepPlan:
        return self.scheduler.plan_step(output)

    def begin_step(self, plan: StepPlan) -> None:
        self.worker.before_step(plan)

    def begin_loads(self, *, layerwise: bool) -> None:
        self.worker.start_loads(layerwise=layerwise)

    def layer(self, name: str) -> None:
        self.worker.wait_layer(name)

    def end_step(self) -> StepOutcome:
        self.worker.start_stores()
        sent, received = self.worker.finished()
        return StepOutcome(sent, received, self.worker.take_bad_blocks(), self.worker.report())

    def heard(self, outcome: StepOutcome) -> None:
        reports = [outcome.report] if outcome.report is not None else []
        self.scheduler.heard(reports, outcome.received, outcome.bad_blocks)

    def finished(self, request: Request) -> bool:
        return self.scheduler.finished(request, [request.blocks])

    @property
    def busy(self) -> bool:
        return bool(self.worker._stores or self.worker._loads)

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
