"""Act 6: one real vLLM computes long prompts for another one that answers; a gateway decides which."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.harness import vllm_model
from tests.harness.cluster import Cluster
from tests.harness.gateway_process import GatewayProcess
from tests.harness.vllm_api import VllmApi
from tests.tools.demo.act_gateway import Turn, ask
from tests.tools.demo.common import CHUNK_TOKENS, L1_MB, Table, fitting_l1_mb, say, wait_for

PROMPT_TOKENS, STEP_TOKENS, ANSWERS, OTHER_TOKENS = 1_800, 256, 4, 32
NAMES = {"prefill": "prefilling", "decode": "decoding"}
CASES_6 = (
    "the decoding engine alone, beside four answers",
    "split: the other engine computes the prompt",
    "the prefilling engine killed (SIGKILL) in mid-prefill",
)


def act_6(folder: Path, table: Table, size: str) -> None:
    """A controller, a gateway, a server, and two real vLLM."""
    say("A gateway before a prefilling and a decoding engine of one server")
    say("  Both share the cores of this machine, so a split shows what happens here, and saves no time")
    model = vllm_model.ensure_model(size)
    flags = ("--dtype", vllm_model.dtype_of(size), "--enable-prompt-tokens-details",
             "--max-num-batched-tokens", str(STEP_TOKENS))  # fmt: skip
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of two engines that wait for each other on few cores spin
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(folder, l1_mb=fitting_l1_mb(L1_MB, 160), n_servers=1))
        extra = cluster.servers[0].connector_config(**{"kvstrata.lookup_timeout_ms": 30_000})
        engines = {}
        for role in NAMES:
            engines[role] = stack.enter_context(VllmApi(model, folder / role, extra=extra, flags=flags))
            say(f"  the {NAMES[role]} engine is ready")
        named = [
            {"url": engine.url, "name": role, "role": role, "instance": "one"}
            for role, engine in engines.items()
        ]
        gateway = GatewayProcess(folder / "gateway", [], split="kvstrata", engines=named)
        stack.enter_context(gateway)
        say(f"  gateway ready at {gateway.url}")
        _Split(table, cluster, gateway, engines, str(model)).run()


class _Split:
    """One prompt after another, each compared with what the decoding engine computes by itself."""

    def __init__(
        self, table: Table, cluster: Cluster, gateway: GatewayProcess, engines: dict[str, VllmApi], model: str
    ) -> None:
        self.table, self.server, self.gateway, self.engines = table, cluster.servers[0], gateway, engines
        self.model = model
        self.draw = random.Random(7)

    def run(self) -> None:
        for _ in range(3):  # the first steps of an engine are slow, and rates are measured
            ask(self.gateway.url, self.model, self.said(PROMPT_TOKENS // 2))
            ask(self.engines["prefill"].url, self.model, self.said(PROMPT_TOKENS // 2))
        prompts = [self.said(PROMPT_TOKENS) for _ in CASES_6]
        with self.answering():
            turns = [ask(self.engines["decode"].url, self.model, prompts[0], cache_salt="alone")]
            turns.append(ask(self.gateway.url, self.model, prompts[1]))
            turns.append(self.killed(prompts[2]))
        whole = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
        for case, (turn, least, most) in enumerate(zip(turns, (0, whole, 0), (0, whole, whole), strict=True)):
            alone = ask(self.engines["decode"].url, self.model, prompts[case], cache_salt=f"alone {case}")
            equal = turn.tokens == alone.tokens
            self.table.add(
                CASES_6[case],
                6,
                ok=equal and least <= turn.cached_tokens <= most,
                ttft_s=round(turn.ttft_s, 3),
                cached_tokens=turn.cached_tokens,
                tokens_equal=equal,
            )
            say(
                f"  {CASES_6[case]}: first token after {turn.ttft_s:.3f} s, {turn.cached_tokens} from a cache"
            )

    def said(self, count: int) -> list[int]:
        return [self.draw.randrange(3, 32_000) for _ in range(count)]

    def killed(self, prompt: list[int]) -> Turn:
        """Ask, and kill the prefilling engine while it computes."""
        turns: list[Turn] = []
        asking = threading.Thread(target=lambda: turns.append(ask(self.gateway.url, self.model, prompt)))
        asking.start()
        promises = "/v1/status"
        wait_for(lambda: self.server.get(promises)["promises"]["waits_now"] or turns, "no engine waits")
        self.engines["prefill"].kill()
        asking.join()
        return turns[0]

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """The decoding engine answers others all the while, without an end."""
        body = {"model": self.model, "max_tokens": 6_000, "ignore_eos": True, "stream": True}
        streams = []
        for _ in range(ANSWERS):
            data = json.dumps({**body, "prompt": self.said(OTHER_TOKENS)}).encode()
            request = urllib.request.Request(
                f"{self.gateway.url}/v1/completions", data, {"Content-Type": "application/json"}
            )
            streams.append(urllib.request.urlopen(request, timeout=300))
            streams[-1].readline()
        time.sleep(0.5)  # the gateway counts what it has seen begin
        try:
            yield
        finally:
            for stream in streams:
                stream.close()
