"""Transformations of payloads for the codec wrapper (`docs/formats.md`). Without the GIL."""

from collections.abc import Sequence

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

def fp8_sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Numbers and scales of a section of this shape: (blocks, groups, tokens, heads, dim), see fp8.h.

    ValueError for a shape that makes no sense.
    """

def fp8_encode(shape: Sequence[int], dtype: int, numbers: Buffer, codes: Buffer, scales: Buffer) -> bool:
    """16-bit numbers (dtype 1: bfloat16, 2: float16) into codes and scales; False when one is not finite.

    Raises ValueError for buffers that do not fit the shape.
    """

def fp8_decode(shape: Sequence[int], dtype: int, codes: Buffer, scales: Buffer, numbers: Buffer) -> None:
    """The inverse, rounded to the 16-bit type. ValueError likewise."""

def fp8_path() -> str:
    """The implementation in use: scalar, avx2 or avx512."""

def fp8_paths() -> list[str]:
    """What this CPU can run, slowest first."""

def set_fp8_path(name: str | None) -> None:
    """Forces an implementation, for tests and benchmarks; None: the best one. ValueError if unsupported."""
