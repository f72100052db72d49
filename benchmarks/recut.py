"""`recut`: making records of one geometry of those of another, as a lookup in the server does, beside plain copies.

A chunk of 256 tokens of a model of 32 layers, 8 KV heads of 128 numbers in bfloat16 has 32 MiB.  Its records lie in
buffers that are larger than the cache, are verified, copied by strides and sealed, by one thread.  The plain copy takes
over as many bytes of records as they are: verified, copied in one run, sealed.  libc's memcpy of as many bytes is
reported too.  All take turns.

Sketch: each of the three steps reads or writes all bytes once, and a run has at least 512 bytes (K and V of one head
and token), so a recut costs as much as the plain copy, apart from the shorter runs.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import time
from typing import Any, NamedTuple

from benchmarks.common import figure, median_spread, sized
from kvstrata.keys.recut import Part
from kvstrata.native.copying import buffer_address
from kvstrata.native.record import CopyOutcome, RecordSpec, seal_record
from kvstrata.server.recuts.geometries import Geometry, Plan, plan
from kvstrata.server.recuts.record import Place, record_length, recut_records
from kvstrata.types import Slice, facts_digest

LAYERS, HEADS, DIM, CHUNK_TOKENS = sized((32, 8, 128, 256), (4, 8, 16, 256))
CHUNKS = sized(4, 2)
REPEATS = sized(9, 1)
TARGET = 0.7
KEY, ROOT = b"k" * 32, b"i" * 32
TOKENS_OUTSIDE, HEADS_OUTSIDE = ("tokens", "kv_heads"), ("kv_heads", "tokens")


def geometry(ranks: int, block_tokens: int, order: tuple[str, str], stages: int = 1) -> Geometry:
    """Return the slices of an engine: `ranks` tensor-parallel ranks, in `stages` pipeline stages."""
    parts = []
    for stage, rank in itertools.product(range(stages), range(ranks)):
        heads, layers = HEADS // ranks, LAYERS // stages
        sizes = {"tokens": block_tokens, "kv_heads": heads}
        section_bytes = CHUNK_TOKENS * heads * 2 * DIM * 2
        facts = {
            "format": "paged-blocks/2", "dtype": "bfloat16", "stored_dtype": "bfloat16", "quantisation": "NONE",
            "element_bytes": 2, "chunk_tokens": CHUNK_TOKENS, "block_tokens": block_tokens, "scales": [],
            "axes": [*([name, sizes[name]] for name in order), ["kv", 2], ["dim", DIM]],
            "section_bytes": section_bytes, "layers": list(range(stage * layers, (stage + 1) * layers)),
        }  # fmt: skip
        place = {
            "layers": (stage * layers, (stage + 1) * layers),
            "kv_heads": (rank * heads, (rank + 1) * heads),
        }
        parts.append(Part(Slice(**place, layout=facts_digest(facts)), facts))
    return Geometry(b"".join(sorted(part.slice.digest() for part in parts)), tuple(parts))


class Case(NamedTuple):
    """A way to recut."""

    name: str
    source: Geometry
    target: Geometry


CASES = (
    Case("tp1_to_tp2", geometry(1, 16, TOKENS_OUTSIDE), geometry(2, 16, TOKENS_OUTSIDE)),
    Case("tp4_to_tp2", geometry(4, 16, TOKENS_OUTSIDE), geometry(2, 16, TOKENS_OUTSIDE)),
    Case("tp2_to_tp1", geometry(2, 16, HEADS_OUTSIDE), geometry(1, 16, HEADS_OUTSIDE)),
    Case("pp1_to_pp2", geometry(1, 16, TOKENS_OUTSIDE), geometry(1, 16, TOKENS_OUTSIDE, stages=2)),
    Case("blocks_16_to_128", geometry(1, 16, HEADS_OUTSIDE), geometry(1, 128, HEADS_OUTSIDE)),
    Case("hnd_to_nhd", geometry(1, 16, HEADS_OUTSIDE), geometry(1, 16, TOKENS_OUTSIDE)),
)


class Memory:
    """The records of `CHUNKS` chunks of a case, in and out, and the way to make them."""

    def __init__(self, case: Case) -> None:
        self._areas: list[mmap.mmap] = []
        self.made: Plan = plan(case.source, case.target)
        self._plain: Plan = plan(case.target, case.target)
        self.payload_bytes = CHUNKS * sum(sum(one.target_sections) for one in self.made.recuts)
        self._sources = self._records([*self.made.recuts[0].source_sections])
        self._targets = self._records([one.target_sections for one in self.made.recuts])
        self._copied = self._records([one.target_sections for one in self.made.recuts])

    def _records(self, sections: list[tuple[int, ...]]) -> list[list[tuple[int, int, tuple[int, ...]]]]:
        """Seal a record of each slice, for each chunk, in new memory; (address, length, sections)."""
        chunks = []
        for _ in range(CHUNKS):
            row = []
            for lengths in sections:
                length = record_length(lengths)
                area = mmap.mmap(-1, length)
                area.write(bytes(length))
                address = buffer_address(area, writable=True)
                seal_record(address, length, self._spec, lengths)
                row.append((address, length, lengths))
                self._areas.append(area)
            chunks.append(row)
        return chunks

    @property
    def _spec(self) -> RecordSpec:
        return RecordSpec(KEY, ROOT, b"s" * 32, b"", CHUNK_TOKENS, 1)

    def recut(self) -> float:
        """Make all records; return the seconds."""
        return self._make(self.made, self._sources, self._targets)

    def copy(self) -> float:
        """Take the made records over as they are; return the seconds."""
        return self._make(self._plain, self._targets, self._copied)

    def _make(
        self,
        how: Plan,
        sources: list[list[tuple[int, int, tuple[int, ...]]]],
        targets: list[list[tuple[int, int, tuple[int, ...]]]],
    ) -> float:
        begun_s = time.perf_counter()
        for given, wanted in zip(sources, targets, strict=True):
            places = [(address, length, KEY) for address, length, _ in given]
            targets = [
                Place(recut, address, length, self._spec)
                for recut, (address, length, _) in zip(how.recuts, wanted, strict=True)
            ]
            if recut_records(places, targets) is not CopyOutcome.OK:
                raise RuntimeError("a sound record was refused")
        return time.perf_counter() - begun_s

    def memcpy(self) -> float:
        """Copy as many bytes; return the seconds."""
        call = ctypes.CDLL(None).memcpy
        call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        begun_s = time.perf_counter()
        for given, wanted in zip(self._targets, self._copied, strict=True):
            for (source, length, _), (target, _, _) in zip(given, wanted, strict=True):
                call(target, source, length)
        return time.perf_counter() - begun_s


def run() -> list[dict[str, Any]]:
    """Measure all cases; the figure of each has its speed, and its ratio to the plain copy in the same turn."""
    figures = []
    for case in CASES:
        memory = Memory(case)
        memory.recut(), memory.copy(), memory.memcpy()
        seconds, ratios, bare = [], [], []
        for _ in range(REPEATS):
            taken, copied, moved = memory.recut(), memory.copy(), memory.memcpy()
            seconds.append(taken)
            ratios.append(copied / taken)
            bare.append(moved / taken)
        speeds = [memory.payload_bytes / taken / 1e9 for taken in seconds]
        value, spread = median_spread(speeds)
        ratio, ratio_spread = median_spread(ratios)
        figures.append(
            figure(
                f"recut_{case.name}",
                value=value,
                unit="GB/s",
                ratio=ratio,
                ratio_to="a verified, sealed copy of as many bytes in one run",
                target=f"≥ {TARGET} ×",
                ok=ratio >= TARGET,
                spread=spread,
                ratio_spread=ratio_spread,
                ratio_to_memcpy=median_spread(bare)[0],
                copies=sum(len(one.copies) for one in memory.made.recuts),
            )
        )
    return figures
