"""One test over the rows of a table: a failure names its row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def case(*row: object) -> Iterator[None]:
    """Adds the row to the report of a failure within the block."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"in the case {row}")
        raise
