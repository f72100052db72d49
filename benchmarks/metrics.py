"""`metrics_page` and `request_counted`: what metrics cost the server's event loop.

`metrics_page` is the time of the main thread on its CPU for one page /metrics, HTTP included, less that of an idle
server; `request_counted` is the time that counting the duration of a request takes, such as a ping.

Sketch: a page has some 200 families with 400 samples, of which prometheus_client makes objects and then text at some
5 µs each. Counting takes two readings of the clock, a search in 18 bounds and three additions.
"""

from __future__ import annotations

import time
import timeit
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.common import compared, median_spread, scratch, sized
from kvstrata.observability.explain import ServerNumbers
from kvstrata.observability.numbers import FRESH_S
from tests.harness.server_process import ServerProcess

READERS = 5
PAGES = sized(30, 2)
REPEATS = sized(15, 2)
REQUESTS = sized(200_000, 100)
PAGE_TARGET_MS = 5.0
COUNT_TARGET_NS = 1_000.0


def page_ms(folder: Path) -> tuple[float, float]:
    """Milliseconds of the event loop for one reader, and for several readers at once."""
    with ServerProcess(folder, l1_mb=64) as server:
        server.start()
        times = Path(f"/proc/{server.pid}/task/{server.pid}/schedstat")
        url = f"http://127.0.0.1:{server.ready['http_port']}/metrics"

        def used_ms(readers: int) -> float:
            found = []
            for _ in range(PAGES):
                before = int(times.read_text().split()[0])
                for _ in range(readers):
                    with urllib.request.urlopen(url) as reply:
                        reply.read()
                time.sleep(1.2 * FRESH_S)  # the next page is made anew
                found.append((int(times.read_text().split()[0]) - before) / 1e6)
            return median_spread(found)[0]

        used_ms(1)
        idle = used_ms(0)
        return used_ms(1) - idle, used_ms(READERS) - idle


def counted_ns() -> list[float]:
    """Nanoseconds for counting one request, of each repeat."""
    counters, clock = ServerNumbers(), time.perf_counter

    def count() -> None:
        started_s = clock()
        counters.request_seconds["ping"].add(clock() - started_s)

    return [seconds / REQUESTS * 1e9 for seconds in timeit.repeat(count, number=REQUESTS, repeat=REPEATS)]


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    with scratch("metrics") as folder:
        one, several = page_ms(folder)
    return [
        compared(
            "metrics_page",
            one,
            "ms",
            f"{READERS} readers within {FRESH_S} s, by one",
            several,
            inverse=True,
            most_value=PAGE_TARGET_MS,
        ),
        compared(
            "request_counted", counted_ns(), "ns", "the target", COUNT_TARGET_NS, most_value=COUNT_TARGET_NS
        ),
    ]
