"""Maps the pool's pages into this process ahead of the copies that need them.

The server faults the pool in, but each process has page tables of its own: the first copy into an extent that this
process never touched pays a fault for each page and runs at a third of its speed (`benchmarks/copy_path.py`).  A thread
of low priority walks over the pool once and enters what exists; what the server has not faulted in yet is left for the
next walk, since whoever touches a page first pays for it, also in its control group.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from kvstrata.client.copies import Mapping
from kvstrata.native.paging import map_present_pages

log = logging.getLogger(__name__)

STEP_BYTES = 32 << 20
FIRST_WAIT_S = 0.1
WALKS = 10
"""The last one begins about a minute and a half after the first; what is missing then is left to the copies."""
NICENESS = 10


class PageWarmer:
    """Warms one mapping at a time. Any thread may call; nothing here blocks but `close`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.mapped_bytes = 0
        """Of the present mapping."""

    def warm(self, mapping: Mapping) -> None:
        """Begin with this mapping, in the background; one begun before is left."""
        self._stop.set()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(weakref.ref(mapping), self._stop), name="kvstrata-pages", daemon=True
        )
        self._thread.start()

    def forget(self, mapping: Mapping) -> None:
        """No copy touches this mapping any more. It was not kept alive here."""

    def stop(self) -> None:
        """Map nothing more ahead of use."""
        self._stop.set()

    def close(self, timeout_s: float) -> None:
        """Stop, and wait for the step under way."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def stats(self) -> dict[str, int | float | str]:
        """Counters and present state."""
        return {"mapped_ahead_bytes": self.mapped_bytes}

    def _run(self, mapping: Callable[[], Mapping | None], stop: threading.Event) -> None:
        mapped_bytes = 0
        for _, size in present_steps(mapping, stop, STEP_BYTES):
            mapped_bytes += size
            self.mapped_bytes = mapped_bytes


def present_steps(
    find: Callable[[], Mapping | None], stop: threading.Event, step_bytes: int, walks: int = WALKS
) -> Iterator[tuple[int, int]]:
    """(offset, length) of the parts of a mapping, each as soon as all its pages exist; they are mapped then.

    Ends when all are, after `walks` over what is missing, or when `find` finds the mapping no more: it is held for one
    step at a time, so that it ends when its last user ends.  Makes its thread one of low priority.
    """
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
