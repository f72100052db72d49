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
    if len(name) > MAX_NAME_CHARS:
        return ""
    close = difflib.get_close_matches(name, {*known, *unwanted}, n=1, cutoff=cutoff)
    return f" (did you mean '{close[0]}'?)" if close and close[0] not in unwanted else ""
