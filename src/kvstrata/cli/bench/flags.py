"""Flags with bounds, which the benchmark commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of a flag that is a whole number within bounds."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, found {text!r}")
        return int(text)

    return read
