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
import contextlib
import logging
import platform
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvstrata import __version__
from kvstrata.config.gateway_model import GatewayControllersSettings
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.gateway.choosing import Wanted
from kvstrata.gateway.controllers.directory import MAX_KINDS, Directory, Kind
from kvstrata.gateway.controllers.following import Following, Holding
from kvstrata.gateway.fleet import EngineState, Fleet, ServingEngine
from kvstrata.gateway.metering import Measured
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.model import Certainty, Copy, Tier
from kvstrata.naming import name_thread
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, gauge, parts_by
from kvstrata.process.listen import Listener
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import TAG_BYTES, GatewayBeat, GatewayHeard, Hinted, Served
from kvstrata.rpc.zmq_curve import ClusterKeys, SharedKey, new_secret, open_keys
from kvstrata.rpc.zmq_link import Links
from kvstrata.types import NOT_IN_A_NAME, RequestIdentity, next_of

FIELD = "controllers.curve_file"
BEAT_S, BEAT_MAX_S = 0.5, 30.0
"""Bounds of the interval that a controller names for heartbeats."""
ANSWER_S = 2.0
"""Time for the answer to a heartbeat."""
INLINE_TOKENS = 8_192
MAX_MODELS = 256


class _At(NamedTuple):
    """An engine and its instance."""

    engine: ServingEngine
    served: Served


Groups = dict[tuple[int, str], list[_At]]
"""A model's engines by what the keys of their KV are derived from beside the prompt: the number of the kind of KV, and
the adapter as in RequestIdentity."""


class ControllerLink(Numbers):
    """The link to one controller: heartbeats, whose answers tell of instances."""

    up = gauge("1 while a controller is connected, else 0.", name="controller_up")

    def __init__(self, url: str, links: Links, keys: ClusterKeys) -> None:
        """Raises Unavailable if `url` is not an endpoint."""
        self.url, self.up = url, False
        self.heard_s: float | None = None
        self.known: Directory | None = None
        """What it told last, and when."""
        self._wake = asyncio.Event()
        self._log = EventLog("controllers")
        self._link = links.ask(url, keys=keys, changed=self._changed, refused=self._refused)
        self.close = self._link.close

    async def keep(
        self, beat: Callable[[], Awaitable[GatewayBeat]], told: Callable[[Directory], None]
    ) -> None:
        """Send heartbeats until cancelled; `told` gets each answer."""
        loop, beat_s = asyncio.get_running_loop(), ANSWER_S
        while True:
            self._wake.clear()
            if self.up:
                try:
                    heard = await self._link.ask(await beat(), GatewayHeard, ANSWER_S)
                except (ClusterFailure, Unavailable) as error:
                    why = error.message
                    self._log.repeated(
                        logging.WARNING, self.url, "controller_refuses", url=self.url, reason=why
                    )
                else:
                    beat_s = min(max(BEAT_S, heard.beat_ms / 1000), BEAT_MAX_S)
                    self.known, self.heard_s = Directory(heard), loop.time()
                    told(self.known)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(beat_s):
                    await self._wake.wait()

    def page(self) -> dict[str, Any]:
        """State and counts, for operators."""
        ago_s = None if self.heard_s is None else asyncio.get_running_loop().time() - self.heard_s
        return {
            "url": self.url,
            "connected": self.up,
            "told_ago_s": None if ago_s is None else round(ago_s, 3),
            "instances": 0 if self.known is None else len(self.known.instances),
            "engines": 0 if self.known is None else len(self.known.of_url),
            "garbage": self._link.garbage_count,
        }

    def _changed(self, up: bool) -> None:
        self.up = up
        if up:
            self._wake.set()

    def _refused(self) -> None:
        why = "it ends the handshake: it does not list this gateway's key, or has keys of another cluster"
        says = {"url": self.url, "why": why}
        self._log.repeated(logging.WARNING, f"{self.url} keys", "controller_has_other_keys", **says)


class Controllers(Numbers):
    """See the module. Belongs to the event loop."""

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
        """`in_file`: the keys of `curve_file`. `listener`: of this gateway's HTTP port. `numbers`: policy, requests
        under way, all requests and what was measured, for heartbeats.

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
        self._now_s, self._numbers = now_s, numbers
        self._links = Links(asyncio.get_running_loop())
        self._directory: Directory | None = None
        """What a controller told last."""
        self.following = Following(self._links, supervisor, now_s)
        self._of: dict[str, tuple[ControllerLink, asyncio.Task[None]]] = {}
        self._groups: dict[str, tuple[Directory, list[ServingEngine], Groups]] = {}
        """By model, as long as this is what was told, and these are its targets."""
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="kv-keys", initializer=name_thread)
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
        targets, groups = self._engines(wanted, directory)
        copies: list[Copy] = []
        for (number, adapter), at in groups.items():
            kind = directory.kinds[number]
            assert kind is not None
            tags = await self._tags(kind, wanted, adapter)
            holdings = await self.following.held(tags, kind.n_slices)
            most = len(tags) // TAG_BYTES // kind.n_slices
            copies += copies_of(at, holdings, kind.chunk_tokens, most, len(targets))
        return wanted._replace(held=tuple(copies)) if groups else wanted

    def _heard(self, directory: Directory) -> None:
        self._directory = directory
        self._fleet.attach(
            lambda engine: served.instance if (served := directory.instance(engine)) else "",
            peers=len(directory.instances) > 1,
        )
        # Without a key file, instances let in whoever has the key that this user's processes share.
        shared = self._shared if self._settings.curve_file == "" and not self._settings.insecure else None
        self.following.follow(directory.instances.values(), shared.keys if shared is not None else self._keys)

    def ended(self, engine: ServingEngine, request_id: str, reason: str) -> None:
        """An engine's answer has ended, for a `reason` in the API's word: let its instance know what comes next."""
        served = self._directory.instance(engine) if self._directory is not None and request_id else None
        with contextlib.suppress(ValueError):
            if served is not None and (said := next_of(reason)):
                self.following.hint(served.instance, Hinted(request_id, said))

    def _engines(self, wanted: Wanted, directory: Directory) -> tuple[list[ServingEngine], Groups]:
        """The engines of the choice, and those that are attached to an instance; no groups: look nothing up."""
        prompt = wanted.prompt
        if prompt is None or wanted.made_by:
            return [], {}
        targets = self._fleet.targets(wanted.model).targets
        if len(targets) < 2:
            return targets, {}
        known = self._groups.get(wanted.model)
        if known is None or known[0] is not directory or known[1] != targets:
            if len(self._groups) >= MAX_MODELS:
                self._groups.clear()
            known = directory, targets, self._look_up(wanted.model, targets, directory)
            self._groups[wanted.model] = known
        n_tokens = len(prompt.tokens)
        return targets, {
            keys: at
            for keys, at in known[2].items()
            if (kind := directory.kinds[keys[0]]) is not None and n_tokens >= kind.chunk_tokens
        }

    def _look_up(self, model: str, targets: list[ServingEngine], directory: Directory) -> Groups:
        """Which of a model's engines are attached where; takes what their instances tell of loads."""
        found: Groups = {}
        lora = self._fleet.adapter(model)
        for engine in targets:
            served = directory.instance(engine)
            number = directory.kind(served, _names(engine, model)) if served is not None else None
            if served is None or number is None or (kind := directory.kinds[number]) is None:
                continue
            adapter = directory.adapter(served, number, lora)
            if adapter is not None:
                found.setdefault((number, adapter), []).append(_At(engine, served))
            for tier, path in kind.paths(served).items():
                self._fleet.load_rates.tell(engine.name, tier, path)
        return dict(list(found.items())[:MAX_KINDS])

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
        """The controllers, for operators."""
        return [link.page() for link, _ in self._of.values()]

    async def close(self) -> None:
        """Close all links, and end the tasks and the thread."""
        tasks = [task for _, task in self._of.values()]
        self._have([])
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.following.close()
        self._links.close()
        self._hashing.shutdown(wait=True, cancel_futures=True)

    async def _beat(self) -> GatewayBeat:
        policy, in_flight, requests, told = await self._numbers()
        return GatewayBeat(
            0, self._name, __version__, self._port, policy, len(self._fleet.engines),
            len([one for one in self._fleet.engines.values() if one.state is EngineState.UP]), in_flight, requests,
            *told,
        )  # fmt: skip

    def _have(self, urls: Iterable[str]) -> None:
        """Have links to exactly these controllers."""
        wanted = list(urls)
        for url in [one for one in self._of if one not in wanted]:
            link, task = self._of.pop(url)
            task.cancel()
            link.close()
        for url in wanted:
            if url not in self._of:
                link = ControllerLink(url, self._links, self._keys)
                task = self._supervisor.spawn(link.keep(self._beat, self._heard), f"controller {url}")
                self._of[url] = link, task
        if not wanted:
            self._directory = None
            self.following.follow_none()


def _names(engine: ServingEngine, model: str) -> list[str]:
    """Names under which an engine's model, or the only one that it has, may be known."""
    entries = [engine.models[model]] if model in engine.models else list(engine.models.values())
    names = [entry.get(field) for entry in entries for field in ("id", "root", "parent")]
    return [name for name in names if isinstance(name, str) and name]


def copies_of(
    at: list[_At], holdings: list[Holding], chunk_tokens: int, most_chunks: int, n_targets: int = 0
) -> list[Copy]:
    """What engines can have of a prompt by their instances' L1 and L2, and from the peer that holds most.

    `most_chunks`: how many were asked for.  `n_targets`: how many engines the choice is among; if all of them read
    peers, one copy of the peer's stands for all, which a large fleet is scored with far sooner.
    """

    def copy(engine: str, tier: Tier, tokens: int, row: Holding) -> Copy:
        certainty: Certainty = "degraded" if row.unconfirmed_ms else "exact"
        source, age_s = row.served.instance, row.unconfirmed_ms / 1_000
        return Copy(engine=engine, tier=tier, tokens=tokens, certainty=certainty, age_s=age_s, source=source)

    def tokens(chunks: int) -> int:
        return min(chunks, most_chunks) * chunk_tokens

    rows = {row.served.instance: row for row in holdings}
    in_media = [(set(row.served.media.values()), row) for row in holdings if row.chunks.shared]
    copies: list[Copy] = []
    own_tokens: dict[str, int] = {}
    """By engine: what it can have without peers."""
    for engine, served in at:
        row, in_l1, own = rows.get(served.instance), 0, 0
        if row is not None:
            in_l1, own = tokens(row.chunks.in_l1), tokens(row.chunks.anywhere)
            if in_l1:
                copies.append(copy(engine.name, "l1", in_l1, row))
        # What another instance has put into a medium can be loaded by all that have this medium.
        others = [other for media, other in in_media if media and media <= set(served.media.values())]
        most = max(others, key=lambda other: other.chunks.shared, default=None)
        if most is not None and (found := tokens(most.chunks.shared)) > own:
            own, row = found, most
        if row is not None and own > in_l1:
            copies.append(copy(engine.name, "l2", own, row))
        own_tokens[engine.name] = own
    givers = [row for row in holdings if row.chunks.in_l1 and row.served.gives_to_peers]
    best = max(givers, key=lambda row: row.chunks.in_l1, default=None)
    if best is None:
        return copies
    theirs = tokens(best.chunks.in_l1)
    if len(at) == n_targets and all(served.reads_peers for _, served in at):
        return [*copies, copy("", "peer", theirs, best)]
    return copies + [
        copy(engine.name, "peer", theirs, best)
        for engine, served in at
        if served.reads_peers and served.instance != best.served.instance and theirs > own_tokens[engine.name]
    ]
