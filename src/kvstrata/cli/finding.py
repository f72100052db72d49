"""One line of the report of `kvstrata doctor`."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """`state` is ok, warn or fail; `advice` says what to change."""

    check: str
    state: str
    found: str
    advice: str = ""
