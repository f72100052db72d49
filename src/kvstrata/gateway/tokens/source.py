"""Finds the token ids of requests' prompts, under a deadline.

    given as ids ─▶ own tokenizer, for features on which all engines agree with it ─▶ an engine's /render ─▶ unknown

With `pass_ids` the ids of a chat, whatever their source, are sent to the engine if it accepts ids.

Invariants
1. A tokenizer's ids are given only for prompts with features on which each serving engine of the model agrees with it.
2. A request waits for at most `deadline_ms`; the tokenization continues, and its cached result helps the next turn.
3. The prompt lengths that engines report are compared with the gateway's.  A model whose ids are wrong repeatedly is
   degraded: the ids of its prompts count as unknown until the settings are reloaded.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvstrata.config.gateway_model import TokenSettings
from kvstrata.gateway.engine_http import HttpClient
from kvstrata.gateway.fleet import EngineState, Fleet, ServingEngine
from kvstrata.gateway.picker.taskless import in_task
from kvstrata.gateway.tokens.engines import (
    REFUSED,
    Agreed,
    NoResponse,
    Verdict,
    asks,
    taken,
    tokenized,
    verify,
)
from kvstrata.gateway.tokens.prompts import CHAT, COMPLETIONS, FEATURES, prompt_in
from kvstrata.gateway.tokens.tokenizer import Memory, OwnTokenizer
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter

THREADS = 2
"""Number of threads that tokenise."""
MAX_WAITING = 256
"""Maximum number of prompts at the threads; the ids of further ones are unknown."""
MISTAKES = 3
MISTAKEN_SHARE = 0.01
"""A model is degraded after MISTAKES wrong lengths, if they are at least MISTAKEN_SHARE of those compared."""
VERIFY_S = 30.0
"""Maximum time to verify one engine; after that it is tried again."""
RENDERED = frozenset((CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"))
REFUSED_S = 60.0
"""Time after which an engine that has refused /render is asked again."""
OTHER = "other"


class Known(NamedTuple):
    """The token ids of a prompt, and their source."""

    ids: array[int] | None
    how: str
    """`tokenizer`, `render`, or the reason why the ids are unknown."""
    passes: bool = False
    """Whether the ids are passed to engines that accept ids."""


class Tokens(Numbers):
    """The source of prompts' token ids. Belongs to the event loop."""

    counts = counter(
        "Text prompts by the source of their token ids: our own `tokenizer`, an engine's `render`, or none: `late`, "
        "`unverified` (an engine's ids differ), `unsupported` (a part that only the engine can tokenize), "
        "`degraded`, `busy`, `unknown_model` (no tokenizer for the model).",
        "model",
        "how",
        name="prompts",
    )
    mistakes = counter(
        "Prompts for which an engine reports a different number of tokens than the gateway computed.",
        "model",
        "engine",
        name="mistaken_tokens",
    )

    def __init__(
        self,
        settings: TokenSettings,
        tokenizers: dict[str, OwnTokenizer],
        fleet: Fleet,
        asker: HttpClient,
        now_s: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.tokenizers = tokenizers
        """By model."""
        self._fleet = fleet
        self._asker = asker
        self._now_s = now_s
        self.memory = Memory()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._waiting = 0
        self._verified: dict[tuple[str, str], tuple[ServingEngine, int, Verdict]] = {}
        """By engine's name and model: the engine, its generation, and the verdict for this generation."""
        self._refused_s: dict[str, float] = {}
        """By engine: time of its last refusal of /render."""
        self._compared: collections.Counter[str] = collections.Counter()
        self._wrong: collections.Counter[str] = collections.Counter()
        """By model, since the last reload: number of compared prompt lengths, and of the wrong ones among them."""
        self.degraded: set[str] = set()
        self._log = EventLog("tokens")

    # -- requests ----------------------------------------------------------------------------------------------

    async def of(self, path: str, body: bytes, model: str, tenant: str) -> Known:
        """The token ids of a request's prompt; unknown if they are not found within `deadline_ms`."""
        base = self._base(model)
        known = Known(None, "degraded" if base in self.degraded else "unknown_model")
        renders = self.settings.render and path in RENDERED
        if base not in self.degraded and (renders or base in self.tokenizers):
            await in_task()
            try:
                async with asyncio.timeout(self.settings.deadline_ms / 1_000):
                    if base in self.tokenizers:
                        known = await self._tokenized(path, body, base, tenant)
                    if known.ids is None and renders:
                        known = await self._rendered(path, body, model) or known
            except TimeoutError:
                known = known if known.ids is not None else Known(None, "late")
        self.counts[self._name(base), known.how] += 1
        if known.ids is None:
            return known
        # With parameters of the client's in the body, the gateway adds none of its own.
        passes = self.settings.pass_ids and path == CHAT and b'"kv_transfer_params"' not in body
        return known._replace(passes=passes and bool(known.ids))

    def takes_ids(self, engine: ServingEngine, model: str) -> bool:
        """Whether an engine accepts the ids of a model's chats from the gateway."""
        verdict = self._verdict(engine.process, self._base(model) or model)
        return verdict is not None and verdict.takes_ids

    def reported(self, model: str, engine: str, ours: int, theirs: int) -> None:
        """Compare a prompt's length by the ids from `of` (`ours`) with the engine's report (`theirs`)."""
        base = self._base(model)
        self._compared[base] += 1
        if ours == theirs:
            return
        self._wrong[base] += 1
        self.mistakes[self._name(base), engine] += 1
        wrong = self._wrong[base]
        said = {"model": base, "engine": engine, "tokens": ours, "reported": theirs}
        self._log.repeated(logging.WARNING, f"{base}/{engine}", "prompt_tokens_differ", **said)
        if base not in self.degraded and wrong >= max(MISTAKES, MISTAKEN_SHARE * self._compared[base]):
            self.degraded.add(base)
            note = "token ids of this model's prompts count as unknown until the settings are read again"
            self._log.error(
                "tokens_degraded", model=base, mistakes=wrong, compared=self._compared[base], note=note
            )

    async def _tokenized(self, path: str, body: bytes, model: str, tenant: str) -> Known:
        if path not in (CHAT, COMPLETIONS):
            return Known(None, "unsupported")
        agreed = self.agreed(model)
        if not agreed:
            return Known(None, "unverified")
        if self._waiting >= MAX_WAITING:
            return Known(None, "busy")
        self._waiting += 1
        work = self._pool.submit(_work, self.tokenizers[model], agreed, path, body, self.memory, tenant)
        waits = asyncio.ensure_future(asyncio.wrap_future(work))
        waits.add_done_callback(self._worked)
        return await asyncio.shield(waits)  # the work continues if the request stops waiting

    def _worked(self, work: asyncio.Future[Known]) -> None:
        self._waiting -= 1
        if not work.cancelled():
            work.exception()  # mark it as retrieved; a request that still waits gets it

    async def _rendered(self, path: str, body: bytes, model: str) -> Known | None:
        """The ids from an engine's /render; None if no engine renders the request."""
        now_s = self._now_s()
        for engine in self._fleet.serving(model):
            if now_s - self._refused_s.get(engine.name, float("-inf")) < REFUSED_S:
                continue
            try:
                status, answer = await asks(self._asker, engine.place)(f"{path}/render", body)
            except NoResponse:
                return None
            if status == 200:
                ids = await asyncio.to_thread(tokenized, answer)
                return Known(ids, "render" if ids is not None else "unsupported")
            if status not in REFUSED:
                return None  # the engine will report to the client what is wrong with the request
            self._refused_s[engine.name] = now_s
            self._log.repeated(
                logging.WARNING, engine.name, "render_refused", engine=engine.name, status=status
            )
        return None

    def _base(self, model: str) -> str:
        """The model whose tokenizer applies: the model itself, or the base model of an adapter; empty: unknown."""
        if model in self.tokenizers:
            return model
        if not model:  # engines then use their own model
            served = {name for name in self._fleet.models() if name in self.tokenizers}
            return next(iter(served)) if len(served) == 1 == len(self._fleet.models()) else ""
        return self._fleet.parent(model)

    def _name(self, base: str) -> str:
        """A model's label in counters, whose number is bounded."""
        return base if base in self.tokenizers else OTHER

    # -- verification ------------------------------------------------------------------------------------------

    def _verdict(self, engine: ServingEngine, model: str) -> Verdict | None:
        """The verdict on an engine; None: it was not compared since it last started to serve."""
        found = self._verified.get((engine.name, model))
        return found[2] if found is not None and found[:2] == (engine, engine.generation) else None

    def agreed(self, model: str) -> Agreed:
        """The features on which all serving engines of a model agree with its tokenizer."""
        verdicts = [self._verdict(engine, model) for engine in self._fleet.serving(model)]
        each = [one.agreed if one is not None else frozenset() for one in verdicts]
        return frozenset.intersection(*each) if each else frozenset()

    async def keep_verified(self, every_s: Callable[[], float]) -> None:
        """Call `verify` every `every_s()`, until cancelled."""
        while True:
            await asyncio.sleep(every_s())
            await self.verify()

    async def verify(self) -> None:
        """Compare the tokenizers with all engines that were not compared yet."""
        passes_rendered = self.settings.render and self.settings.pass_ids
        await asyncio.gather(
            *(
                self._verify(engine, model)
                for engine in self._fleet.engines.values()
                if engine.state is EngineState.UP
                for model in engine.models
                if model in self.tokenizers or (passes_rendered and self._base(model) == model)
                if self._verdict(engine, model) is None
            )
        )
        names = self._fleet.engines.keys()
        self._verified = {name: one for name, one in self._verified.items() if name[0] in names}

    async def _verify(self, engine: ServingEngine, model: str) -> None:
        generation, tokenizer = engine.generation, self.tokenizers.get(model)
        ask, verdict = asks(self._asker, engine.place), Verdict(frozenset(), {})
        try:
            async with asyncio.timeout(VERIFY_S):
                if tokenizer is not None:
                    verdict = await verify(ask, model, tokenizer)
                if self.settings.pass_ids:
                    takes_ids = await taken(ask, model, tokenizer, renders=self.settings.render)
                    verdict = verdict._replace(takes_ids=takes_ids)
        except (NoResponse, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            says = {"engine": engine.name, "model": model, "reason": reason}
            self._log.repeated(logging.WARNING, engine.name, "tokens_not_verified", **says)
            return
        if self.tokenizers.get(model) is not tokenizer:
            return
        self._verified[engine.name, model] = engine, generation, verdict
        says = {"engine": engine.name, "model": model}
        features = ",".join(_features(verdict.agreed))
        self._log.info("tokens_verified", **says, features=features, takes_ids=verdict.takes_ids)
        for feature, reason in verdict.reasons.items():
            self._log.warning("tokens_differ", **says, feature=feature, reason=reason)

    # -- the rest ----------------------------------------------------------------------------------------------

    def set(self, settings: TokenSettings, tokenizers: dict[str, OwnTokenizer]) -> None:
        """Apply new settings. If they differ, all engines are compared again."""
        if (settings, tokenizers) != (self.settings, self.tokenizers):
            self._verified.clear()
        self.tokenizers = tokenizers
        self.settings = settings
        self.degraded.clear()
        self._compared.clear()
        self._wrong.clear()

    async def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def features(self) -> list[tuple[str, str, str, bool]]:
        """Rows of (model, engine, feature, whether the engine agrees)."""
        return [
            (model, engine, feature, feature in _features(verdict.agreed))
            for (engine, model), (_, _, verdict) in sorted(self._verified.items(), key=lambda item: item[0])
            for feature in FEATURES
        ]

    def page(self) -> dict[str, Any]:
        """The state for the status page."""
        return {
            "models": {
                model: {
                    "cut": tokenizer.cut,
                    "features": _features(self.agreed(model)),
                    "degraded": model in self.degraded,
                }
                for model, tokenizer in self.tokenizers.items()
            },
            "prompts": {f"{model}/{how}": count for (model, how), count in sorted(self.counts.items())},
            "cache": {"entries": len(self.memory), "bytes": self.memory.bytes},
        }


def _work(
    tokenizer: OwnTokenizer, agreed: Agreed, path: str, body: bytes, memory: Memory, tenant: str
) -> Known:
    """Tokenise a prompt. Runs on a thread."""
    prompt = prompt_in(path, body)
    if prompt is None:
        return Known(None, "unsupported")
    for parted in (False, True):
        if all((feature, parted) in agreed for feature in prompt.features):
            ids = tokenizer.ids_of(prompt, parted=parted, memory=memory, tenant=tenant)
            return Known(ids, "tokenizer" if ids is not None else "unsupported")
    return Known(None, "unverified")


def _features(agreed: Agreed) -> list[str]:
    return sorted({feature for feature, _ in agreed})
