"""What instances hold of each prompt, for the choice of its engine.

1. Controllers tell by heartbeats which instances there are, their engines, and the kinds of KV; the gateway follows the
   instances itself (following.py).  So a request waits for nobody, and a gateway goes on without controllers by what it
   knows.
2. Nothing is looked up when nothing could change: without token ids, with fewer than two engines to choose from, for
   prompts shorter than a chunk, and if no instance of the engines is known.
3. Up to INLINE_TOKENS are hashed on the loop (40 µs for a kind of KV), more on a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvstrata import __version__
from kvstrata.config.gateway_model import GatewayControllersSettings
from kvstrata.gateway.choosing import Wanted
from kvstrata.gateway.controllers.directory import MAX_KINDS, Directory, Kind
from kvstrata.gateway.controllers.following import Following, Holding
from kvstrata.gateway.controllers.link import ControllerLink
from kvstrata.gateway.controllers.replicas import Read, Replicas
from kvstrata.gateway.fleet import EngineState, Fleet, ServingEngine
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.model import Copy, Tier, Way
from kvstrata.naming import name_thread
from kvstrata.observability.numbers import Numbers, parts_by
from kvstrata.process.listen import Listener
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import TAG_BYTES, GatewayBeat, Served
from kvstrata.rpc.zmq_curve import ClusterKeys, SharedKey, new_secret, open_keys
from kvstrata.rpc.zmq_link import Links
from kvstrata.types import NOT_IN_A_NAME, RequestIdentity

FIELD = "controllers.curve_file"
INLINE_TOKENS = 8_192
MAX_MODELS = 256


class _At(NamedTuple):
    """An engine and its instance."""

    engine: ServingEngine
    served: Served


class _Keys(NamedTuple):
    """What the keys of a model's KV are derived from, beside the prompt: the same at some of its engines."""

    kind: int
    """Number of the kind of KV."""
    adapter: str
    """See RequestIdentity."""


class _Attached(NamedTuple):
    """A model's engines by what their keys derive from, as long as these are its targets and this is what is told."""

    directory: Directory
    targets: list[ServingEngine]
    of: dict[_Keys, list[_At]]


class Controllers(Numbers):
    """See the module. Belongs to the event loop."""

    by_url = parts_by("controller", ControllerLink, lambda self: {one.url: one for one in self._order})

    def __init__(
        self,
        settings: GatewayControllersSettings,
        in_file: ClusterKeys | None,
        listener: Listener,
        fleet: Fleet,
        supervisor: Supervisor,
        now_s: Callable[[], float],
    ) -> None:
        """`in_file`: the keys of `curve_file`. `listener`: of this gateway's HTTP port.

        Raises ConfigError if the key of this user cannot be kept, and Unavailable if a controller's URL is not an
        endpoint.
        """
        self._settings = settings
        self._default_name = NOT_IN_A_NAME.sub("-", f"{platform.node()}-{listener.port}")[:64]
        self._name = settings.name or self._default_name
        self._port = listener.port
        self._fleet = fleet
        self._supervisor = supervisor
        self._secret = new_secret()
        self._shared: SharedKey | None = None
        self._keys = self._keys_of(settings, in_file)
        self._now_s = now_s
        self._links = Links(asyncio.get_running_loop())
        self._directory: Directory | None = None
        """What a controller told last."""
        self.following = Following(self._links, supervisor, now_s)
        self._of: dict[str, tuple[ControllerLink, asyncio.Task[None]]] = {}
        self._order: list[ControllerLink] = []
        self._attached: dict[str, _Attached] = {}
        """By model."""
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="kv-keys", initializer=name_thread)
        self.replicas = Replicas(lambda: self._order, supervisor, self._hashing, now_s)
        self.numbers: Callable[[], tuple[str, int, int]] = lambda: ("", 0, 0)
        """Policy, requests under way and all requests, for heartbeats."""
        self._have(settings.urls)

    def set(self, settings: GatewayControllersSettings, in_file: ClusterKeys | None) -> None:
        """Hear exactly these controllers from now on. Raises as the constructor."""
        keys = self._keys_of(settings, in_file)
        if keys != self._keys:
            self._have([])
        self._settings, self._keys = settings, keys
        self._name = settings.name or self._default_name
        self._have(settings.urls)

    def _keys_of(self, settings: GatewayControllersSettings, in_file: ClusterKeys | None) -> ClusterKeys:
        """The keys of a file, of this user, or open ones; those that no file has are made once. Raises ConfigError."""
        if in_file is not None:
            return in_file
        if settings.insecure or not settings.urls:
            return open_keys(self._secret)
        if self._shared is None:
            self._shared = SharedKey(FIELD)
            self._supervisor.spawn(self._shared.keep(), "controllers-key")
        return self._shared.of_member(self._secret)

    async def told(self, wanted: Wanted) -> Wanted:
        """The same with what instances hold of the prompt."""
        directory = self._directory
        if directory is None:
            return wanted
        by_keys = self._engines(wanted, directory)
        copies: list[Copy] = []
        for keys, at in by_keys.items():
            kind = directory.kinds[keys.kind]
            assert kind is not None
            tags = await self._tags(kind, wanted, keys.adapter)
            holdings = await self.following.held(tags, kind.n_slices)
            most = len(tags) // TAG_BYTES // kind.n_slices
            n_targets = len(self._attached[wanted.model].targets)
            copies += copies_of(at, holdings, kind.chunk_tokens, most, directory, n_targets)
        return wanted._replace(held=tuple(copies)) if by_keys else wanted

    def _heard(self, directory: Directory) -> None:
        self._directory = directory
        # Without a key file, instances let in whoever has the key that this user's processes share.
        shared = self._shared if self._settings.curve_file == "" and not self._settings.insecure else None
        self.following.follow(directory.instances.values(), shared.keys if shared is not None else self._keys)

    def reads(self, wanted: Wanted, engine: ServingEngine, way: Way, life_s: float) -> None:
        """A request was sent to an engine that reads its prefix from a peer. `life_s`: measured life of a block."""
        directory = self._directory
        if directory is None or wanted.prompt is None:
            return
        now_s = self._now_s()
        for keys, at in self._engines(wanted, directory).items():
            kind = directory.kinds[keys.kind]
            if kind is None or all(one.engine is not engine for one in at):
                continue
            if any(one.engine is engine and one.served.instance == way.source for one in at):
                return  # its own server holds it
            held = {
                copy.engine for copy in wanted.held if copy.tier == "l1" and copy.tokens >= way.cached_tokens
            }
            has = {one.served.instance for one in at if one.engine is engine or one.engine.name in held}
            lacking: dict[str, float] = {}
            for other, served in at:
                name, queue_s = served.instance, other.load.queue_s(now_s)
                if served.reads_peers and name != way.source and name not in has:
                    lacking[name] = min(queue_s, lacking.get(name, queue_s))
            # All but the prompt's last token can be cached, so the last chunk may lack one.
            tokens = way.cached_tokens + (way.cached_tokens + 1 == len(wanted.prompt.tokens))
            request = self._request(wanted.prompt, keys.adapter)
            read = Read(wanted.prompt, kind, request, tokens, way.source, lacking)
            self.replicas.read(self._name, read, life_s)

    def _engines(self, wanted: Wanted, directory: Directory) -> dict[_Keys, list[_At]]:
        """The engines of the choice, with their instances, by what keys derive from; empty: ask nothing."""
        prompt = wanted.prompt
        if prompt is None or wanted.made_by:
            return {}
        targets = self._fleet.targets(wanted.model, ())
        if len(targets) < 2:
            return {}
        known = self._attached.get(wanted.model)
        if known is None or known.directory is not directory or known.targets != targets:
            if len(self._attached) >= MAX_MODELS:
                self._attached.clear()
            known = self._attached[wanted.model] = self._look_up(wanted.model, targets, directory)
        n_tokens = len(prompt.tokens)
        return {
            keys: at
            for keys, at in known.of.items()
            if (kind := directory.kinds[keys.kind]) is not None and n_tokens >= kind.chunk_tokens
        }

    def _look_up(self, model: str, targets: list[ServingEngine], directory: Directory) -> _Attached:
        """Which of a model's engines are attached where, and what their instances tell of loads."""
        found: dict[_Keys, list[_At]] = {}
        lora = self._fleet.adapter(model)
        for engine in targets:
            served = directory.instance(engine)
            if served is None:
                continue
            number = directory.kind(served, _names(engine, model))
            kind = directory.kinds[number] if number is not None else None
            if number is None or kind is None:
                continue
            adapter = directory.adapter(served, number, lora)
            if adapter is not None:
                found.setdefault(_Keys(number, adapter), []).append(_At(engine, served))
            for tier, path in kind.paths(served).items():
                self._fleet.load_rates.tell(engine.name, tier, path)
        return _Attached(directory, targets, dict(list(found.items())[:MAX_KINDS]))

    def _request(self, prompt: Prompt, adapter: str) -> RequestIdentity:
        """What decides the keys of a prompt's KV beside its engine's layout."""
        tenant = prompt.tenant or self._settings.tenant
        return RequestIdentity(adapter=adapter, tenant=tenant, salt=prompt.salt)

    async def _tags(self, kind: Kind, wanted: Wanted, adapter: str) -> bytes:
        prompt = wanted.prompt
        assert prompt is not None
        request = self._request(prompt, adapter)
        if len(prompt.tokens) <= INLINE_TOKENS:
            return kind.tags(prompt, request)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._hashing, kind.tags, prompt, request)

    def page(self) -> list[dict[str, Any]]:
        """The controllers, for operators, in the order in which copies are ordered from them."""
        return [link.page() for link in self._order]

    async def close(self) -> None:
        """Close all links, and end the tasks and the thread."""
        tasks = [task for _, task in self._of.values()]
        self._have([])
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.following.close()
        self._links.close()
        self._hashing.shutdown(wait=True, cancel_futures=True)

    def _beat(self) -> GatewayBeat:
        policy, in_flight, requests = self.numbers()
        return GatewayBeat(
            0, self._name, __version__, self._port, policy, len(self._fleet.engines),
            len([one for one in self._fleet.engines.values() if one.state is EngineState.UP]), in_flight, requests,
        )  # fmt: skip

    def _have(self, urls: Iterable[str]) -> None:
        """Have links to exactly these controllers.

        Each gateway has its own order of them.
        """
        wanted = list(urls)
        for url in [one for one in self._of if one not in wanted]:
            link, task = self._of.pop(url)
            task.cancel()
            link.close()
        for url in wanted:
            if url not in self._of:
                link = ControllerLink(url, self._links, self._keys, self._now_s, self._heard)
                task = self._supervisor.spawn(link.keep(self._beat), f"controller {url}")
                self._of[url] = link, task
        if not wanted:
            self._directory = None
            self.following.follow_none()
        self._order = sorted((link for link, _ in self._of.values()), key=self._rank)

    def _rank(self, link: ControllerLink) -> bytes:
        return hashlib.blake2b(f"{self._name} {link.url}".encode(), digest_size=8).digest()


def _names(engine: ServingEngine, model: str) -> list[str]:
    """Names under which an engine's model, or the only one that it has, may be known."""
    entries = [engine.models[model]] if model in engine.models else list(engine.models.values())
    names = [entry.get(field) for entry in entries for field in ("id", "root", "parent")]
    return [name for name in names if isinstance(name, str) and name]


def copies_of(
    at: list[_At],
    holdings: list[Holding],
    chunk_tokens: int,
    most_chunks: int,
    directory: Directory,
    n_targets: int = 0,
) -> list[Copy]:
    """What engines can have of a prompt by their instances' L1 and L2, and from the peer that holds most.

    `most_chunks`: how many were asked for.  `n_targets`: how many engines the choice is among; if all of them read
    peers, one copy of the peer's stands for all, which a large fleet is scored with far sooner.
    """
    rows = {row.instance: row for row in holdings}
    in_media = [
        (frozenset(one.media.values()), row)
        for row in holdings
        if row.shared_chunks and (one := directory.instances.get(row.instance)) is not None and one.media
    ]
    copies: list[Copy] = []
    own_tokens: dict[str, int] = {}
    """By engine: what it can have without peers."""
    for engine, served in at:
        row = rows.get(served.instance)
        in_l1 = min(row.l1_chunks, most_chunks) * chunk_tokens if row is not None else 0
        own = min(row.own_chunks, most_chunks) * chunk_tokens if row is not None else 0
        if row is not None and in_l1:
            copies.append(_copy(engine.name, "l1", in_l1, row))
        # What another instance has put into a medium can be loaded by all that have this medium.
        others = [other for media, other in in_media if media <= set(served.media.values())]
        most = max(others, key=lambda other: other.shared_chunks, default=None)
        if most is not None and (found := min(most.shared_chunks, most_chunks) * chunk_tokens) > own:
            own, row = found, most
        if row is not None and own > in_l1:
            copies.append(_copy(engine.name, "l2", own, row))
        own_tokens[engine.name] = own
    givers = [
        row
        for row in rows.values()
        if row.l1_chunks and (one := directory.instances.get(row.instance)) is not None and one.gives_to_peers
    ]
    best = max(givers, key=lambda row: row.l1_chunks, default=None)
    if best is not None:
        tokens = min(best.l1_chunks, most_chunks) * chunk_tokens
        if len(at) == n_targets and all(served.reads_peers for _, served in at):
            return [*copies, _copy("", "peer", tokens, best)]
        for engine, served in at:
            farther = served.instance != best.instance and tokens > own_tokens[engine.name]
            if served.reads_peers and farther:
                copies.append(_copy(engine.name, "peer", tokens, best))
    return copies


def _copy(engine: str, tier: Tier, tokens: int, row: Holding) -> Copy:
    return Copy(
        engine=engine,
        tier=tier,
        tokens=tokens,
        certainty="degraded" if row.unconfirmed_ms else "exact",
        age_s=row.unconfirmed_ms / 1_000,
        source=row.instance,
    )
