"""Sends the prompts of split requests to the engines that prefill them.

    begin ──▶ sent ──▶ computed        or refused, unreachable, broken, late, cancelled: counted, noted in the decision

A leg is a request for one token, with the client's body or, if known, the prompt's token ids.  It ends with the
client's request at the latest: the connection is closed, and the engine stops its work.  Whatever its outcome, the
answering engine computes the tokens whose KV it did not get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.gateway.choosing import Choice
from kvstrata.gateway.engine_http import HttpClient, LinkBroken, Unreachable
from kvstrata.gateway.handover.contracts import Fields, Handover
from kvstrata.gateway.marks import CANCELLED
from kvstrata.observability.numbers import Numbers, counter, gauge

if TYPE_CHECKING:
    from kvstrata.gateway.parts import Parts
    from kvstrata.gateway.request import Request

COMPUTED = "computed"
UNKNOWN_S = 10.0
"""Assumed time of a prompt at an engine whose rate has not been measured."""
COMPLETIONS = "/v1/completions"
SAME_BODY = frozenset((COMPLETIONS, "/v1/chat/completions", "/v1/messages"))
"""Paths whose body can be sent as the leg if the token ids are unknown."""
ANSWER_ONLY = frozenset(
    ("stream_options", "n", "logprobs", "top_logprobs", "min_tokens", "max_completion_tokens", "response_format",
     "structured_outputs", "request_id", "kv_transfer_params", "cache_salt", "stop", "stop_token_ids",
     "stop_sequences")
)  # fmt: skip
"""Fields that are removed from a leg's body, since they concern the answer only, or are set by the gateway."""
MAX_ANSWER_BYTES = 8 << 20
"""Maximum size of a leg's response, in which NixlConnector lists each block."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    kv_transfer_params: Fields | None = None
    choices: list[_Choice] = []
    stop_reason: str | None = None

    def returned(self) -> Fields | None:
        """The response's `kv_transfer_params`; None: the answer ended by a stop, so the KV may not be kept."""
        ends = (self.stop_reason, *(one.finish_reason for one in self.choices))
        return self.kv_transfer_params or ({} if "length" in ends or "max_tokens" in ends else None)


_answer = msgspec.json.Decoder(_Answer).decode


class Legs(Numbers):
    """The legs of all requests. Belongs to the event loop."""

    ended = counter(
        "Prompts that one engine computed for another, by outcome: `computed`, `cancelled` (the request ended before), "
        "`refused` by the engine, `unreachable`, `broken` (the connection ended early), `late`.",
        "outcome",
        name="prefills",
    )
    under_way = gauge(
        "Prompts that one engine computes for another now.", lambda self: len(self.tasks), name="prefills_now"
    )

    def __init__(self, asker: HttpClient) -> None:
        self.parts: Parts
        """Set before the first request."""
        self._asker = asker
        self.tasks: dict[asyncio.Task[Fields | None], None] = {}

    async def begin(self, request: Request, choice: Choice, body: bytes, more: Fields) -> Fields:
        """Send a request's prompt to the prefilling engine; returns the `kv_transfer_params` of the answering engine.

        `more`: fields that the bodies for both engines get.
        """
        leg = choice.prefill
        assert leg is not None and leg.way is not None
        at = leg.engine.load.instance
        source = at if at != choice.engine.load.instance else ""
        measured = self.parts.fleet.rates.samples(leg.engine.load.name)
        expected_s = leg.way.ttft_s if measured else UNKNOWN_S
        handover = Handover(choice.wanted.contract, leg.engine, expected_s, source)
        path, sent = leg_of(request, choice, body, handover.for_prefill(), more)
        task = asyncio.ensure_future(self._run(request, choice, path, sent))
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        request.leg = task
        return await handover.for_answer(self._asker, task)

    async def close(self) -> None:
        """Cancel all legs."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: Request, choice: Choice, path: str, body: bytes) -> Fields | None:
        outcome, answer, parts = CANCELLED, _Answer(), self.parts
        leg = choice.prefill
        assert leg is not None
        try:
            async with asyncio.timeout(parts.settings.timeouts.silence_s):
                status, raw = await self._asker.ask(
                    leg.engine.place.address,
                    "POST",
                    path,
                    self._headers(request, leg),
                    body,
                    most_bytes=MAX_ANSWER_BYTES,
                )
            if status == 200:
                answer, outcome = _answer(raw), COMPUTED
            else:
                outcome = "refused"
        except Unreachable:
            outcome = "unreachable"
        except (LinkBroken, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            outcome = "broken"
        except TimeoutError:
            outcome = "late"
        finally:
            if outcome in ("unreachable", "broken"):
                parts.suspect(leg.engine)
            self.ended[outcome] += 1
            if choice.kept is not None:
                choice.kept.prefill = outcome
            parts.choosing.prefilled(choice, computed=outcome == COMPUTED)
        if answer.usage is not None and answer.usage.prompt_tokens > 0:
            cached = answer.usage.prompt_tokens_details
            if cached is not None and cached.cached_tokens is not None:
                parts.choosing.learn(leg, answer.usage.prompt_tokens, cached.cached_tokens)
        return answer.returned()

    def _headers(self, request: Request, leg: Choice) -> Mapping[str, str]:
        headers = {"content-type": "application/json", "x-request-id": leg.wanted.word}
        own = request.head.headers.get(b"authorization", b"").decode("latin-1")
        if key := leg.engine.place.api_key:
            headers["authorization"] = f"Bearer {key}"
        elif own and not self.parts.door.needs_keys:
            headers["authorization"] = own
        if leg.engine.rank is not None:
            headers["x-data-parallel-rank"] = str(leg.engine.rank)
        return headers


def leg_of(request: Request, choice: Choice, body: bytes, params: Fields, more: Fields) -> tuple[str, bytes]:
    """Path and body of the request to the prefilling engine."""
    prompt, asked = choice.wanted.prompt, request.asked
    both = {**more.get("kv_transfer_params", {}), **params}
    fields: dict[str, Any] = {"max_tokens": 1, "stream": False}
    if both:
        fields["kv_transfer_params"] = both
    if salt := more.get("cache_salt") or asked.salt:
        fields["cache_salt"] = salt
    if prompt is not None:
        if asked.model:
            fields["model"] = asked.model
        return COMPLETIONS, msgspec.json.encode({"prompt": prompt.tokens.tolist(), **fields})
    kept = {name: value for name, value in _fields(body).items() if name not in ANSWER_ONLY}
    return request.head.path, msgspec.json.encode({**kept, **fields})
