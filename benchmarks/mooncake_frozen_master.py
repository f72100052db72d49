"""`mooncake_frozen_master_*`: delays in vLLM while the master of its server's Mooncake store is stopped for 12 s.

Real vLLM (19 M parameters, prompts of 1,100 tokens, its own prefix cache off) runs with the default times of connector
and server.  Requests for prompts that are only in the tier follow one another, while others ask for prompts in L1.
First the master answers, then it is stopped (SIGSTOP) for 12 s, then it runs again (SIGCONT).

    _calls      the longest call of the connector on vLLM's scheduler thread while the master is stopped
    _l1_hits    time to first token of a hit in L1 while another request waits for the stopped tier
    _lookups    how long requests that need the tier wait in vLLM's queue: until `lookup_timeout_ms`, no longer
    _recovery   from SIGCONT to the first token of a prompt that came from the tier

Sketch: a step waits 1.5 ms at most for lookups, so a hit in L1 whose lookup is answered after two steps takes 3 ms
longer.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from typing import Any

from benchmarks.common import compared, fill_tier, scratch, sized
from benchmarks.vllm_hit_ttft import ready
from kvstrata.config.client_model import ClientSettings
from tests.harness import mooncake, vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_engine import Calls
from tests.harness.vllm_run import VllmProcess

FROZEN_S = sized(12.0, 1.0)
PROMPT_TOKENS, HIT_TOKENS, CHUNKS = 1_100, 1_024, 4
TIER_PROMPTS, L1_PROMPTS = sized((24, 2), (6, 2))
BEFORE = sized(40, 4)
"""Hits in L1 that are measured while the master still answers."""
CALL_TARGET_MS, HIT_TARGET, RECOVERY_TARGET_S = 2.0, 1.25, 2.0
LATE_S = 0.25
"""Allowance for the step that vLLM is running when the lookup's time is over."""


class Traffic:
    """Requests to one engine for prompts in L1, alone or beside a request for a prompt that is only in the tier."""

    def __init__(self, vllm: VllmProcess, known: list[list[int]]) -> None:
        self.vllm = vllm
        self.known = itertools.cycle(known)
        self.hits_s: list[float] = []
        """Seconds to the first token of each hit in L1."""

    def hit(self) -> None:
        """Make one hit while no other request runs."""
        self._note(self.vllm.generate(next(self.known), max_tokens=2))

    def beside(self, prompt: list[int]) -> dict[str, Any]:
        """Request this prompt and make hits one after the other until it ends; return its result."""
        asked = self.vllm.ask("submit", prompt=prompt, max_tokens=2)
        hit, ended = "", None
        while ended is None or hit:
            if ended is None and not hit:
                hit = self.vllm.ask("submit", prompt=next(self.known), max_tokens=2)
            for done in self.vllm.ask("step"):
                if done["request"] == asked:
                    ended = done
                else:
                    hit = ""
                    self._note(done)
        return ended

    def _note(self, done: dict[str, Any]) -> None:
        if done["cached_tokens"] != HIT_TOKENS:
            raise RuntimeError(f"L1 gave {done['cached_tokens']} of {HIT_TOKENS} tokens")
        self.hits_s.append(done["ttft_s"])


def run() -> list[dict[str, Any]]:
    """Measure the figures; without vLLM there are none."""
    if not ready():
        return []
    draw = random.Random(4)
    prompts = [
        [draw.randrange(10, vllm_model.VOCABULARY) for _ in range(PROMPT_TOKENS)]
        for _ in range(L1_PROMPTS + TIER_PROMPTS)
    ]
    model = vllm_model.ensure_model("19m")
    options = {
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
    }
    with scratch("frozen") as folder, mooncake.cluster(folder, segment_mb=256) as (master, _):
        entry = {"type": "mooncake_store", **master.setup()}
        with (
            ServerProcess(
                folder / "server",
                l1_mb=256,
                l2="embedded",
                flags=("--l2-adapter", json.dumps(entry)),
                environment=mooncake.environment(),
            ) as server,
        ):
            server.start()
            with VllmProcess(
                model, folder / "vllm", extra=server.connector_config(), options=options
            ) as vllm:
                return measure(vllm, server, master, prompts)


def measure(
    vllm: VllmProcess, server: ServerProcess, master: mooncake.Master, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """Measure before, while and after the master is stopped; return the figures."""

    def compute() -> None:
        for prompt in prompts:
            vllm.generate(prompt, max_tokens=2)

    known, of_tier = prompts[:L1_PROMPTS], prompts[L1_PROMPTS:]
    fill_tier(server, "mooncake_store-0", compute, CHUNKS * len(prompts))
    for prompt in known:
        vllm.generate(prompt, max_tokens=2)

    before, frozen = Traffic(vllm, known), Traffic(vllm, known)
    for _ in range(BEFORE):
        before.hit()
    if before.beside(of_tier.pop())["cached_tokens"] != HIT_TOKENS:
        raise RuntimeError("the tier did not give the prompt that it has")
    vllm.ask("take_calls")

    waited_s = []
    master.freeze()
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < FROZEN_S:
        found = frozen.beside(of_tier.pop())
        if found["cached_tokens"]:
            raise RuntimeError("a stopped master gave a hit")
        waited_s.append(found["waited_s"])
    calls = vllm.ask("take_calls")["methods"]
    master.thaw()
    thawed_s = time.monotonic()
    while not (found := frozen.beside(of_tier.pop()))["cached_tokens"]:
        pass
    recovery_s = time.monotonic() - thawed_s - (found["wall_s"] - found["ttft_s"])

    timeout_s = ClientSettings().lookup_timeout_ms / 1000
    scheduler = {name: calls[name] for name in Calls.SCHEDULER if name in calls}
    longest = max(scheduler.values(), key=lambda found: found["longest_s"])
    longest_ms = 1e3 * longest["longest_s"]
    hit_before_s = statistics.median(before.hits_s)
    return [
        compared(
            "mooncake_frozen_master_calls",
            longest_ms,
            "ms, the longest call on the scheduler's thread",
            "the target",
            CALL_TARGET_MS,
            most_value=CALL_TARGET_MS,
            p99_ms={name: 1e3 * found["p99_s"] for name, found in scheduler.items()},
            p999_ms={name: 1e3 * found["p999_s"] for name, found in scheduler.items()},
            asked_to_wait_ms=1e3 * max(found["wait_s"] for found in scheduler.values()),
            methods=scheduler,
        ),
        compared(
            "mooncake_frozen_master_l1_hits",
            [1e3 * s for s in frozen.hits_s],
            "ms",
            "the same before",
            1e3 * hit_before_s,
            most=HIT_TARGET,
            hits=len(frozen.hits_s),
        ),
        compared(
            "mooncake_frozen_master_lookups",
            max(waited_s),
            "s",
            "lookup_timeout_ms",
            timeout_s,
            most_value=timeout_s + LATE_S,
            waited_s=waited_s,
        ),
        compared(
            "mooncake_frozen_master_recovery",
            recovery_s,
            "s, from SIGCONT to a hit",
            "the target",
            RECOVERY_TARGET_S,
            most_value=RECOVERY_TARGET_S,
        ),
    ]
