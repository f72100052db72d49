"""Deadlines end waits and never holds; the breaker stops asking and starts again by itself.

All on virtual time: no deadline of a millisecond ends anything that goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.clock import SystemClock
from kvstrata.errors import StorageError
from kvstrata.testing.strategies import (
    Found,
    Settled,
    ask_for,
    key_of,
    load_item,
    put_item,
    record_length,
    settled,
    watched,
)
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    KeyPage,
    Outcome,
    Presence,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.breaker import Breaker, BreakerState
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.tier import Tier, TierLimits
from kvstrata.types import KEY_BYTES
from tests.harness.virtual import on_virtual_time
from tests.harness.waiting import until

SIZE = 1000


class HandClock(SystemClock):
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s


class Scripted(StorageAdapter):
    """Answers what the test sets; waits for `go` while it is set to wait."""

    def __init__(self) -> None:
        self.name = "scripted-0"
        self.capabilities = Capabilities(persistent=False, shared=False)
        self.calls: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.put_outcome = Settled(Outcome.STORED)
        self.load_outcome = Settled(Outcome.LOADED)
        self.found = Found(Presence.PRESENT)
        self.raises = False
        self.too_few = 0
        self.says_nothing = False
        self.page: Any = None

    async def _act(self, call: str) -> None:
        self.calls.append(call)
        await self.go.wait()
        if self.raises:
            raise ValueError("broken adapter")

    def _answer(self, outcomes: Any) -> Any:
        return None if self.says_nothing else outcomes[self.too_few :]

    async def open(self, context: AdapterContext) -> None:
        pass

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        await self._act("exists")
        ask.reason = self.found.reason
        return self._answer(bytes([self.found.presence]) * (len(keys) // KEY_BYTES))

    async def put(self, items: Sequence[Item]) -> None:
        await self._move("put", self.put_outcome, items)

    async def load(self, items: Sequence[Item]) -> None:
        await self._move("load", self.load_outcome, items)

    async def _move(self, call: str, settled: Settled, items: Sequence[Item]) -> None:
        await self._act(call)
        for item in items:
            item.settle(*settled)
        for item in items[: self.too_few]:
            item.outcome = Outcome.UNSETTLED

    async def delete(self, keys: bytes) -> int:
        await self._act("delete")
        return len(keys)

    async def list_keys(self, cursor: int, most: int) -> Any:
        await self._act("list_keys")
        return self.page

    async def usage(self) -> Usage:
        return Usage(1, 2, 3)

    async def close(self) -> None:
        await self.go.wait()


async def opened(inner: Scripted, clock: HandClock | None = None, **limits: Any) -> Tier:
    values = {"deadline_ms": 600_000, "max_stuck_bytes": 1 << 30, "failures": 3, **limits}
    clock = clock or HandClock()
    tier = Tier(TierConfig("scripted-0", lambda: inner), TierLimits(**values), clock)
    await tier.open(AdapterContext("test", clock, 0, 0, lambda key: None))
    return tier


async def test_a_closed_tier_answers_in_place_of_its_medium_and_ends_the_holds() -> None:
    inner = Scripted()
    tier = await opened(inner)
    await tier.close()
    item, load = put_item(key_of(1), SIZE), load_item(key_of(1), SIZE)
    assert await settled(tier.put, [item]) == [Settled(Outcome.FAILED, "closed")]
    assert await settled(tier.load, [load]) == [Settled(Outcome.FAILED, "closed")]
    assert await ask_for(tier, [key_of(1)]) == [Found(Presence.UNKNOWN, "closed")]
    assert (await tier.delete(key_of(1)), await tier.usage()) == (0, Usage(0, 0, 0))
    assert inner.calls == []
    watched(item).check()
    watched(load).check()


@on_virtual_time
async def test_a_deadline_answers_while_the_hold_stays_with_the_medium() -> None:
    inner = Scripted()
    tier = await opened(inner, deadline_ms=1)
    inner.go.clear()
    item, load = put_item(key_of(1), SIZE), load_item(key_of(1), SIZE)
    late = [*await tier.put([item]), *await tier.load([load])]
    assert await ask_for(tier, [key_of(1)]) == [Found(Presence.UNKNOWN, "deadline")]
    assert not watched(item).dropped.is_set()
    assert not watched(load).dropped.is_set()
    assert tier.stuck_bytes == 2 * record_length(SIZE)
    inner.go.set()
    await tier.close()
    watched(item).check()
    watched(load).check()
    assert tier.stuck_bytes == 0
    assert (item.outcome, load.outcome) == (Outcome.STORED, Outcome.LOADED)
    ended = [(one.outcome, one.reason) for one in late]
    assert ended == [(Outcome.FAILED, "deadline")] * 2, "the medium's late outcomes change no answer"


@on_virtual_time
async def test_a_cancelled_wait_leaves_the_operation_running_and_counts_its_bytes() -> None:
    inner = Scripted()
    tier = await opened(inner)
    inner.go.clear()
    item = put_item(key_of(1), SIZE)
    wait = asyncio.create_task(settled(tier.put, [item]))
    await until(lambda: inner.calls)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert tier.stuck_bytes == record_length(SIZE)
    assert not watched(item).dropped.is_set()
    inner.go.set()
    await tier.close()
    watched(item).check()
    assert tier.stuck_bytes == 0


@on_virtual_time
async def test_operations_that_their_callers_gave_up_count_for_the_breaker() -> None:
    inner = Scripted()
    tier = await opened(inner, failures=2, deadline_ms=20)
    inner.go.clear()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask_for(tier, [key_of(1)]), 0.001)
    await until(lambda: tier.breaker_states()["exists"] == "open")
    inner.go.set()


@pytest.mark.parametrize("well", [True, False])
@on_virtual_time
async def test_a_late_good_end_lets_the_next_operation_try_at_once(well: bool) -> None:
    inner, clock = Scripted(), HandClock()
    tier = await opened(inner, clock, failures=2, deadline_ms=1, open_s=30.0)
    inner.go.clear()
    for _ in range(2):
        assert await ask_for(tier, [key_of(1)]) == [Found(Presence.UNKNOWN, "deadline")]
    inner.found = Found(Presence.PRESENT) if well else Found(Presence.UNKNOWN, "io")
    inner.go.set()
    await tier.ended()
    [found] = await ask_for(tier, [key_of(1)])
    assert found == (inner.found if well else Found(Presence.UNKNOWN, "breaker_open"))
    assert tier.breaker_states()["exists"] == ("closed" if well else "open")


@on_virtual_time
async def test_no_operation_is_taken_while_the_limit_of_stuck_bytes_is_used_up() -> None:
    inner = Scripted()
    tier = await opened(inner, deadline_ms=1, failures=1000, max_stuck_bytes=2 * record_length(SIZE))
    inner.go.clear()
    stuck = [put_item(key_of(n), SIZE) for n in range(2)]
    for item in stuck:
        await settled(tier.put, [item])
    refused, load = put_item(key_of(3), SIZE), load_item(key_of(4), SIZE)
    assert await settled(tier.put, [refused]) == [Settled(Outcome.FAILED, "breaker_open")]
    assert await settled(tier.load, [load]) == [Settled(Outcome.FAILED, "breaker_open")]
    watched(refused).check()
    watched(load).check()
    inner.go.set()
    await until(lambda: tier.stuck_bytes == 0)
    inner.calls.clear()
    assert await settled(tier.put, [put_item(key_of(5), SIZE)]) == [Settled(Outcome.STORED)]
    await tier.close()


@on_virtual_time
async def test_the_deadline_of_a_batch_grows_with_its_bytes() -> None:
    inner = Scripted()
    tier = await opened(inner, deadline_ms=1, bytes_per_deadline=1)
    inner.go.clear()
    wait = asyncio.create_task(settled(tier.put, [put_item(key_of(1), 10_000_000)]))  # 10,000 s
    assert await ask_for(tier, [key_of(1)]) == [Found(Presence.UNKNOWN, "deadline")]
    assert not wait.done()
    inner.go.set()
    assert await wait == [Settled(Outcome.STORED)]
    await tier.close()


@pytest.mark.parametrize(
    ("operation", "failure"),
    [
        ("put", "too_few"),
        ("load", "raises"),
        ("load", "io"),
        ("exists", "says_nothing"),
        ("delete", "raises"),
    ],
)
@on_virtual_time
async def test_failures_in_a_row_open_the_breaker_and_one_good_probe_closes_it(operation, failure):
    inner, clock = Scripted(), HandClock()
    tier = await opened(inner, clock, failures=3, open_s=1.0)

    async def act() -> object:
        if operation == "put":
            item = put_item(key_of(1), SIZE)
            [outcome] = await settled(tier.put, [item])
            if failure == "io" or inner.calls == []:
                watched(item).check()
            return outcome.reason
        if operation == "load":
            [loaded] = await settled(tier.load, [load_item(key_of(1), SIZE)])
            return loaded.reason
        if operation == "exists":
            [found] = await ask_for(tier, [key_of(1)])
            return found.reason
        return "" if await tier.delete(key_of(1)) else "failed"

    inner.raises = failure == "raises"
    inner.too_few = failure == "too_few"
    inner.says_nothing = failure == "says_nothing"
    if failure == "io":
        inner.put_outcome = Settled(Outcome.FAILED, "io")
        inner.load_outcome = Settled(Outcome.FAILED, "io")
        inner.found = Found(Presence.UNKNOWN, "io")
    word = "failed" if operation == "delete" else "io" if failure == "io" else "adapter_error"
    assert [await act() for _ in range(3)] == [word] * 3
    inner.calls.clear()
    assert await act() == ("failed" if operation == "delete" else "breaker_open")
    assert inner.calls == [], "an open breaker asks nobody"
    clock.now_s += 1.0
    assert await act() == word, "the probe fails"
    clock.now_s += 1.9
    inner.calls.clear()
    await act()
    assert inner.calls == [], "after a failed probe it stays open twice as long"
    clock.now_s += 0.1
    inner.raises, inner.too_few, inner.says_nothing = False, 0, False
    inner.put_outcome = Settled(Outcome.STORED)
    inner.load_outcome = Settled(Outcome.LOADED)
    inner.found = Found(Presence.PRESENT)
    assert [await act() for _ in range(3)] == [""] * 3
    assert tier.breaker_states()[operation] == "closed"


@pytest.mark.parametrize(
    "outcome",
    [
        Settled(Outcome.EXISTS),
        Settled(Outcome.THROTTLED, "disk_full"),
        Settled(Outcome.FAILED, "queue_full"),
    ],
)
@on_virtual_time
async def test_failures_that_are_not_the_mediums_keep_the_breaker_closed(outcome: Settled) -> None:
    inner = Scripted()
    inner.put_outcome = outcome
    tier = await opened(inner)
    for _ in range(10):
        assert await settled(tier.put, [put_item(key_of(1), SIZE)]) == [outcome]
    inner.load_outcome = Settled(Outcome.CORRUPT)
    for _ in range(10):
        await settled(tier.load, [load_item(key_of(1), SIZE)])
    assert set(tier.breaker_states().values()) == {"closed"}


@on_virtual_time
async def test_while_loads_fail_no_key_is_reported_as_present() -> None:
    inner, clock = Scripted(), HandClock()
    tier = await opened(inner, clock, failures=1)
    inner.load_outcome = Settled(Outcome.FAILED, "io")
    await settled(tier.load, [load_item(key_of(1), SIZE)])
    inner.calls.clear()
    assert await ask_for(tier, [key_of(1)]) == [Found(Presence.UNKNOWN, "breaker_open")]
    assert inner.calls == []
    clock.now_s += 1.0
    assert await ask_for(tier, [key_of(1)]) == [Found(Presence.PRESENT)]


@on_virtual_time
async def test_close_gives_up_waiting_for_a_stuck_operation() -> None:
    inner = Scripted()
    tier = await opened(inner, close_s=0.01)
    inner.go.clear()
    await asyncio.wait_for(tier.close(), 30)
    inner.go.set()


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=60))
def test_the_breaker_lets_one_probe_through_at_a_time_and_never_stays_open(steps):
    breaker = Breaker(3, 1.0, 4.0)
    now_s = 0.0
    for well, passed_s in steps:
        now_s += passed_s
        admitted = breaker.admit(now_s)
        assert admitted == (breaker.state is not BreakerState.OPEN)
        if admitted:
            if breaker.state is BreakerState.PROBING:
                assert not breaker.admit(now_s), "one probe at a time"
            breaker.ended(well, now_s)
    assert breaker.would_admit(now_s + 4.0)


@pytest.mark.parametrize(
    ("page", "passed"),
    [
        (KeyPage([key_of(1), key_of(2)], 7), True),
        (KeyPage([], 7), True),
        (None, True),
        (KeyPage([key_of(1)] * 3, 7), True),
        (KeyPage([key_of(1)] * 67, 7), False),
        (KeyPage([b"short"], 7), False),
        (KeyPage([key_of(1)], -1), False),
        (KeyPage([key_of(1)], 1 << 64), False),
        ([key_of(1)], False),
    ],
)
@on_virtual_time
async def test_a_valid_page_of_keys_is_passed_on_and_any_other_is_none(page: Any, passed: bool) -> None:
    inner = Scripted()
    inner.page = page
    assert await (await opened(inner)).list_keys(0, 2) == (page if passed else None)


@on_virtual_time
async def test_a_page_of_keys_that_is_late_or_fails_is_none_and_opens_no_breaker() -> None:
    inner = Scripted()
    inner.page = KeyPage([], 1)
    inner.go.clear()
    tier = await opened(inner, deadline_ms=1, failures=1)
    assert await tier.list_keys(0, 2) is None
    inner.go.set()
    inner.raises = True
    assert await tier.list_keys(0, 2) is None
    inner.raises = False
    assert await tier.list_keys(0, 2) == inner.page
    assert set(tier.breaker_states().values()) == {"closed"}


@pytest.mark.parametrize(
    "answer",
    [None, 1.5, "many", (1, 2), Usage(1, 2.0, 3), Usage(-1, 0, 0), Usage(True, 0, 1 << 64)],  # type: ignore[arg-type]
)
@on_virtual_time
async def test_invalid_counts_of_an_adapter_are_logged_once_and_ignored(answer, caplog):
    inner = Scripted()
    tier = await opened(inner)

    async def say(*asked: object) -> Any:
        return answer

    inner.usage = inner.delete = inner.clear = say  # type: ignore[method-assign]
    for _ in range(2):
        assert await tier.usage() == Usage(0, 0, 0)
        assert await tier.delete(key_of(1)) == 0
        with pytest.raises(StorageError, match="not cleared: it answered"):
            await tier.clear()
    assert len(caplog.records) == 3, "each operation is named once"
