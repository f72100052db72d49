"""Lists a store for a bounded time: a server may answer with pages for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from kvstrata.storage.media.object_store.names import NAME

PAGE = 1000
LIST_S = 600.0
"""Longest time of a listing; each of its requests has a time limit of its own."""


def pages(store: Any) -> Iterator[list[Any]]:
    """The pages of a listing, of each the objects whose names are ours.

    Raises TimeoutError after LIST_S, and the library's errors.
    """
    import obstore

    until_s = time.monotonic() + LIST_S
    for page in obstore.list(store, chunk_size=PAGE):
        yield [meta for meta in page if NAME.fullmatch(meta["path"])]
        if time.monotonic() > until_s:
            raise TimeoutError(f"incomplete: the listing did not end within {LIST_S:g} s")
