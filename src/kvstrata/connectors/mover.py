"""Moves whole chunks between an engine's blocks and the pool. Blocks on a GPU have a mover of their own (`device`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.client import CacheClient, Identity, LoadItem, LoadJob, StoreJob
from kvstrata.connectors.vllm.metadata import Store
from kvstrata.types import LeaseName


class Mover:
    """Moves blocks in host memory: the client's copy threads copy them straight into and out of the pool."""

    sections: Mapping[str, int] = {}
    """The record section of each layer; empty if synchronous loads end before the model runs."""

    def __init__(self, client: CacheClient, plan: Any) -> None:
        self._client = client
        self._plan = plan

    @property
    def broken(self) -> bool:
        """Whether copying has stopped, for the rest of the process."""
        return False

    def store(self, identity: Identity, store: Store, blocks: Sequence[Sequence[int]]) -> StoreJob:
        """Begin to copy a store's chunks into L1. Never blocks; blocks are read until the job is `gathered`."""
        return self._store(identity, store, self._plan, blocks)

    def _store(
        self, identity: Identity, store: Store, plan: Any, blocks: Sequence[Sequence[int]]
    ) -> StoreJob:
        return self._client.store(
            identity,
            store.parent,
            store.chain,
            plan,
            blocks,
            probe=store.probe,
            tail_tokens=store.tail_tokens,
            replaces=store.replaces,
            traceparent=store.traceparent,
        )

    def load(self, identity: Identity, lease: LeaseName, items: Sequence[LoadItem], *, sync: bool) -> LoadJob:
        """Begin to copy chunks into blocks, which are written until the job is `done`. Never blocks."""
        return self._client.load(identity, lease, items, self._plan, sync=sync)

    def await_section(self, job: LoadJob, section: int | None, timeout_s: float) -> bool:
        """Make the model's further work wait for the copies of this section, or of all sections with None.

        This thread waits at most `timeout_s`. Returns False if the model may run before the copies have ended.
        """
        return job.wait(timeout_s)

    def take_counts(self) -> dict[str, int]:
        """The mover's own counts since the last call."""
        return {}

    def close(self) -> None:
        """Free the mover's resources."""
