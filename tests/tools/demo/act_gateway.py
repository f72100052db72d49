"""Act 5: a gateway before two engines, each with its own server; a conversation survives its engine."""

from __future__ import annotations

import contextlib
import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness import vllm_model
from tests.harness.cluster import Cluster
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.vllm_api import VllmApi
from tests.tools.demo.common import CHUNK_TOKENS, L1_MB, Table, fitting_l1_mb, say, stored_chunks, wait_for

TURN_TOKENS, NEW_TOKENS = 700, 16
"""All that is asked, and computed again for comparison, fits L1, so that nothing of a conversation is evicted."""
CASES_5 = (
    "a conversation's first turn",
    "its second turn",
    "another conversation",
    "the first one's engine killed (SIGKILL): its third turn",
    "its fourth turn",
)


class Turn(NamedTuple):
    """What an engine answered."""

    engine: str
    ttft_s: float
    cached_tokens: int
    tokens: list[int]


def act_5(folder: Path, table: Table, size: str) -> None:
    """A gateway, a controller, two servers and two real vLLM."""
    say("A gateway before two engines, each with a server; the servers read from each other")
    l1_mb = fitting_l1_mb(L1_MB, 160)
    model = vllm_model.ensure_model(size)
    # Long: only chunks that are loaded within these times are hits, so a slow machine gets more than enough.
    settings = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "3000"}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(folder, l1_mb=l1_mb, n_servers=2, settings=settings))
        engines = []
        for at, server in enumerate(cluster.servers):
            extra = server.connector_config(
                **{"kvstrata.lookup_timeout_ms": 30_000, "kvstrata.enable_kv_events": True}
            )
            flags = ("--dtype", vllm_model.dtype_of(size), "--enable-prompt-tokens-details", *_events())
            begun_s = time.monotonic()
            engines.append(
                stack.enter_context(VllmApi(model, folder / f"vllm-{at}", extra=extra, flags=flags))
            )
            say(f"  vLLM started in {time.monotonic() - begun_s:.0f} s")
        urls = [engine.url for engine in engines]
        gateway = stack.enter_context(GatewayProcess(folder / "gateway", urls, policy="ttft"))
        say(f"  gateway ready at {gateway.url}, policy ttft")
        _Conversations(table, cluster, gateway, engines, str(model)).run()


def _events() -> tuple[str, str]:
    places = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **places}
    return "--kv-events-config", json.dumps(events)


def ask(url: str, model: str, prompt: list[int], **more: Any) -> Turn:
    """Ask an engine or a gateway, and read the stream."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    headers = {"Content-Type": "application/json"}
    begun_s, first_s = time.monotonic(), 0.0
    tokens: list[int] = []
    cached = 0
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.monotonic()
            event = json.loads(line[6:])
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn("", first_s - begun_s, cached, tokens)


class _Conversations:
    """Two conversations through the gateway."""

    def __init__(
        self, table: Table, cluster: Cluster, gateway: GatewayProcess, engines: list[VllmApi], model: str
    ) -> None:
        self.table, self.cluster, self.gateway, self.engines = table, cluster, gateway, engines
        self.model = model
        self.draw = random.Random(7)
        self.killed: set[str] = set()
        """Names of engines that are no more."""

    def run(self) -> None:
        for engine in self.engines:
            ask(engine.url, self.model, self.said())  # the first steps of an engine are slow
        first = self.said()
        answer = self.row(0, first, 0)
        first = [*first, *answer.tokens, *self.said()]
        second = self.row(1, first, TURN_TOKENS // 128 * 128, engine=answer.engine)
        self.row(2, self.said(), 0)
        holder = [engine.url.removeprefix("http://") for engine in self.engines].index(answer.engine)
        held = len(first) // CHUNK_TOKENS
        server = self.cluster.servers[holder]
        wait_for(lambda: stored_chunks(server) >= held, "the conversation was not stored")
        self.cluster.until_known(holder)
        before = self.cluster.peer_records(1 - holder)
        self.engines[holder].kill()
        self.killed.add(answer.engine)
        first = [*first, *second.tokens, *self.said()]
        other = self.engines[1 - holder].url.removeprefix("http://")
        third = self.row(3, first, held * CHUNK_TOKENS, engine=other)
        read = self.cluster.peer_records(1 - holder) - before
        say(f"  {read} records were read from the server of the killed engine")
        self.table.rows[-1]["ok"] &= read >= held
        first = [*first, *third.tokens, *self.said()]
        self.row(4, first, len(first) - TURN_TOKENS - 256, engine=other)

    def said(self) -> list[int]:
        return [self.draw.randrange(3, 32_000) for _ in range(TURN_TOKENS)]

    def row(self, case: int, prompt: list[int], least: int, *, engine: str = "") -> Turn:
        """Ask the gateway, and compare with the tokens that the engine computes without a cache."""
        sent = self.sent()
        turn = ask(self.gateway.url, self.model, prompt)
        after = self.sent()
        # What Envoy sends on from a dead engine counts as sent to that one.
        alive = [name for name in after if name not in self.killed]
        [name] = [name for name in alive if after[name] > sent.get(name, 0)] if len(alive) > 1 else alive
        turn = turn._replace(engine=name)
        alone = ask(f"http://{name}", self.model, prompt, cache_salt=f"alone {case}")
        equal = turn.tokens == alone.tokens
        cached = turn.cached_tokens
        most = len(prompt) if least else 0
        self.table.add(
            CASES_5[case],
            5,
            ok=equal and least <= cached <= most and engine in ("", name) and not alone.cached_tokens,
            engine=name,
            ttft_s=round(turn.ttft_s, 3),
            cached_tokens=cached,
            tokens_equal=equal,
        )
        say(f"  {CASES_5[case]}: {name}, first token after {turn.ttft_s:.3f} s, {cached} tokens from a cache")
        return turn

    def sent(self) -> dict[str, int]:
        headers = {"Authorization": f"Bearer {self.gateway.token}"}
        page = urllib.request.Request(f"{self.gateway.url}/gateway/status", headers=headers)
        with urllib.request.urlopen(page, timeout=60) as answer:
            return {row["name"]: row["sent"] for row in json.load(answer)["engines"]}
