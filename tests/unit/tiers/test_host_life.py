"""The life of an adapter host, seen from the server: it opens, falls silent, ends, is started again, is closed."""

from __future__ import annotations

import asyncio

import pytest

from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.strategies import (
    Found,
    Settled,
    ask_for,
    key_of,
    lent_context,
    load_item,
    put_item,
    settled,
    watched,
)
from kvstrata.tiers.base import Capabilities, Outcome, Presence, Usage
from kvstrata.tiers.host import frames
from kvstrata.tiers.host.frames import Opened
from kvstrata.tiers.host.parent import HostedAdapter
from tests.unit.tiers.host_double import (
    CAPABILITIES,
    CONFIG,
    PUT_DIED,
    STORED,
    Child,
    all_stored,
    opened_with,
    until,
)

pytestmark = pytest.mark.usefixtures("child_in_place_of_a_process")


async def test_answers_from_before_a_childs_end_count_and_its_other_operations_fail(pair) -> None:
    adapter, child = pair
    first, second = put_item(key_of(1), 100), put_item(key_of(2), 100)
    waits = [asyncio.create_task(settled(adapter.put, [item])) for item in (first, second)]
    exists = asyncio.create_task(ask_for(adapter, [key_of(1)]))
    load = asyncio.create_task(settled(adapter.load, [load_item(key_of(3), 100)]))
    delete, usage = asyncio.create_task(adapter.delete(key_of(4))), asyncio.create_task(adapter.usage())
    clear = asyncio.create_task(adapter.clear())
    request = await child.request()
    child.say(all_stored(request))
    child.reap()
    assert await waits[0] == [STORED]
    assert await waits[1] == [PUT_DIED]
    assert await exists == [Found(Presence.UNKNOWN, "host_died")]
    assert await load == [Settled(Outcome.FAILED, "host_died")]
    assert (await delete, await usage) == (0, Usage(0, 0, 0))
    with pytest.raises(StorageError, match="not cleared: host_died"):
        await clear
    watched(first).check()
    watched(second).check()


async def test_without_a_child_operations_fail_at_once_until_another_child_is_up(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    item, load = put_item(key_of(1), 100), load_item(key_of(1), 100)
    assert await settled(adapter.put, [item]) == [Settled(Outcome.THROTTLED, "host_down")]
    assert await settled(adapter.load, [load]) == [Settled(Outcome.FAILED, "host_down")]
    assert await ask_for(adapter, [key_of(1)]) == [Found(Presence.UNKNOWN, "host_down")]
    assert await adapter.delete(key_of(1)) == 0
    watched(item).check()
    watched(load).check()
    await until(lambda: len(Child.made) == 2)
    await Child.made[1].request()
    assert adapter.advertisement() == b""
    Child.made[1].say(Opened(CAPABILITIES, b"second"))
    await until(lambda: adapter.host_status()["state"] == "up")
    assert adapter.advertisement() == b"second"
    assert adapter.host_status()["restarts"] == 1
    wait = asyncio.create_task(settled(adapter.put, [item := put_item(key_of(2), 100)]))
    Child.made[1].say(all_stored(await Child.made[1].request()))
    assert await wait == [STORED]


async def test_a_silent_child_with_work_is_killed() -> None:
    adapter, child = await opened_with(kill_ms=10)
    wait = asyncio.create_task(settled(adapter.put, [put_item(key_of(1), 100)]))
    await child.until_killed()
    assert not wait.done()
    child.reap()
    assert await wait == [PUT_DIED]
    child.reaps_at_once = True
    await adapter.close()


@pytest.mark.parametrize("quiesce", ["drain", "never"])
async def test_an_operation_of_an_adapter_that_never_ends_by_itself_is_ended_although_others_are_answered(
    quiesce: str,
) -> None:
    capabilities = Capabilities(persistent=True, shared=False, quiesce=quiesce)
    adapter, child = await opened_with(capabilities=capabilities, kill_ms=600_000)
    wait = asyncio.create_task(settled(adapter.put, [put_item(key_of(1), 100)]))
    put = await child.request()
    first_due_s = adapter._due_s()
    lookup = asyncio.create_task(ask_for(adapter, [key_of(2)]))
    request = await child.request()
    child.say(frames.answer_of(request.number, (bytes(1), ""), []))
    await lookup
    assert first_due_s is not None
    assert (adapter._due_s() == first_due_s) == (quiesce == "never")
    child.say(all_stored(put))
    assert await wait == [STORED]
    assert adapter._due_s() is None
    child.reaps_at_once = True
    await adapter.close()


async def test_a_child_that_advertises_before_it_is_open_is_given_up(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    await until(lambda: len(Child.made) == 2)
    await Child.made[1].request()
    Child.made[1].say(frames.Report(advertisement=b"too early"))
    await Child.made[1].until_killed()
    assert adapter.advertisement() == b""


async def test_close_lets_the_child_finish_and_kills_it_when_it_is_silent() -> None:
    adapter, child = await opened_with()
    wait = asyncio.create_task(settled(adapter.put, [put_item(key_of(1), 100)]))
    put = await child.request()
    closing = asyncio.create_task(adapter.close())
    assert await child.request() == frames.Close()
    child.say(all_stored(put))
    assert await wait == [STORED]
    child.reaps_at_once = True
    await child.until_killed()
    await closing
    await adapter.close()
    assert adapter.host_status()["state"] == "closed"


async def test_close_ends_a_child_that_comes_up_at_that_moment(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    await until(lambda: len(Child.made) == 2)
    second = Child.made[1]
    second.reaps_at_once = True
    await second.request()
    closing: list[asyncio.Task[None]] = []
    take = adapter._take

    def then_close(answer: Opened) -> None:
        take(answer)
        closing.append(asyncio.create_task(adapter.close()))

    adapter._take = then_close
    second.say(Opened(CAPABILITIES))
    await until(lambda: closing and closing[0].done())
    assert second.killed.is_set()
    assert adapter.host_status()["state"] == "closed"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ConfigError("l2_adapters[0].x: wrong", field="l2_adapters[0].x"), ConfigError),
        (StorageError("no disk"), StorageError),
        (ValueError("no disk"), StorageError),
    ],
)
async def test_the_error_of_a_child_that_cannot_open_is_raised(raised, kind) -> None:
    adapter = HostedAdapter(CONFIG, kill_ms=1)
    opening = asyncio.create_task(adapter.open(lent_context(lambda key: None)))
    await until(lambda: Child.made)
    [child] = Child.made
    await child.request()
    child.say(frames.raised(0, raised))
    child.reap()
    with pytest.raises(kind, match=str(raised).replace("[", r"\[")) as caught:
        await opening
    assert caught.value.field == getattr(raised, "field", "")
