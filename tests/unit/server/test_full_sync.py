"""A full sync tells what it has begun with, whatever changes meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstrata.observability.metrics import Histogram
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import Done, SyncBegin, SyncEnd, SyncPart
from kvstrata.server.cluster.events import TierNews
from kvstrata.server.cluster.sync import FullSync
from kvstrata.types import KEY_BYTES


class NoChunks:
    def ready_tags(self, entry: int, count: int) -> tuple[bytes, int]:
        return b"", 0


@pytest.mark.parametrize("tiers", [["l1", "near-1", "disk-0"], ["l1"]], ids=["added", "removed"])
async def test_a_tier_that_comes_or_goes_during_a_sync_does_not_end_the_server(tiers: list[str]) -> None:
    supervisor = Supervisor(asyncio.get_running_loop())
    news = TierNews(cast(Any, SimpleNamespace(lists=lambda tier: False)))
    news.set_tiers(["l1", "disk-0"])
    news.tier_got("disk-0", bytes(KEY_BYTES))
    asked: list[object] = []

    async def ask(request: Any, kind: type[Done], timeout_s: float) -> Done:
        asked.append(request)
        if isinstance(request, SyncBegin):  # what a registration does when the tiers have changed
            news.set_tiers(tiers)
            news.tier_got("near-1", b"\1" * KEY_BYTES)
        return Done(request.seq, 1)

    sync = FullSync(
        cast(Any, SimpleNamespace(ask=ask)), ("ours", 7), "tcp://x", pool=cast(Any, NoChunks()),
        news=news, told=news._told, frozen_by=set(), supervisor=supervisor, seconds=Histogram(),
    )  # fmt: skip
    news.want_sync("registered")
    sync.begin_if_wanted()
    await supervisor.idle()
    assert not supervisor.failure.done()
    begun, *parts, end = asked
    assert isinstance(begun, SyncBegin) and isinstance(end, SyncEnd)
    assert all(isinstance(part, SyncPart) and part.tier == "disk-0" for part in parts)
    assert set(end.tags) == {"l1", "disk-0"}
    assert not news.telling, "the registration then wants another sync"
