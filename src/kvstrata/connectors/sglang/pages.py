"""Computes where the bytes of a page lie in one of SGLang's host pools.

A host pool returns the addresses and lengths of the runs of any page (`get_page_buffer_meta`); storages use them to
move pages without a copy in between.  In every pool of SGLang, a run lies at a fixed distance from the same run of the
next page, so the addresses of two pages determine all others; a third page is checked against them.  A page's runs
become the sections of its record, in the order of their addresses.

Neither SGLang nor torch is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstrata.errors import ConfigError
from kvstrata.native.core import CopyPlan


class PageRuns(NamedTuple):
    """The runs of a pool's pages. The addresses are valid as long as SGLang keeps the pool."""

    bases: tuple[int, ...]
    """Address of each run of page 0, in ascending order."""
    strides: tuple[int, ...]
    """Bytes from a run of one page to the same run of the next page."""
    run_bytes: tuple[int, ...]
    n_pages: int
    page_tokens: int
    """Slots of the pool in a page; page i begins at slot i x `page_tokens`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(self.run_bytes)

    def plan(self) -> CopyPlan:
        """The plan of copies between pages of the pool and records."""
        lengths = list(dict.fromkeys(self.run_bytes))
        return CopyPlan(
            self.bases,
            self.n_pages,
            self.strides,
            shapes=[((), length) for length in lengths],
            section_shapes=[lengths.index(length) for length in self.run_bytes],
        )


class _Slots(list[int]):
    """Slot numbers as `get_page_buffer_meta` reads them: it asks torch's tensors for `len` and `tolist` only."""

    def tolist(self) -> list[int]:
        return list(self)


def read_pages(name: str, pool: Any) -> PageRuns:
    """The pages of a host pool. Raises ConfigError, which names the pool, if it does not tell where they lie."""
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise ConfigError(
            f"host pool {name!r} ({type(pool).__name__}): SGLang moves its pages about while it runs, which is not "
            "supported; leave --hicache-storage-backend out",
            field="hicache_storage_backend",
        )
    page_tokens = int(pool.page_size)
    n_pages = int(pool.size) // page_tokens
    try:
        first = _runs(pool, 0, page_tokens)
        second = _runs(pool, min(1, n_pages - 1), page_tokens)
        last = _runs(pool, n_pages - 1, page_tokens)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"host pool {name!r} ({type(pool).__name__}, layout {pool.layout!r}): SGLang does not tell where its pages "
            f"lie: {error}; set --hicache-mem-layout to page_first or page_first_direct",
            field="hicache_mem_layout",
        ) from error
    if not first:
        raise ConfigError(
            f"host pool {name!r} ({type(pool).__name__}): has no bytes of its own, and models with such pools are not "
            "supported; leave --hicache-storage-backend out",
            field="hicache_storage_backend",
        )
    order = sorted(range(len(first)), key=lambda run: first[run])
    bases = tuple(first[run][0] for run in order)
    lengths = tuple(first[run][1] for run in order)
    strides = tuple(second[run][0] - first[run][0] or lengths[i] for i, run in enumerate(order))
    regular = [(base + stride * (n_pages - 1)) for base, stride in zip(bases, strides, strict=True)]
    if [last[run] for run in order] != list(zip(regular, lengths, strict=True)):
        raise ConfigError(
            f"host pool {name!r} ({type(pool).__name__}, layout {pool.layout!r}): its pages do not lie at equal "
            "distances, which is not supported; leave --hicache-storage-backend out",
            field="hicache_mem_layout",
        )
    return PageRuns(bases, strides, lengths, n_pages, page_tokens)


def _runs(pool: Any, page: int, page_tokens: int) -> list[tuple[int, int]]:
    """(address, length) of each run of one page; empty if the pool has no memory."""
    told = pool.get_page_buffer_meta(_Slots(range(page * page_tokens, (page + 1) * page_tokens)))
    return [] if told is None else list(zip(map(int, told[0]), map(int, told[1]), strict=True))
