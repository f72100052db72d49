"""The remembered presence of keys on a shared medium, against a model that knows only the promises.

The model keeps, for each key, its presence at every step and when this server's own operations ended.  An answer is
right if it was true at a moment that the promises allow: while the question ran, or within its time to live and after
the end of the last own operation on that key.  The medium must not be asked again about a key while the answer must
still be remembered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.clock import SystemClock
from kvstrata.storage.base import (
    AdapterContext,
    Capabilities,
    Found,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.storage.wrap.presence import PresenceAdapter, PresenceLimits
from kvstrata.testing.strategies import key_of, load_item, put_item
from tests.harness.amount import amount

NUMBERS = range(2)
PRESENCE_TTL_S, NEGATIVE_TTL_S = 4.0, 1.0
SIZE = 100
ABSENT = Found(Presence.ABSENT)

numbers = st.sampled_from(NUMBERS)
some = st.lists(numbers, min_size=1, max_size=2)
hows = st.sampled_from(["well", "well", "well", "fails", "lost"])
wholes = st.sampled_from([None, "acts", "acts", "well", "well", "fails", "lost"])
"""How an operation ends that acts and answers at once. None: it waits for other rules; acts: only its answer waits."""


class HandClock(SystemClock):
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s


class Call:
    """One operation that has reached the medium; it acts and answers when the machine says so."""

    def __init__(self, kind: str, keys: Sequence[bytes]) -> None:
        self.kind = kind
        self.keys = list(keys)
        self.acts: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answers: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class SharedMedium(StorageAdapter):
    """A medium of keys and lengths, where each call waits before it acts and again before it answers."""

    def __init__(self) -> None:
        self.name = "shared-0"
        self.capabilities = Capabilities(persistent=True, shared=True)
        self.there: dict[bytes, Found] = {}
        self.calls: list[Call] = []
        self.context: AdapterContext | None = None

    async def _act(self, kind: str, keys: Sequence[bytes]) -> tuple[Call, str]:
        call = Call(kind, keys)
        self.calls.append(call)
        try:
            return call, await call.acts
        except asyncio.CancelledError:
            self.calls.remove(call)
            raise

    async def _answer(self, call: Call) -> None:
        try:
            await call.answers
        finally:
            self.calls.remove(call)

    async def open(self, context: AdapterContext) -> None:
        self.context = context

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        call, how = await self._act("exists", keys)
        found = [self.there.get(key, ABSENT) for key in keys]
        if how == "fails":
            found = [Found(Presence.UNKNOWN, 0, "io")] * len(keys)
        await self._answer(call)
        return found

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        call, how = await self._act("put", [item.key for item in items])
        for item in items:
            if how != "fails":
                self.there.setdefault(item.key, Found(Presence.PRESENT, item.hold.length))
            item.hold.drop()
        await self._answer(call)
        status = PutStatus.STORED if how == "well" else PutStatus.FAILED  # an acknowledgement may be lost
        return [PutOutcome(status)] * len(items)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        call, how = await self._act("load", [item.key for item in items])
        status = {"well": LoadStatus.LOADED, "fails": LoadStatus.FAILED, "lost": LoadStatus.CORRUPT}[how]
        outcomes = []
        for item in items:
            here = item.key in self.there
            outcomes.append(LoadOutcome(status if here else LoadStatus.ABSENT))
            if here and status is LoadStatus.CORRUPT:
                del self.there[item.key]
            item.hold.drop()
        await self._answer(call)
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> int:
        call, how = await self._act("delete", keys)
        if how != "fails":
            for key in keys:
                self.there.pop(key, None)
        await self._answer(call)
        return len(keys)

    async def clear(self) -> int:
        call, _ = await self._act("clear", [])
        self.there.clear()
        await self._answer(call)
        return 0

    async def usage(self) -> Usage:
        return Usage(0, 0, 0)

    async def close(self) -> None:
        pass


class Truth(NamedTuple):
    """The presence of a key after a step."""

    step: int
    at_s: float
    found: Found


class Remembered(NamedTuple):
    """An answer that must be repeated without asking the medium."""

    asked_s: float
    presence: Presence


class Running(NamedTuple):
    """One operation of this server that has not ended."""

    task: asyncio.Task[Any]
    kind: str
    keys: list[bytes]
    begun_step: int
    begun_s: float
    earliest: dict[bytes, int]
    """For each key, the step in which the last own operation before this one had ended."""
    must_recall: set[bytes]
    calls: list[Call]
    """The calls of the medium that the operation made."""


class PresenceMachine(RuleBasedStateMachine):
    max_keys = 100

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = HandClock()
        self.medium = SharedMedium()
        limits = PresenceLimits(
            presence_ttl_ms=int(1000 * PRESENCE_TTL_S),
            negative_ttl_ms=int(1000 * NEGATIVE_TTL_S),
            max_keys=self.max_keys,
        )
        self.adapter = PresenceAdapter(self.medium, limits, self.clock)
        self.told_evicted: list[bytes] = []
        context = AdapterContext("model", self.clock, 0, 0, self.told_evicted.append)
        self.loop.run_until_complete(self.adapter.open(context))
        self.step = 0
        keys = list(map(key_of, NUMBERS))
        self.truths = {key: [Truth(0, self.clock.now_s, ABSENT)] for key in keys}
        self.own_ended = dict.fromkeys(keys, -1)
        self.remembered: dict[bytes, Remembered] = {}
        self.running: list[Running] = []

    def teardown(self) -> None:
        for operation in self.running:
            operation.task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    # -- what the model knows ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the loop run, judge the operations that have ended, and record the presence of all keys."""

        async def turn() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())
        self.step += 1
        for key, truths in self.truths.items():
            found = self.medium.there.get(key, ABSENT)
            if truths[-1].found != found:
                truths.append(Truth(self.step, self.clock.now_s, found))
        for operation in list(self.running):
            if operation.task.done():
                self.running.remove(operation)
                self.judge(operation)

    def own_end(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.own_ended[key] = self.step
            self.remembered.pop(key, None)

    def judge(self, operation: Running) -> None:
        if operation.kind != "exists":
            bad = operation.keys
            if operation.kind == "load" and not operation.task.cancelled():
                outcomes = zip(operation.keys, operation.task.result(), strict=True)
                bad = [key for key, outcome in outcomes if outcome.status is not LoadStatus.LOADED]
            self.own_end(bad)
            return
        if operation.task.cancelled():
            return
        asked = {key for call in operation.calls for key in call.keys}
        for key, found in zip(operation.keys, operation.task.result(), strict=True):
            if found.presence is Presence.UNKNOWN:
                assert key in asked, "UNKNOWN was answered from memory"
                self.remembered.pop(key, None)
                continue
            ttl_s = PRESENCE_TTL_S if found.presence is Presence.PRESENT else NEGATIVE_TTL_S
            assert self.was_true(operation, key, found, ttl_s), (found, self.truths[key])
            if key in asked:
                self.remembered.pop(key, None)
                if self.own_ended[key] < operation.begun_step:
                    self.remembered[key] = Remembered(operation.begun_s, found.presence)

    def was_true(self, operation: Running, key: bytes, found: Found, ttl_s: float) -> bool:
        """Whether an answer was true at a moment that the promises allow."""
        truths = self.truths[key]
        for i, truth in enumerate(truths):
            until_step, until_s = (
                (truths[i + 1].step, truths[i + 1].at_s) if i + 1 < len(truths) else (self.step + 1, 1e9)
            )
            fresh = until_step > operation.earliest[key] and until_s > operation.begun_s - ttl_s
            if truth.found == found and (fresh or until_step > operation.begun_step):
                return True
        return False

    def begin(self, kind: str, keys: list[bytes], work: Coroutine[Any, Any, Any], whole: str | None) -> None:
        now_s = self.clock.now_s
        must_recall = {
            key
            for key in keys
            if (known := self.remembered.get(key)) is not None
            and now_s - known.asked_s
            < (PRESENCE_TTL_S if known.presence is Presence.PRESENT else NEGATIVE_TTL_S)
        }
        before = list(self.medium.calls)
        task = self.loop.create_task(work)
        calls: list[Call] = []
        earliest = dict(self.own_ended)
        operation = Running(task, kind, keys, self.step, now_s, earliest, must_recall, calls)
        self.running.append(operation)

        async def turn() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        self.loop.run_until_complete(turn())
        calls.extend(call for call in self.medium.calls if call not in before)
        if kind == "exists" and self.max_keys == 100:
            asked = {key for call in calls for key in call.keys}
            assert not asked & must_recall, "the medium was asked again about a remembered key"
        self.settle()
        for call in calls if whole else []:
            call.acts.set_result("well" if whole == "acts" else whole)
            self.settle()
            if whole != "acts":
                call.answers.set_result(None)
                self.settle()
        if whole and kind != "exists":
            self.look()

    # -- rules ---------------------------------------------------------------------------------------------

    @rule(which=some, whole=wholes)
    def exists(self, which: list[int], whole: str | None) -> None:
        keys = list(map(key_of, which))
        self.begin("exists", keys, self.adapter.exists(keys), whole)

    @rule()
    def look(self) -> None:
        keys = list(map(key_of, NUMBERS))
        self.begin("exists", keys, self.adapter.exists(keys), "well")

    @rule(number=numbers)
    def look_at_one(self, number: int) -> None:
        self.begin("exists", [key_of(number)], self.adapter.exists([key_of(number)]), "well")

    @rule(which=some, whole=wholes)
    def put(self, which: list[int], whole: str | None) -> None:
        items = [put_item(key_of(number), SIZE + number) for number in which]
        self.begin("put", [item.key for item in items], self.adapter.put(items), whole)

    @rule(which=some, whole=wholes)
    def load(self, which: list[int], whole: str | None) -> None:
        items = [load_item(key_of(number), SIZE + number) for number in which]
        self.begin("load", [item.key for item in items], self.adapter.load(items), whole)

    @rule(which=some, whole=wholes)
    def delete(self, which: list[int], whole: str | None) -> None:
        keys = list(map(key_of, which))
        self.begin("delete", keys, self.adapter.delete(keys), whole)

    @rule(whole=wholes)
    def clear(self, whole: str | None) -> None:
        self.begin("clear", list(map(key_of, NUMBERS)), self.adapter.clear(), whole)

    @precondition(lambda self: any(not call.acts.done() for call in self.medium.calls))
    @rule(data=st.data(), how=hows)
    def act(self, data: st.DataObject, how: str) -> None:
        call = data.draw(st.sampled_from([call for call in self.medium.calls if not call.acts.done()]))
        call.acts.set_result(how)
        self.settle()

    @precondition(lambda self: any(call.acts.done() for call in self.medium.calls))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        calls = [call for call in self.medium.calls if call.acts.done() and not call.answers.done()]
        data.draw(st.sampled_from(calls)).answers.set_result(None)
        self.settle()
        self.look()

    @precondition(lambda self: self.medium.calls)
    @rule()
    def all_answer(self) -> None:
        for call in list(self.medium.calls):
            if not call.acts.done():
                call.acts.set_result("well")
                self.settle()
            call.answers.set_result(None)
            self.settle()
        self.look()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.running)).task.cancel()
        self.settle()
        self.look()

    @rule(number=numbers)
    def another_server_puts(self, number: int) -> None:
        self.medium.there[key_of(number)] = Found(Presence.PRESENT, 5000 + number)
        self.settle()

    @rule(number=numbers)
    def another_server_deletes(self, number: int) -> None:
        self.medium.there.pop(key_of(number), None)
        self.settle()

    @rule(number=numbers)
    def the_cap_evicts(self, number: int) -> None:
        assert self.medium.context is not None
        self.medium.there.pop(key_of(number), None)
        self.medium.context.record_evicted(key_of(number))
        assert self.told_evicted.pop() == key_of(number)
        self.settle()
        self.own_end([key_of(number)])

    @rule(seconds=st.sampled_from([0.3, 0.7, 1.0, 2.5, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.settle()
        self.look()

    @invariant()
    def remembers_no_more_than_its_bound(self) -> None:
        assert self.adapter.stats()["remembered"] <= min(2 * self.max_keys, len(NUMBERS))


class SmallPresenceMachine(PresenceMachine):
    max_keys = 1

    @invariant()
    def remembers_no_more_than_its_bound(self) -> None:
        assert self.adapter.stats()["remembered"] <= 2


_settings = settings(
    max_examples=amount(26, 80),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPresence = PresenceMachine.TestCase
TestPresence.settings = _settings
TestSmallPresence = SmallPresenceMachine.TestCase
TestSmallPresence.settings = _settings
