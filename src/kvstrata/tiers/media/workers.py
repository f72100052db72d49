"""The fields for an adapter's threads, which all media share."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvstrata.tiers.lanes import Lane

NumWorkers = Annotated[
    int, Meta(ge=1, le=256, description="Threads for the lanes that `per_op_workers` does not name.")
]
PerOpWorkers = Annotated[
    dict[Lane, Annotated[int, Meta(ge=1, le=256)]],
    Meta(description="Number of dedicated threads for `lookup`, `retrieve`, `store` or `delete`."),
]
