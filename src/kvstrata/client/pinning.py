"""Registers ("pins") the pool with a device's driver, so that the device reads and writes extents directly.

If an extent is not registered, the driver copies it through buffers of its own, at a fraction of the speed, and the
copy blocks the thread that begins it.  So each worker registers its mapping slab by slab, in a thread of low priority,
beginning with the slabs that the server has faulted in.  Meanwhile copies to and from all of the pool continue.

Invariants
1. A slab is registered only when all its pages exist: a page that does not exist yet would be charged to this process.
2. A mapping lives until all its slabs are unregistered, which happens only when no copy touches it any more (`forget`,
   `close`).
3. The driver's first refusal ends the pinning of a pool; the remaining extents are copied unpinned.  The refusal is
   logged once, with its remedy.
"""

from __future__ import annotations

import logging
import threading
import time

from kvstrata.client.copies import Mapping
from kvstrata.client.warmup import present_steps
from kvstrata.native.cuda import CudaCopyEngine, CudaError, HostRegion

log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 20
WALKS = 16
"""Number of walks over a pool, with doubling pauses: a pool that is faulted in within an hour is pinned completely."""


class _Pinned:
    """One mapping, its walk and its registered regions, which belong to the walk's thread while that thread runs."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None
        self.regions: list[HostRegion] = []
        self.bytes = 0


class Pinner:
    """Pins mappings for one copy engine. Any thread may call any method; only `close` blocks."""

    def __init__(self, engine: CudaCopyEngine, device: int) -> None:
        """`device` is the driver's number of the device; the copy engine is told of each registered slab."""
        self._engine = engine
        self._device = device
        self._lock = threading.Lock()
        self._pools: dict[Mapping, _Pinned] = {}
        self._ending: list[threading.Thread] = []
        self._pin_s = 0.0
        self._refusal = ""

    def warm(self, mapping: Mapping) -> None:
        """Begin to pin this mapping, in the background."""
        pinned = _Pinned(mapping)
        pinned.thread = threading.Thread(target=self._pin, args=(pinned,), name="kvstrata-pin", daemon=True)
        with self._lock:
            self._pools[mapping] = pinned
        pinned.thread.start()

    def forget(self, mapping: Mapping) -> None:
        """Unregister this mapping in the background and drop it; no copy may touch it any more."""
        with self._lock:
            pinned = self._pools.pop(mapping, None)
            self._ending = [thread for thread in self._ending if thread.is_alive()]
            if pinned is not None:
                pinned.stop.set()
                thread = threading.Thread(
                    target=self._unpin, args=(pinned,), name="kvstrata-unpin", daemon=True
                )
                self._ending.append(thread)
                thread.start()

    def stop(self) -> None:
        """Stop pinning."""
        with self._lock:
            for pinned in self._pools.values():
                pinned.stop.set()

    def close(self, timeout_s: float) -> None:
        """Unregister everything; no copy may run any more. After `timeout_s` this continues in the background."""
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            mappings = list(self._pools)
        for mapping in mappings:
            self.forget(mapping)
        for thread in self._ending:
            thread.join(max(0.0, ends_s - time.monotonic()))

    def stats(self) -> dict[str, int | float | str]:
        """Counters and current state."""
        return {
            "pinned_bytes": sum(pinned.bytes for pinned in list(self._pools.values())),
            "pin_s": round(self._pin_s, 3),
            "pin_refusal": self._refusal,
        }

    def _pin(self, pinned: _Pinned) -> None:
        mapping = pinned.mapping
        begun_s = time.monotonic()
        for offset, size in present_steps(lambda: mapping, pinned.stop, SLAB_BYTES, WALKS):
            try:
                region = HostRegion(self._device, mapping.extents.address + offset, size)
            except CudaError as error:
                self._refusal = str(error)
                log.warning(
                    "%d of %d MB of the pool are pinned; the rest is copied at a lower speed: %s",
                    pinned.bytes >> 20,
                    mapping.extents.length >> 20,
                    error,
                )
                return
            pinned.regions.append(region)
            self._engine.pin(region)
            pinned.bytes += size
            self._pin_s = time.monotonic() - begun_s

    def _unpin(self, pinned: _Pinned) -> None:
        assert pinned.thread is not None
        pinned.thread.join()
        while pinned.regions:
            region = pinned.regions.pop()
            self._engine.unpin(region)
            try:
                region.unregister()
            except CudaError as error:
                # The context is broken, so every registration in it is void.
                log.warning("the pool cannot be unpinned: %s", error)
                return
