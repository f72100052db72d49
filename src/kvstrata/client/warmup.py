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

    def close(self, timeout_s: float) -> None:
        """Stop, and wait for the step under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, mapping_ref: weakref.ref[Mapping], stop: threading.Event) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        missing: list[tuple[int, int]] | None = None
        wait_s = FIRST_WAIT_S
        mapped_bytes = 0
        for _ in range(WALKS):
            mapping = mapping_ref()
            if mapping is None:
                return
            if missing is None:
                length = mapping.extents.length
                missing = [(at, min(STEP_BYTES, length - at)) for at in range(0, length, STEP_BYTES)]
            del mapping
            left = []
            for offset, size in missing:
                # The mapping is held for one step at a time, so that it ends when its last user ends.
                mapping = mapping_ref()
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
                    mapped_bytes += mapped
                    self.mapped_bytes = mapped_bytes
            missing = left
            if not missing or stop.wait(wait_s):
                return
            wait_s *= 2
