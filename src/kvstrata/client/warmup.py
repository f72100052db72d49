"""Maps the pool's pages into this process ahead of the copies that need them.

The server faults the pool in, but each process has page tables of its own: the first copy into an extent that this
process never touched takes a page fault for each page and runs at a third of its speed (`benchmarks/copy_path.py`). A
thread of low priority walks over the pool and maps the pages that exist.  Pages that the server has not faulted in yet
are left for the next walk: a page is charged to the control group of the process that touches it first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from kvstrata.client.copies import Mapping
from kvstrata.native.core import map_present_pages

log = logging.getLogger(__name__)

STEP_BYTES = 32 << 20
FIRST_WAIT_S = 0.1
WALKS = 10
"""Number of walks; the last begins about 50 s after the first.  Copies themselves map pages that are missing then."""
NICENESS = 10


class PageWarmer:
    """Maps the pages of one mapping at a time. Any thread may call; only `close` blocks."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.mapped_bytes = 0
        """Bytes of the current mapping that are mapped ahead of use."""

    def warm(self, mapping: Mapping) -> None:
        """Begin to map this mapping's pages in the background, and stop the walk over an earlier mapping."""
        self._stop.set()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(weakref.ref(mapping), self._stop), name="kvstrata-pages", daemon=True
        )
        self._thread.start()

    def forget(self, mapping: Mapping) -> None:
        """Does nothing: the walk keeps no mapping alive, so it ends by itself."""

    def stop(self) -> None:
        """Stop mapping ahead of use."""
        self._stop.set()

    def close(self, timeout_s: float) -> None:
        """Stop, and wait at most `timeout_s` for the step under way."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def stats(self) -> dict[str, int | float | str]:
        """Counters and current state."""
        return {"mapped_ahead_bytes": self.mapped_bytes}

    def _run(self, mapping: Callable[[], Mapping | None], stop: threading.Event) -> None:
        mapped_bytes = 0
        for _, size in present_steps(mapping, stop, STEP_BYTES):
            mapped_bytes += size
            self.mapped_bytes = mapped_bytes


def present_steps(
    find: Callable[[], Mapping | None], stop: threading.Event, step_bytes: int, walks: int = WALKS
) -> Iterator[tuple[int, int]]:
    """Map a mapping's pages; yields (offset, length) of each part once all its pages exist and are mapped.

    Ends when all parts are mapped, after `walks` walks over the missing parts, once `stop` is set, or when `find`
    returns None: this function keeps the mapping for one step at a time, so the mapping goes away with its last user.
    Gives the calling thread a low priority.
    """
    with contextlib.suppress(PermissionError):  # the process is nicer already, and may not become less so
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    mapping = find()
    if mapping is None:
        return
    length = mapping.extents.length
    del mapping
    missing = [(at, min(step_bytes, length - at)) for at in range(0, length, step_bytes)]
    wait_s = FIRST_WAIT_S
    for _ in range(walks):
        left = []
        for offset, size in missing:
            mapping = find()
            if mapping is None or stop.is_set():
                return
            try:
                mapped = map_present_pages(mapping.extents.address + offset, size)
            except OSError as error:
                log.warning("cannot map the pool's pages ahead of use: %s", error)
                return
            del mapping
            if mapped < size:
                left.append((offset, size))
            else:
                yield offset, size
        missing = left
        if not missing or stop.wait(wait_s):
            return
        wait_s *= 2
