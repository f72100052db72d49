"""Transformations of payloads for the codec wrapper (`docs/formats.md`). Without the GIL."""

from typing_extensions import Buffer

def split_planes(out: Buffer, source: Buffer) -> None:
    """Every other byte of `source`, from the first on, then the others. ValueError for overlap or unequal lengths."""

def join_planes(out: Buffer, source: Buffer) -> None:
    """The inverse of `split_planes`."""

def planes_path() -> str:
    """The implementation in use: scalar, avx2 or avx512."""

def planes_paths() -> list[str]:
    """What this CPU can run, slowest first."""

def set_planes_path(name: str | None) -> None:
    """Forces an implementation, for tests and benchmarks; None: the best one. ValueError if unsupported."""
