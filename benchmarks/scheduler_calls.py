"""`scheduler_calls_*`: how long calls into the connector's scheduler side take while a server or a master is stopped.

The real scheduler side with the real client and server, without vLLM: WAITING requests wait at a time, and a step
begins every STEP_S, during which the thread sleeps as vLLM's thread waits for its worker.  Each figure is the 99.9th
percentile of all calls of REQUESTS requests, by the clock; beside it are the longest call, and both of the thread's own
CPU time, which other threads and processes do not lengthen.  `off_core` is the time for which the kernel let a ready
thread wait for a core; what remains of a call is the wait for lookups and for Python's lock.  A thread that has the
lock may wait for a core, too, so each figure also counts its calls of more than TARGET_MS (`slow`), and how many of
them would have been shorter without the waits of the calling thread (`slow_own_core`), and how many more without those
of the process's other threads (`slow_lock`).

    _server     the server is stopped (SIGSTOP) again and again, for PROMPTS requests each time
    _master     the master of the server's Mooncake tier is stopped, so that each lookup lasts until its timeout
    _running    everything answers

Sketch: a step waits 1.5 ms at most for lookups; making the keys of a prompt takes 20 µs, and nothing else waits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import engine_client, figure, percentile, scratch, sized, wait_until
from kvstrata.client import CacheClient
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.vllm.groups import whole_group
from kvstrata.connectors.vllm.scheduler import SchedulerSide
from kvstrata.types import RequestIdentity
from tests.harness import mooncake
from tests.harness.blocks import PagedBlocks
from tests.harness.daemon import Unavailable
from tests.harness.scheduler_side import make_request, step, weights_without_digests
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_engine import off_core_clock

REQUESTS = sized(10_000, 60)
PROMPTS = sized(500, 20)
"""Requests until the stopped server runs again."""
WAITING = 16
STEP_S = 0.0005
PROMPT_TOKENS, CHUNK_TOKENS, BLOCK_TOKENS = 2_048, 256, 16
STORED = 64
"""Prompts that are in L1.  Without a tier, a prompt that is not there is not looked up."""
TIMEOUT_MS = 100
TARGET_MS = 2.0


class Timed:
    """Calls a scheduler side, and notes the seconds of each: by the clock, of CPU time, and of waits for a core.

    `others_off_core_s` are the waits for a core of the process's other threads that ended during the call, together.
    """

    def __init__(self, side: SchedulerSide, client: CacheClient) -> None:
        self._side = side
        self.client = client
        self._off_core_ns = off_core_clock()
        self._others_off_core_ns = others_off_core_clock()
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.off_core_s: list[float] = []
        self.others_off_core_s: list[float] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._side, name)

        def timed(*arguments: Any) -> Any:
            others_ns, off_core_ns = self._others_off_core_ns(), self._off_core_ns()
            cpu_s, begun_s = time.thread_time(), time.perf_counter()
            answer = method(*arguments)
            self.wall_s.append(time.perf_counter() - begun_s)
            self.cpu_s.append(time.thread_time() - cpu_s)
            self.off_core_s.append((self._off_core_ns() - off_core_ns) / 1e9)
            self.others_off_core_s.append((self._others_off_core_ns() - others_ns) / 1e9)
            return answer

        return timed


def others_off_core_clock() -> Callable[[], int]:
    """A clock of this process's other threads: for how many ns so far they were ready to run and waited for a core."""
    own = str(threading.get_native_id())
    folders = [folder for folder in Path("/proc/self/task").iterdir() if folder.name != own]
    found = {os.open(folder / "schedstat", os.O_RDONLY | os.O_CLOEXEC): 0 for folder in folders}

    def total_ns() -> int:
        for descriptor in found:
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended waits no more
                found[descriptor] = int(os.pread(descriptor, 100, 0).split()[1])
        return sum(found.values())

    return total_ns


def serve(side: Any, numbers: Iterator[int], count: int) -> None:
    """Let this many requests pass through the queue; each prompt repeats its number."""
    waiting: list[Any] = []
    numbers = itertools.islice(numbers, count)
    while True:
        for number in itertools.islice(numbers, WAITING - len(waiting)):
            request = make_request(PROMPT_TOKENS, all_token_ids=[number] * PROMPT_TOKENS)
            side.on_new_request(request)
            waiting.append(request)
        if not waiting:
            return
        asked, waiting = waiting, []
        for request in asked:
            tokens, _ = side.matched_tokens(request, 0)
            if tokens is None:
                waiting.append(request)
                continue
            side.allocated(request, [range(1, PROMPT_TOKENS // BLOCK_TOKENS + 1)], 0)
            side.finished(request, [[]])
        step(side)
        time.sleep(STEP_S)


def calls_figure(name: str, side: Timed, what: str) -> dict[str, Any]:
    """The figure of all calls so far."""
    value_ms, longest = 1e3 * percentile(side.wall_s, 0.999), side.wall_s.index(max(side.wall_s))
    on_core_s = [wall_s - off_s for wall_s, off_s in zip(side.wall_s, side.off_core_s, strict=True)]
    slow = [place for place, wall_s in enumerate(side.wall_s) if 1e3 * wall_s > TARGET_MS]
    not_own = [place for place in slow if 1e3 * on_core_s[place] > TARGET_MS]
    rest = [
        place for place in not_own if 1e3 * (on_core_s[place] - side.others_off_core_s[place]) > TARGET_MS
    ]
    return figure(
        f"scheduler_calls_{name}",
        value=value_ms,
        unit="ms",
        ratio=value_ms / TARGET_MS,
        ratio_to=f"the target; {what}",
        target=f"p99.9 ≤ {TARGET_MS:g} ms",
        ok=value_ms <= TARGET_MS,
        calls=len(side.wall_s),
        slow=len(slow),
        slow_own_core=len(slow) - len(not_own),
        slow_lock=len(not_own) - len(rest),
        slow_rest_ms=[1e3 * on_core_s[place] for place in rest],
        longest_ms=1e3 * side.wall_s[longest],
        off_core_of_longest_ms=1e3 * side.off_core_s[longest],
        cpu_of_longest_ms=1e3 * side.cpu_s[longest],
        p999_without_off_core_ms=1e3 * percentile(on_core_s, 0.999),
        longest_without_off_core_ms=1e3 * max(on_core_s),
        cpu_p999_ms=1e3 * percentile(side.cpu_s, 0.999),
        cpu_longest_ms=1e3 * max(side.cpu_s),
    )


def stored() -> Iterator[int]:
    """Numbers of prompts that are in L1, without end."""
    return itertools.cycle(range(STORED))


def store(client: Any, blocks: PagedBlocks) -> None:
    """Store the prompts of `stored`."""
    identity = client.identity(RequestIdentity())
    wait_until(lambda: identity.ready, "the identity is declared")
    for number in range(STORED):
        hasher = identity.hasher()
        hasher.feed([number] * PROMPT_TOKENS)
        job = client.store(identity, b"", hasher.chain, blocks.plan, [[0]] * hasher.n_chunks)
        if not job.done.wait(60):
            raise RuntimeError("a store did not end")


@contextlib.contextmanager
def scheduler(server: ServerProcess) -> Iterator[Timed]:
    """A scheduler side of an engine that is attached to this server."""
    blocks = PagedBlocks(layers=1, num_blocks=1, block_bytes=64)
    client = engine_client(server.socket_dir, server.port, blocks, chunk_tokens=CHUNK_TOKENS)
    side = SchedulerSide(
        client,
        ClientSettings(chunk_size=CHUNK_TOKENS, lookup_timeout_ms=TIMEOUT_MS),
        groups=[whole_group(BLOCK_TOKENS, CHUNK_TOKENS)],
        chunk_bytes=64,
        world_size=1,
        weights=weights_without_digests(),
    )
    try:
        store(client, blocks)
        serve(side, stored(), WAITING)  # a warm-up
        yield Timed(side, client)
    finally:
        side.close()
        client.close()
        blocks.close()


def stopped_server() -> list[dict[str, Any]]:
    """Measure while everything answers, and while the server is stopped."""
    with scratch("calls") as folder, ServerProcess(folder, l1_mb=64, flags=("--no-http",)) as server:
        server.start()
        with scheduler(server) as side:
            serve(side, stored(), REQUESTS)
            running = calls_figure("running", side, "everything answers")
        with scheduler(server) as side:
            for _ in range(REQUESTS // PROMPTS):
                server.freeze()
                serve(side, stored(), PROMPTS)
                server.thaw()
                wait_until(lambda: side.client.connected, "the client is attached again")
            return [running, calls_figure("server", side, "the server is stopped again and again")]


def stopped_master() -> list[dict[str, Any]]:
    """Measure while the master of a Mooncake tier is stopped."""
    with scratch("calls") as folder, mooncake.cluster(folder, segment_mb=64) as (master, _):
        entry = {"type": "mooncake_store", **master.setup()}
        flags = ("--no-http", "--l2-adapter", json.dumps(entry))
        environment = mooncake.environment()
        with ServerProcess(
            folder / "server", l1_mb=64, l2="embedded", flags=flags, environment=environment
        ) as server:
            server.start()
            with scheduler(server) as side:
                master.freeze()
                try:
                    serve(side, itertools.count(STORED), REQUESTS)
                finally:
                    master.thaw()
                return [calls_figure("master", side, "the tier's master is stopped")]


def run() -> list[dict[str, Any]]:
    """Measure the figures; without Mooncake's client only those of a stopped server."""
    figures = stopped_server()
    try:
        return figures + stopped_master()
    except Unavailable as missing:
        print(f"   without scheduler_calls_master: {missing}")
        return figures
