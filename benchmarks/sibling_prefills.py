"""`sibling_prefills`, `sibling_prefills_cluster`: what a fan-out of requests with one new prefix computes at the
engines of a host, and of two hosts of a cluster, whose directory follows promises.

100 requests with one new prefix of 8,192 tokens and 64 tokens of their own come within a second, by turns, to four
simulated engines (the times of 8 billion parameters on one H100), two at each of two servers.  A request that found
less than half of the prefix has computed it.  Then engines that do not wait for each other do the same.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import figure, scratch, sized
from kvstrata.cli import asking
from tests.harness.cluster import Cluster
from tests.harness.server_process import ServerProcess

PREFIX, OWN, SERVERS, ENGINES = 8_192, 64, 2, 2
SIBLINGS, ROUNDS = sized((100, 5), (8, 1))
FLAGS = "--kv-blocks 2000 --max-model-tokens 16384 --kv-token-bytes 4096"
LENGTHS = (500, 1_000, 2_000, 3_000, 4_000, 6_000, 8_000) * sized(3, 1)
"""Prompts from which an engine learns how fast it computes."""


@contextlib.contextmanager
def engine(server: ServerProcess, log: Path, flags: str = FLAGS, **settings: Any) -> Iterator[str]:
    """A simulated engine at this server; its URL."""
    more = {"kv_role": "kv_both", "kv_connector_extra_config": {**server.connector_config(), **settings}}
    transfer = json.dumps({"kv_connector": "LMCacheConnectorV1", **more})
    with log.open("w") as stderr:
        command = [sys.executable, "-m", "kvstrata", "sim", "--port", "0", *flags.split()]
        command += ["--kv-transfer-config", transfer]
        process = subprocess.Popen(command, stderr=stderr)
    try:
        while not (found := re.search(r"serving .* at (http://\S+)", log.read_text())):
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10, 30_000) for _ in range(count)]


def ask(url: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds until an answer of one token, and how many tokens were not computed for it."""
    begun_s = time.perf_counter()
    reply: Any = asking.ask(
        url, asking.Ask("/v1/completions", {"prompt": prompt, "max_tokens": 1}, timeout_s=120)
    )
    return time.perf_counter() - begun_s, int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextlib.contextmanager
def hosts(folder: Path, *, wait: bool, cluster: bool) -> Iterator[list[str]]:
    """The engines' URLs, those of one server one after another; all know how fast they compute."""
    with contextlib.ExitStack() as stack:
        urls = []
        if cluster:
            servers = stack.enter_context(Cluster(folder, l1_mb=1024, n_servers=SERVERS)).servers
        else:
            made = (ServerProcess(folder / f"{host}", l1_mb=1024) for host in range(SERVERS))
            servers = [stack.enter_context(one.started()) for one in made]
        for host, server in enumerate(servers):
            for number in range(ENGINES):
                log = folder / f"{host}.{number}.log"
                urls.append(stack.enter_context(engine(server, log, await_siblings=wait)))
        draw = random.Random(1)
        for url in urls:
            for length in LENGTHS:
                ask(url, tokens(draw, length))
        time.sleep(1.0)  # the next ping tells the server
        yield urls


def fan_out(urls: list[str], seed: int) -> tuple[float, float]:
    """Prefills of the prefix, and the mean time until an answer."""
    draw = random.Random(seed)
    prefix = tokens(draw, PREFIX)
    prompts = [prefix + tokens(draw, OWN) for _ in range(SIBLINGS)]
    found: list[tuple[float, int]] = []

    def one(number: int) -> None:
        time.sleep(number / SIBLINGS)
        found.append(ask(urls[number % len(urls)], prompts[number]))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(SIBLINGS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    computed = sum(cached < PREFIX // 2 for _, cached in found)
    return computed, sum(seconds for seconds, _ in found) / SIBLINGS


def measure(name: str, unit: str, target: int, *, cluster: bool) -> list[dict[str, Any]]:
    """The figure; prefills are counted per host, or in all of a cluster."""
    found = {}
    for wait in (True, False):
        with scratch("siblings") as folder, hosts(folder, wait=wait, cluster=cluster) as urls:
            rounds = [fan_out(urls, seed) for seed in range(ROUNDS)]
            found[wait] = [sum(column) / ROUNDS for column in zip(*rounds, strict=True)]
    (prefills, mean_s), (alone, alone_s) = found[True], found[False]
    counted = 1 if cluster else SERVERS
    return [
        figure(
            name, value=prefills / counted, unit=unit, ratio=mean_s / alone_s,
            ratio_to=f"the mean time to an answer of engines that do not wait ({alone / counted:.3g} {unit})",
            target=f"<= {target}", ok=prefills / counted <= target,
        )
    ]  # fmt: skip


def run() -> list[dict[str, Any]]:
    """Measure the figure of single hosts."""
    return measure("sibling_prefills", "prefills a host", 1, cluster=False)


def run_sibling_prefills_cluster() -> list[dict[str, Any]]:
    """Measure the figure of two hosts of a cluster."""
    return measure("sibling_prefills_cluster", "prefills in all", SERVERS, cluster=True)
