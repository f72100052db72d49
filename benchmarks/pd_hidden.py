"""`pd_hidden`: how much of the way of a prompt's KV from one host to another lies behind its prefill.

Two servers in two network namespaces, and at each a simulated engine (the times of 8 billion parameters on one H100,
1,024 tokens a step) with the real connector.  A token's KV and the link's rate are a 32nd of what they would be, 128
KiB and 25 Gbit/s, so that two cores carry them.  A prompt is given to both engines at once, or to the decoding one
once the other has answered; what the decoding one's first token comes later than the other's answer, beyond what it
takes with the whole prompt in its own server's L1, is the transfer that can be noticed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import NotHere, figure, scratch, sized
from benchmarks.sibling_prefills import engine
from kvstrata.cli import asking
from tests.harness import network
from tests.harness.cluster import Cluster
from tests.harness.network import Network

SCALE = 32
TOKEN_BYTES, LINK_BYTES_S = (128 << 10) // SCALE, 25_000_000_000 // 8 // SCALE
LENGTHS, ROUNDS = sized(((8_192, 16_384, 32_768), 5), ((2_048,), 1))
FLAGS = (
    f"--max-num-batched-tokens 1024 --kv-blocks 5000 --max-model-tokens 65536 --kv-token-bytes {TOKEN_BYTES}"
)
WAITS = {"kvstrata.wait_ms": 60_000, "kvstrata.from": "instance-0"}
LEAST = 0.8


def answered_s(url: str, prompt: list[int], **params: Any) -> float:
    """When an answer of one token has come."""
    body = {"prompt": prompt, "max_tokens": 1, **({"kv_transfer_params": params} if params else {})}
    asking.ask(url, asking.Ask("/v1/completions", body, timeout_s=120))
    return time.perf_counter()


@contextlib.contextmanager
def engines(folder: Path) -> Iterator[list[str]]:
    """The URLs of the prefilling and of the decoding engine."""
    if why := network.why_not():
        raise NotHere(why)
    with (
        Network(folder, 2) as made,
        Cluster(folder, l1_mb=4096, network=made) as cluster,
        contextlib.ExitStack() as stack,
    ):
        made.hosts[0].slow(LINK_BYTES_S)
        yield [
            stack.enter_context(engine(server, folder / f"{number}.log", FLAGS, await_siblings=True))
            for number, server in enumerate(cluster.servers)
        ]


def exposed_s(
    urls: list[str], pool: concurrent.futures.Executor, prompt: list[int], *, at_once: bool
) -> float:
    """How much later the decoding engine answers than the prefilling one, beyond an answer from its own L1."""
    prefilling, decoding = urls
    for url in urls:
        asking.ask(url, asking.Ask("/reset_prefix_cache", {}))
    if at_once:
        waiting = pool.submit(answered_s, decoding, prompt, **WAITS)
        begun_s = answered_s(prefilling, prompt)
        later_s = waiting.result() - begun_s
    else:
        answered_s(prefilling, prompt)
        time.sleep(1.0)  # all is stored
        begun_s = time.perf_counter()
        later_s = answered_s(decoding, prompt, **WAITS) - begun_s
    asking.ask(decoding, asking.Ask("/reset_prefix_cache", {}))
    begun_s = time.perf_counter()
    return later_s - (answered_s(decoding, prompt) - begun_s)


def run() -> list[dict[str, Any]]:
    """Measure the figure: the least share of the three lengths."""
    draw, shares = random.Random(5), {}
    with scratch("pd") as folder, engines(folder) as urls, concurrent.futures.ThreadPoolExecutor() as pool:
        for length in LENGTHS:
            found: dict[bool, list[float]] = {True: [], False: []}
            for at_once in [True, False] * ROUNDS:
                prompt = [draw.randrange(10, 30_000) for _ in range(length)]
                found[at_once].append(exposed_s(urls, pool, prompt, at_once=at_once))
            exposed, whole = (statistics.median(found[at_once]) for at_once in (True, False))
            shares[length] = 1 - exposed / whole
            sketch = length * TOKEN_BYTES / LINK_BYTES_S
            print(
                f"{length} tokens: {whole:.3f} s ({sketch:.3f} s by the link), {exposed:.3f} s of it after prefill"
            )
    least = min(shares.values())
    return [
        figure(
            "pd_hidden", value=least, unit="of the transfer", ratio=least, ratio_to="the whole transfer",
            target=f">= {LEAST}", ok=least >= LEAST, shares={str(n): share for n, share in shares.items()},
        )
    ]  # fmt: skip
