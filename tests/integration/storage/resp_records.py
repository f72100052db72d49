"""Opens `resp` adapters; puts numbered records to them and loads the records."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from kvstrata.storage.base import LoadOutcome, PutOutcome, StorageAdapter
from kvstrata.storage.entry import make_adapter
from kvstrata.testing.adapter_contract import LOADED, SIZE
from kvstrata.testing.strategies import (
    key_of,
    lent_context,
    load_item,
    loaded_payload,
    payload_of,
    put_item,
    watched,
)

SECRET = "hunter2-hunter2"


@contextlib.asynccontextmanager
async def opened(entry: dict[str, Any]) -> AsyncIterator[StorageAdapter]:
    adapter = make_adapter(entry, 0)
    try:
        await adapter.open(lent_context(lambda key: None))
        yield adapter
    finally:
        await adapter.close()


async def put(adapter: StorageAdapter, *numbers: int, size: int = SIZE) -> list[PutOutcome]:
    items = [put_item(key_of(n), size) for n in numbers]
    outcomes = await adapter.put(items)
    for item in items:
        watched(item).check()
    return outcomes


async def load(adapter: StorageAdapter, *numbers: int, size: int = SIZE) -> list[LoadOutcome]:
    items = [load_item(key_of(n), size) for n in numbers]
    outcomes = await adapter.load(items)
    for item, outcome in zip(items, outcomes, strict=True):
        watched(item).check()
        if outcome == LOADED:
            assert loaded_payload(item, size) == payload_of(item.key, size)
    return outcomes
