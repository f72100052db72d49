"""The connector of a simulated engine: the scheduler's and the worker's side of the connector for vLLM, in one process.

They look up and copy as in vLLM, through clients and the shared memory of a real server.  Only the engine's thread
calls the methods.  The blocks lie in memory of this process (`kv_memory`), numbered from 1 as vLLM numbers them.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import msgspec

from kvstrata.client import CacheClient
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.mover import Mover
from kvstrata.connectors.sim.kv_memory import KEY_BYTES, KvMemory
from kvstrata.connectors.sim.transfer import Transfer
from kvstrata.connectors.vllm.engine import Engine
from kvstrata.connectors.vllm.groups import suitable_chunk, whole_group
from kvstrata.connectors.vllm.identity import fidelity_of
from kvstrata.connectors.vllm.metadata import WorkerReport
from kvstrata.connectors.vllm.scheduler import SchedulerSide
from kvstrata.connectors.vllm.weights import WeightsVersion
from kvstrata.connectors.vllm.worker import GroupSide, WorkerSide
from kvstrata.errors import ConfigError
from kvstrata.memory.paths import RPC_SOCKET, socket_dirs
from kvstrata.testing.engine_sim.blocks import Sequence as BlockSequence
from kvstrata.testing.engine_sim.connected import News
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.kv_events import MEDIUM_HOST, BlockRemoved, BlockStored, Event
from kvstrata.testing.engine_sim.requests import SimRequest, root_key
from kvstrata.types import LayoutIdentity, Role

logger = logging.getLogger("vllm.kvstrata")

WEIGHTS = "simulated"


class _Weights:
    """Weights that never change, for the worker's side."""

    initial = WEIGHTS

    def digest(self) -> str:
        return WEIGHTS


class _Request:
    """A request under the names by which the scheduler's side reads vLLM's requests."""

    prompt_embeds: ClassVar[None] = None
    resumable: ClassVar[bool] = False
    skip_reading_prefix_cache: ClassVar[bool] = False
    mm_features: ClassVar[tuple[()]] = ()

    def __init__(self, request: SimRequest) -> None:
        self.of = request
        self.request_id = request.name
        self.num_prompt_tokens = request.prompt_tokens
        self.kv_transfer_params = request.transfer
        self.block_hashes: list[bytes] = []
        adapter = request.adapter
        self.lora_request = (
            None
            if adapter is None
            else SimpleNamespace(lora_name=adapter, lora_int_id=1, lora_path=f"kvstrata-sim/{adapter}")
        )

    @property
    def cache_salt(self) -> str | None:
        return self.of.salt

    @cache_salt.setter
    def cache_salt(self, salt: str | None) -> None:
        self.of.salt = salt

    @property
    def num_tokens(self) -> int:
        return self.of.known_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.of.computed

    @property
    def all_token_ids(self) -> array[int]:
        return self.of.tokens[: self.of.known_tokens]

    def update_block_hashes(self) -> None:
        """The salt has changed: blocks of the engine are keyed by the new one. REQUIRES: there are none yet."""
        root = root_key(self.of.adapter, self.cache_salt)
        self.of.sequence = BlockSequence(self.of.tokens, root)

    @property
    def blocks(self) -> list[int]:
        """Its block table, with vLLM's numbers."""
        return [1 + block for block in self.of.sequence.blocks]


class _Load(NamedTuple):
    first: int
    """Tokens before those that are loaded."""
    end: int


class SimConnector:
    """See `testing.engine_sim.connected.Connector` for the calls.

    A server that is missing or goes away makes misses, as in vLLM. Raises ConfigError for sizes that do not fit.
    """

    def __init__(self, transfer: Transfer, engine: EngineModel, *, model: str, token_bytes: int) -> None:
        """`model`: the served model's name."""
        if token_bytes * engine.block_tokens < KEY_BYTES:
            raise ConfigError(
                f"--kv-token-bytes: a block of {engine.block_tokens} tokens must have {KEY_BYTES} bytes at least, "
                f"found {token_bytes}; raise it or --block-tokens",
                field="kv-token-bytes",
            )
        settings, size = transfer.settings, engine.block_tokens
        chunk = suitable_chunk(settings.chunk_size, ClientSettings().chunk_size, [size], exact=False)
        settings = msgspec.structs.replace(settings, chunk_size=chunk)
        self._size = size
        self._group = whole_group(size, chunk)
        self._memory = KvMemory(engine.kv_blocks + 1, token_bytes * size, chunk // size)
        make = partial(
            CacheClient,
            settings,
            layout=LayoutIdentity(
                model=model,
                weights=WEIGHTS,
                kv_dtype="bfloat16",
                fidelity=fidelity_of(settings),
                chunk_tokens=chunk,
            ),
            group=secrets.token_bytes(16),
            engine_slices=1,
        )
        self._clients = (
            make(role=Role.SCHEDULER),
            make(role=Role.WORKER, slice=self._memory.slice, facts=self._memory.facts),
        )
        self._worker = self._worker_side(self._clients[1])
        places = [place / RPC_SOCKET for place in socket_dirs(settings.socket_dir, settings.port)]
        self._cache = object()
        """Replaced when the engine's own cache is emptied, as in vLLM."""
        self._scheduler = SchedulerSide(
            Engine(
                self._clients[0],
                settings,
                [self._group],
                token_bytes * chunk,
                1,
                WeightsVersion(1),
                prefix_cache=lambda: self._cache,
                may_load=transfer.may_load,
                may_store=transfer.may_store,
                sync_load_bytes=0,
                recomputes=True,
                events=self._stored_event if engine.kv_events else None,
                removal=_removed_event,
                shares_l1=lambda: True,
                server_seen=lambda: any(place.exists() for place in places),
            )
        )
        self._views: dict[str, _Request] = {}
        """Of all requests that have not ended."""
        self._loads: dict[str, _Load] = {}
        self._loading: dict[str, SimRequest] = {}
        self._reports: list[WorkerReport] = []
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        """Of loads that have not ended."""
        self._open = True
        for client in self._clients:
            client.start()

    def _worker_side(self, client: CacheClient) -> WorkerSide:
        side = GroupSide(
            client,
            Mover(client, self._memory.plan),
            slice_digest=self._memory.slice.digest(),
            record_blocks=self._group.record_blocks,
        )
        weights: Any = _Weights()
        return WorkerSide([side], weights=weights)

    @property
    def connected(self) -> bool:
        """Whether both clients are attached to a server."""
        return all(client.connected for client in self._clients)

    # -- calls of the engine ---------------------------------------------------------------------------------

    def arrived(self, request: SimRequest) -> None:
        """See `Connector`."""
        self._views[request.name] = view = _Request(request)
        self._scheduler.on_new_request(view)

    def matched(self, request: SimRequest, computed: int) -> int | None:
        """See `Connector`."""
        return self._scheduler.matched_tokens(self._views[request.name], computed)[0]

    def allocated(self, request: SimRequest, computed: int, external: int) -> None:
        """See `Connector`."""
        view = self._views[request.name]
        if external:
            self._loads[request.name] = _Load(computed, computed + external)
            self._loading[request.name] = request
        self._scheduler.allocated(view, [view.blocks], external)

    def begin_step(self, work: Sequence[tuple[SimRequest, int]], preempted: set[str]) -> None:
        """See `Connector`."""
        names = [request.name for request, _ in work]
        plan = self._scheduler.plan_step(
            SimpleNamespace(
                num_scheduled_tokens={request.name: tokens for request, tokens in work},
                scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=names, num_computed_tokens=[request.computed for request, _ in work]
                ),
                finished_req_ids=set(),
                preempted_req_ids=preempted,
                kv_connector_block_state=SimpleNamespace(
                    get_block_ids=lambda name: (self._views[name].blocks,), boundary_state_offloads={}
                ),
            )
        )
        self._worker.before_step(plan)
        self._worker.start_loads()

    def end_step(self, work: Sequence[tuple[SimRequest, int]]) -> None:
        """See `Connector`."""
        for request, tokens in work:
            first, end = request.computed // self._size, (request.computed + tokens) // self._size
            if first < end:
                keys = request.sequence.keys(first, end, self._size)
                for block, key in zip(request.sequence.blocks[first:end], keys, strict=True):
                    self._memory.compute(1 + block, key)
        self._worker.start_stores()
        self._sent, self._received = self._worker.finished()
        self._bad_blocks |= self._worker.take_bad_blocks()
        report = self._worker.report()
        self._reports = [] if report is None else [report]

    def finished(self, request: SimRequest) -> bool:
        """See `Connector`."""
        view = self._views.pop(request.name)
        return self._scheduler.finished(view, [view.blocks])

    def take_news(self) -> News:
        """See `Connector`."""
        bad, ended = self._bad_blocks, [self._loading[name] for name in self._received]
        received = {name: self._there(name, bad) for name in self._received}
        self._scheduler.heard(self._reports, self._received, bad)
        events: Sequence[Event] = self._scheduler.take_events()
        sent, self._sent, self._received, self._reports = self._sent, set(), set(), []
        self._bad_blocks = bad.difference(*([1 + block for block in each.sequence.blocks] for each in ended))
        return News(sent, received, events)

    @property
    def awaits_news(self) -> bool:
        """See `Connector`."""
        return self._scheduler.awaits_news

    def cleared(self) -> None:
        """See `Connector`."""
        self._cache = object()

    def close(self) -> None:
        """See `Connector`. Takes some seconds at most."""
        if not self._open:
            return
        self._open = False
        self._worker.close()
        self._scheduler.close()
        self._memory.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _there(self, name: str, bad: set[int]) -> int:
        """The first tokens of a request that are there after its load; blocks that are not right are added to `bad`."""
        load, request = self._loads.pop(name), self._loading.pop(name)
        first, end = load.first // self._size, load.end // self._size
        blocks = [1 + block for block in request.sequence.blocks]
        lost = next((at for at, block in enumerate(blocks) if block in bad), len(blocks))
        if lost > first:
            full = min(end, lost)
            keys = request.sequence.keys(first, full, self._size)
            right = first + self._memory.right(blocks[first:full], keys)
            if right < full:
                lost = right
                bad.update(blocks[right:full])
                logger.error("block %d of request %s was loaded with other KV than its own", right, name)
        return min(load.end, lost * self._size)

    def _stored_event(
        self, tokens: Sequence[int], parent: bytes, keys: Sequence[bytes], view: Any, first_token: int
    ) -> BlockStored:
        request: SimRequest = view.of
        return BlockStored(
            list(keys),
            parent or None,
            list(tokens),
            self._group.chunk_tokens,
            None if request.adapter is None else 1,
            MEDIUM_HOST,
            request.adapter,
            request.extra_keys(len(keys), first=first_token == 0),
        )


def _removed_event(keys: Sequence[bytes]) -> BlockRemoved:
    return BlockRemoved(list(keys), MEDIUM_HOST)
