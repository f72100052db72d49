"""Looks up which chunks of a prompt each instance holds, for the choice of its engine.

1. Controllers list the instances in their replies to heartbeats.  The gateway follows the instances itself
   (following.py) and learns their engines and kinds of KV from them.  So a lookup sends no request, and while no
   controller answers, the gateway continues with the instances that it knows.
2. The lookup is skipped where its result could not change the choice: without token ids, with fewer than two engines to
   choose from, for prompts shorter than a chunk, and if no instance of the engines is known.
3. Up to INLINE_TOKENS tokens are hashed on the event loop (40 µs per kind of KV), more on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvstrata import __version__
from kvstrata.cluster.link import Beats, ControllerLink
from kvstrata.config.gateway_model import GatewayControllersSettings
from kvstrata.gateway.choosing import ChoiceInputs
from kvstrata.gateway.controllers.following import Followed, Following, Holding
from kvstrata.gateway.controllers.kinds import Kind, adapter_of, paths, served_as
from kvstrata.gateway.fleet import EngineState, Fleet, ServingEngine
from kvstrata.gateway.metering import Measured
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.model import Certainty, Copy, Tier
from kvstrata.naming import name_thread
from kvstrata.observability.numbers import Numbers, parts_by
from kvstrata.process.listen import Listener
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import (
    CLUSTER_PROTOCOL_VERSION,
    TAG_BYTES,
    GatewayBeat,
    GatewayHeard,
    Hinted,
)
from kvstrata.rpc.zmq_curve import ClusterKeys, SharedKey, open_keys
from kvstrata.types import NOT_IN_A_NAME, RequestIdentity, next_of

FIELD = "controllers.curve_file"
INLINE_TOKENS = 8_192
MAX_MODELS = 256
MAX_KINDS = 4
"""Maximum number of kinds of KV for which one prompt is looked up."""
LEARN_S = 0.5
"""Maximum time for which instances' news are collected; a request whose choice needs them applies them at once."""


class _At(NamedTuple):
    """An engine and its instance."""

    engine: ServingEngine
    of: Followed


Groups = dict[tuple[Kind, str], list[_At]]
"""A model's engines, by the inputs of their chunk keys other than the prompt: the kind of KV, and
`RequestIdentity.adapter`."""


class Controllers(Numbers):
    """The lookups at followed instances. Belongs to the event loop."""

    by_url = parts_by(
        "controller", ControllerLink, lambda self: {url: one for url, (one, _) in self._of.items()}
    )

    def __init__(
        self,
        settings: GatewayControllersSettings,
        in_file: ClusterKeys | None,
        listener: Listener,
        fleet: Fleet,
        supervisor: Supervisor,
        now_s: Callable[[], float],
        numbers: Callable[[], Awaitable[tuple[str, int, int, Measured]]],
    ) -> None:
        """`in_file`: the keys of `curve_file`. `listener`: this gateway's HTTP port. `numbers`: for heartbeats, returns
        the policy, the number of requests under way and of all requests, and the measurements.

        Raises ConfigError if the key of this user cannot be kept, and Unavailable if a controller's URL is not an
        endpoint.
        """
        self._settings = settings
        self._default_name = NOT_IN_A_NAME.sub("-", f"{platform.node()}-{listener.port}")[:64]
        self._name = settings.name or self._default_name
        self._port = listener.port
        self._fleet = fleet
        self._supervisor = supervisor
        self._open = open_keys()
        self._shared: SharedKey | None = None
        self._keys = self._keys_of(settings, in_file)
        self._numbers = numbers
        self.following = Following(supervisor, now_s, self._has_news)
        self._of_url: dict[str, Followed] = {}
        """By engine's URL: its instance, if the instance reports its engines."""
        self._learning: asyncio.TimerHandle | None = None
        self._of: dict[str, tuple[ControllerLink, asyncio.Task[None]]] = {}
        self._groups: dict[str, tuple[list[ServingEngine], Groups]] = {}
        """By model: its targets, and its groups; valid while the targets and the instances' conditions stay."""
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="kv-keys", initializer=name_thread)
        self._have(settings.urls)

    def set(self, settings: GatewayControllersSettings, in_file: ClusterKeys | None) -> None:
        """Replace the controllers by those of new settings. Raises as the constructor."""
        keys = self._keys_of(settings, in_file)
        if keys != self._keys:
            self._have([])
        self._settings, self._keys = settings, keys
        self._name = settings.name or self._default_name
        self._have(settings.urls)

    def _keys_of(self, settings: GatewayControllersSettings, in_file: ClusterKeys | None) -> ClusterKeys:
        """The keys of the file, or this user's shared key, or open keys without encryption. Raises ConfigError."""
        if in_file is not None:
            return in_file
        if settings.insecure or not settings.urls:
            return self._open
        if self._shared is None:
            self._shared = SharedKey(FIELD)
            self._supervisor.spawn(self._shared.keep(), "controllers-key")
        return self._shared.keys

    async def with_copies(self, wanted: ChoiceInputs) -> ChoiceInputs:
        """`wanted` with `held`: the copies of the prompt at instances."""
        targets, groups = self._engines(wanted)
        copies: list[Copy] = []
        for (kind, adapter), at in groups.items():
            tags, n_slices = await self._tags(kind, wanted, adapter), len(kind.slices)
            holdings = await self.following.held(tags, n_slices)
            most = len(tags) // TAG_BYTES // n_slices
            copies += copies_of(at, holdings, kind.layout.chunk_tokens, most, len(targets))
        return wanted._replace(held=tuple(copies)) if groups else wanted

    def instance(self, engine: ServingEngine) -> Followed | None:
        """The instance that an engine is attached to; None: unknown."""
        place = engine.place
        return self.following.get(place.instance) if place.instance else self._of_url.get(place.url)

    def _heard(self, heard: GatewayHeard) -> None:
        self.following.follow(heard.instances, self._keys)

    def _has_news(self) -> None:
        if self._learning is None:
            self._learning = asyncio.get_running_loop().call_later(LEARN_S, self._learn)

    def _learn(self) -> None:
        """Apply the instances' news of their engines."""
        if self._learning is not None:
            self._learning.cancel()
        self._learning = None
        self._groups.clear()
        self._of_url = {}
        for one in self.following:
            for url in one.condition.engines:
                self._of_url.setdefault(url, one)
        self._fleet.attach(
            lambda engine: one.told.instance if (one := self.instance(engine)) is not None else "",
            peers=self.following.followed > 1,
        )

    def ended(self, engine: ServingEngine, request_id: str, reason: str) -> None:
        """Hint to an answering engine's instance what the client will do next; `reason`: the API's finish reason."""
        known = self.instance(engine) if request_id else None
        with contextlib.suppress(ValueError):
            if known is not None and (said := next_of(reason)):
                self.following.hint(known, Hinted(request_id, said))

    def _engines(self, wanted: ChoiceInputs) -> tuple[list[ServingEngine], Groups]:
        """The candidates of the choice, and the groups to look up; no groups: no lookup."""
        prompt = wanted.prompt
        if prompt is None or wanted.made_by or not self._of:
            return [], {}
        if self._learning is not None:
            self._learn()
        targets = self._fleet.targets(wanted.model).targets
        if len(targets) < 2:
            return targets, {}
        known = self._groups.get(wanted.model)
        if known is None or known[0] != targets:
            if len(self._groups) >= MAX_MODELS:
                self._groups.clear()
            known = self._groups[wanted.model] = targets, self._look_up(wanted.model, targets)
        n_tokens = len(prompt.tokens)
        return targets, {keys: at for keys, at in known[1].items() if n_tokens >= keys[0].layout.chunk_tokens}

    def _look_up(self, model: str, targets: list[ServingEngine]) -> Groups:
        """Group a model's engines by kind of KV and adapter; also stores their instances' load rates in the engines."""
        found: Groups = {}
        lora = self._fleet.adapter(model)
        for engine in targets:
            of = self.instance(engine)
            served = served_as(of.condition.models, _names(engine, model)) if of is not None else None
            if of is None or served is None:
                continue
            kind, told = served
            adapter = adapter_of(told, lora)
            if adapter is not None:
                found.setdefault((kind, adapter), []).append(_At(engine, of))
            engine.told.update(paths(told, of.condition.rates))
        return dict(list(found.items())[:MAX_KINDS])

    def _request(self, prompt: Prompt, adapter: str) -> RequestIdentity:
        """The inputs of a prompt's chunk keys other than tokens and layout."""
        tenant = prompt.tenant or self._settings.tenant
        return RequestIdentity(adapter=adapter, tenant=tenant, salt=prompt.salt)

    async def _tags(self, kind: Kind, wanted: ChoiceInputs, adapter: str) -> bytes:
        prompt = wanted.prompt
        assert prompt is not None
        request = self._request(prompt, adapter)
        if len(prompt.tokens) <= INLINE_TOKENS:
            return kind.tags(prompt, request)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._hashing, kind.tags, prompt, request)

    def page(self) -> list[dict[str, Any]]:
        """The controllers, for the status page."""
        return [link.document() for link, _ in self._of.values()]

    async def close(self) -> None:
        """Close all links, and end the tasks and the thread."""
        tasks = [task for _, task in self._of.values()]
        self._have([])
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._learning is not None:
            self._learning.cancel()
        await self.following.close()
        self._hashing.shutdown(wait=True, cancel_futures=True)

    async def _beat(self) -> GatewayBeat:
        policy, in_flight, requests, told = await self._numbers()
        return GatewayBeat(
            0, CLUSTER_PROTOCOL_VERSION, self._name, __version__, self._port, policy, len(self._fleet.engines),
            len([one for one in self._fleet.engines.values() if one.state is EngineState.UP]), in_flight, requests,
            *told,
        )  # fmt: skip

    def _have(self, urls: Iterable[str]) -> None:
        """Open and close links so that they lead to exactly these controllers."""
        wanted = list(urls)
        for url in [one for one in self._of if one not in wanted]:
            link, task = self._of.pop(url)
            task.cancel()
            link.close()
        for url in wanted:
            if url not in self._of:
                beats = Beats(self._beat, GatewayHeard, self._heard)
                link = ControllerLink(url, self.following.links, self._keys, beats)
                task = self._supervisor.spawn(link.keep(), f"controller {url}")
                self._of[url] = link, task
        if not wanted:
            self.following.follow_none()


def _names(engine: ServingEngine, model: str) -> list[str]:
    """All names of an engine's model; if the engine does not list the model, of all its models."""
    entries = [engine.models[model]] if model in engine.models else list(engine.models.values())
    names = [entry.get(field) for entry in entries for field in ("id", "root", "parent")]
    return [name for name in names if isinstance(name, str) and name]


def copies_of(
    at: list[_At], holdings: list[Holding], chunk_tokens: int, most_chunks: int, n_targets: int = 0
) -> list[Copy]:
    """The copies of a prompt in the engines' L1 and L2, and at the peer that holds the longest prefix.

    `most_chunks`: number of chunks looked up.  `n_targets`: number of candidates; if all of them read from peers, the
    peer's copy is listed once for all, which makes the choice in a large fleet much faster.
    """

    def copy(engine: str, tier: Tier, tokens: int, row: Holding) -> Copy:
        certainty: Certainty = "degraded" if row.unconfirmed_ms else "exact"
        source, age_s = row.of.told.instance, row.unconfirmed_ms / 1_000
        return Copy(engine=engine, tier=tier, tokens=tokens, certainty=certainty, age_s=age_s, source=source)

    def tokens(chunks: int) -> int:
        return min(chunks, most_chunks) * chunk_tokens

    rows = {row.of.told.instance: row for row in holdings}
    in_media = [(set(row.of.told.media.values()), row) for row in holdings if row.chunks.shared]
    copies: list[Copy] = []
    own_tokens: dict[str, int] = {}
    """By engine: length of the prefix that it can get without peers."""
    for engine, of in at:
        row, in_l1, own = rows.get(of.told.instance), 0, 0
        if row is not None:
            in_l1, own = tokens(row.chunks.in_l1), tokens(row.chunks.anywhere)
            if in_l1:
                copies.append(copy(engine.name, "l1", in_l1, row))
        # Chunks that another instance has put into a medium can be loaded by all instances with this medium.
        others = [other for media, other in in_media if media and media <= set(of.told.media.values())]
        most = max(others, key=lambda other: other.chunks.shared, default=None)
        if most is not None and (found := tokens(most.chunks.shared)) > own:
            own, row = found, most
        if row is not None and own > in_l1:
            copies.append(copy(engine.name, "l2", own, row))
        own_tokens[engine.name] = own
    givers = [row for row in holdings if row.chunks.in_l1 and row.of.served.readable]
    best = max(givers, key=lambda row: row.chunks.in_l1, default=None)
    if best is None:
        return copies
    theirs = tokens(best.chunks.in_l1)
    if len(at) == n_targets and all(of.told.gives_to_peers for _, of in at):
        return [*copies, copy("", "peer", theirs, best)]
    return copies + [
        copy(engine.name, "peer", theirs, best)
        for engine, of in at
        if of.told.gives_to_peers and of is not best.of and theirs > own_tokens[engine.name]
    ]
