"""Act 7: a fleet in a minute, without vLLM: simulated engines with the real connector, servers, controller, gateway."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.cluster import Cluster
from tests.harness.gateway_process import GatewayProcess
from tests.integration.testing.test_engine_sim import Sim, config
from tests.tools.demo.common import Table, say, wait_for

SERVERS, CHUNK_TOKENS, L1_MB = 4, 16, 128
LONG_TOKENS, ANSWERS, SIBLINGS = 4_000, 6, 12
CASES_7 = (
    "a long prompt at the decoding engine alone, beside answers",
    "the same length through the gateway: split",
    "{} siblings of a new prompt; answers that have computed it:",
    "a prefilling engine killed (SIGKILL) in mid-prefill",
    "a host killed (SIGKILL): another one answers",
)


def act_7(folder: Path, table: Table) -> None:
    """A controller, a gateway, four servers with a simulated engine each."""
    say("A gateway, a controller, four servers with a simulated engine each: two prefill, two decode")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(folder, l1_mb=L1_MB, n_servers=SERVERS, chunk_tokens=CHUNK_TOKENS)
        )
        flags = ("--model", "m", "--max-num-batched-tokens", "1000", "--prefill-token-us", "200")
        engines = []
        for number, server in enumerate(cluster.servers):
            role = "prefill" if number < SERVERS // 2 else "decode"
            sim = Sim(*flags, "--kv-transfer-config", config(server))
            stack.callback(sim.process.wait)
            stack.callback(sim.process.kill)
            threading.Thread(target=sim.process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
            place = {
                "url": sim.url,
                "name": f"{role}-{number}",
                "role": role,
                "instance": f"instance-{number}",
            }
            engines.append((sim, place))
        gateway = GatewayProcess(
            folder / "gateway", [], split="kvstrata", engines=[place for _, place in engines],
            controllers={"urls": [f"tcp://127.0.0.1:{cluster.controller.ports['reply']}"], "name": "gateway"},
        )  # fmt: skip
        stack.enter_context(gateway)
        say(f"  gateway ready at {gateway.url}, dashboard at {cluster.controller.dashboard_link()}")
        wait_for(
            lambda: all(len(one.get("/v1/status")["engines"]) == 1 for one in cluster.servers),
            "the engines are not attached",
        )
        _Fleet(table, cluster, gateway, engines).run()


class _Fleet:
    """Requests through the gateway, each compared with what an engine computes by itself."""

    def __init__(
        self, table: Table, cluster: Cluster, gateway: GatewayProcess, engines: list[tuple[Sim, Any]]
    ) -> None:
        self.table, self.cluster, self.gateway, self.engines = table, cluster, gateway, engines
        self.draw = random.Random(7)

    def run(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(SERVERS // 2) as pool:
            list(pool.map(self.measure, self.engines[: SERVERS // 2], self.engines[SERVERS // 2 :]))
        decoding = [sim.url for sim, place in self.engines if place["role"] == "decode"]
        with self.answering():
            prompt = self.said()
            alone_s, answer = self.ask(decoding[0], prompt)
            self.row(0, alone_s, answer, ok=True)
            prompt = self.said()
            took_s, answer = self.ask(self.gateway.url, prompt)
            self.row(
                1,
                took_s,
                answer,
                ok=cached(answer) >= LONG_TOKENS - CHUNK_TOKENS and self.right(prompt, answer),
            )
            self.siblings()
            self.killed()
        self.cluster.servers[-2].kill()
        self.engines[-2][0].process.kill()
        prompt = self.said()
        took_s, answer = self.ask(self.gateway.url, prompt)
        self.row(4, took_s, answer, ok=self.right(prompt, answer))

    def measure(self, prefill: tuple[Sim, Any], decode: tuple[Sim, Any]) -> None:
        """Until it is known how fast both compute, and how fast the other one loads and reads from its peer."""
        for number in range(10):
            prompts = [self.said(400 * (1 + number % 3)) for _ in range(2)]
            self.ask(prefill[0].url, prompts[0])
            for prompt in prompts:
                self.ask(decode[0].url, prompt)

    def row(self, case: int, took_s: float, answer: Any, *, ok: bool) -> None:
        self.table.add(
            CASES_7[case], 7, ok=ok, ttft_s=round(took_s, 3), cached_tokens=cached(answer), tokens_equal=ok
        )
        say(f"  {CASES_7[case]}: answered after {took_s:.3f} s, {cached(answer)} tokens from a cache")

    def said(self, count: int = LONG_TOKENS) -> list[int]:
        return [self.draw.randrange(3, 32_000) for _ in range(count)]

    def ask(self, url: str, prompt: list[int], **more: Any) -> tuple[float, Any]:
        """Seconds until an answer of three tokens, and the answer."""
        begun_s = time.monotonic()
        with self.begin(url, {"prompt": prompt, "max_tokens": 3, **more}) as reply:
            return time.monotonic() - begun_s, json.load(reply)

    def begin(self, url: str, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": "m", **body}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=60)

    def right(self, prompt: list[int], answer: Any) -> bool:
        """Whether the last engine answers the same by itself."""
        url = self.engines[-1][0].url
        _, alone = self.ask(url, prompt, cache_salt="alone")
        return bool(alone["choices"][0]["text"] == answer["choices"][0]["text"])

    def siblings(self) -> None:
        prefix = self.said()
        prompts = [prefix + self.said(40) for _ in range(SIBLINGS)]
        with concurrent.futures.ThreadPoolExecutor(SIBLINGS) as pool:
            begun_s = time.monotonic()
            answers = list(pool.map(lambda prompt: self.ask(self.gateway.url, prompt)[1], prompts))
        computed = sum(cached(answer) < LONG_TOKENS // 2 for answer in answers)
        case = f"{CASES_7[2].format(SIBLINGS)} {computed}"
        self.table.add(case, 7, ok=computed <= SERVERS, ttft_s=round(time.monotonic() - begun_s, 3))
        say(f"  {case}")

    def killed(self) -> None:
        prompt = self.said()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asking = pool.submit(self.ask, self.gateway.url, prompt)
            waits = [0] * SERVERS

            def waiting() -> bool:
                waits[:] = [one.get("/v1/status")["promises"]["waits_now"] for one in self.cluster.servers]
                return any(waits) or asking.done()

            wait_for(waiting, "no engine waits")
            for sim, place in self.engines:
                if place["role"] == "prefill" and requests_at(sim) > 0:
                    sim.process.kill()
            took_s, answer = asking.result()
        self.row(3, took_s, answer, ok=self.right(prompt, answer))

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """The decoding engines answer others all the while."""
        streams = []
        for _ in range(ANSWERS * SERVERS):
            body = {"prompt": self.said(64), "max_tokens": 100_000, "ignore_eos": True, "stream": True}
            streams.append(self.begin(self.gateway.url, body))
            streams[-1].readline()
        try:
            yield
        finally:
            for stream in streams:
                stream.close()


def cached(answer: Any) -> int:
    """Tokens of the prompt that were not computed."""
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def requests_at(sim: Sim) -> float:
    """Requests that an engine has."""
    with urllib.request.urlopen(f"{sim.url}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))
