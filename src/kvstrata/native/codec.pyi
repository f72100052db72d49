"""Transformations of payloads for the codec wrapper (`docs/formats.md`). They run without the GIL.

All buffers stay the caller's; each function returns when its output buffers are filled.
"""

from collections.abc import Sequence

from typing_extensions import Buffer

def split_planes(out: Buffer, source: Buffer) -> None:
    """Writes bytes 0, 2, 4, … of `source` to `out`, then bytes 1, 3, 5, …

    Raises ValueError if the two buffers overlap or differ in length.
    """

def join_planes(out: Buffer, source: Buffer) -> None:
    """The inverse of `split_planes`; raises as it does."""

def planes_path() -> str:
    """The implementation in use: scalar, avx2 or avx512."""

def fp8_encode(shape: Sequence[int], dtype: int, numbers: Buffer, codes: Buffer, scales: Buffer) -> bool:
    """Turns 16-bit numbers (dtype 1: bfloat16, 2: float16) into codes and scales; False if a number is not finite.

    The shape is (blocks, groups, tokens, heads, dim), see fp8.h.

    Raises ValueError for an impossible shape, and for buffers that do not fit it.
    """

def fp8_decode(shape: Sequence[int], dtype: int, codes: Buffer, scales: Buffer, numbers: Buffer) -> None:
    """Turns codes and scales back into numbers, rounded to the 16-bit type. Raises ValueError as `fp8_encode`."""
