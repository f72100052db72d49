"""Suggests a known name in place of a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

MAX_NAME_CHARS = 80


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6, unwanted: Collection[str] = ()) -> str:
    """` (did you mean 'x'?)` with the nearest known name, or an empty string.

    `unwanted`: names that may be meant too, but are not suggested.  A name that is longer than any of ours is not
    compared: the comparison would take time that grows with its length.
    """
    close = nearest_name(name, {*known, *unwanted}, cutoff=cutoff)
    return f" (did you mean '{close}'?)" if close and close not in unwanted else ""


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The nearest known name, or an empty string."""
    if len(name) > MAX_NAME_CHARS:
        return ""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")
