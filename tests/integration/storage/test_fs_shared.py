"""`fs` with `"shared": true`: several servers, one directory, one cap, and a janitor that dies or stands still.

The children put and load through a real adapter each, and the parent kills and stops them and looks at the directory
while all of them stand still.  Two whole servers hit each other's chunks at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.storage.base import AdapterContext, LoadStatus, Presence, PutStatus
from kvstrata.storage.media.fs.adapter import FsAdapter
from kvstrata.testing.strategies import key_of, load_item, loaded_payload, payload_of, put_item, watched
from tests.harness.cache_engine import eventually
from tests.harness.l2_load import check_and_release, clear_l1, stored, until_stored
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[3]
SIZES = (3_000, 20_000, 70_000)
CAP_BYTES = 3 << 20
HANG_S = 120.0


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def fs(base: Path, capacity_bytes: int = CAP_BYTES, shared: bool = True) -> FsAdapter:
    return FsAdapter(base_path=str(base), shared=shared, capacity_bytes=capacity_bytes, min_free_bytes=0)


def context() -> AdapterContext:
    return AdapterContext("shared", SystemClock(), 0, 0, lambda key: None)


# -- the child: python -m tests.integration.storage.test_fs_shared BASE CAP FIRST ----------------------------


async def put_for_ever(base: str, capacity_bytes: int, first: int) -> None:
    """Put numbered records and load each again; say what came of it and whether this is the janitor."""
    adapter = fs(Path(base), capacity_bytes)
    await adapter.open(context())
    was_janitor = -1
    for start in itertools.count(first, 4):
        numbers = list(range(start, start + 4))
        outcomes = await adapter.put([put_item(key_of(n), size_of(n)) for n in numbers])
        lines = []
        for number, outcome in zip(numbers, outcomes, strict=True):
            lines.append(f"{outcome.status.name} {number} {outcome.reason}")
            if outcome.status is PutStatus.STORED:
                item = load_item(key_of(number), size_of(number))
                [load] = await adapter.load([item])
                good = load.status is LoadStatus.ABSENT or (
                    load.status is LoadStatus.LOADED
                    and loaded_payload(item, size_of(number)) == payload_of(item.key, size_of(number))
                )
                lines += [] if good else [f"WRONG {number} {load}"]
        janitor = adapter.numbers()["janitor"]
        if janitor != was_janitor:
            lines.append(f"janitor {janitor}")
            was_janitor = janitor
        os.write(1, "".join(f"{line}\n" for line in lines).encode())


class Child:
    """A process with an adapter on the directory that puts all the time."""

    def __init__(self, base: Path, first: int, capacity_bytes: int = CAP_BYTES) -> None:
        module = [sys.executable, "-m", "tests.integration.storage.test_fs_shared"]
        self._process = subprocess.Popen(
            [*module, str(base), str(capacity_bytes), str(first)], cwd=REPOSITORY, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        self._rest = b""
        self.said: list[list[str]] = []
        self.is_janitor = False
        self.stored = 0

    def read(self) -> None:
        """Read the child's new lines; blocks while there are none."""
        *lines, self._rest = (self._rest + os.read(self.output, 65_536)).split(b"\n")
        for line in lines:
            words = line.decode().split(" ")
            self.said.append(words)
            self.stored += words[0] == "STORED"
            assert words[0] not in ("WRONG", "FAILED"), line
            if words[0] == "janitor":
                self.is_janitor = words[1] == "1"

    def freeze(self) -> None:
        send(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Group:
    """Children on one directory."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.children: list[Child] = []
        self._started = 0

    def start(self) -> Child:
        child = Child(self.base, 10_000 * self._started)
        self._started += 1
        self.children.append(child)
        return child

    def kill(self, child: Child) -> None:
        self.children.remove(child)
        child.end()

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Read the children's lines until the condition holds."""
        deadline_s = time.monotonic() + HANG_S
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                selector.register(child.output, selectors.EVENT_READ, child)
            while not true():
                assert time.monotonic() < deadline_s, (what, [child.said[-5:] for child in self.children])
                for key, _ in selector.select(1.0):
                    key.data.read()

    def janitors(self) -> list[Child]:
        return [child for child in self.children if child.is_janitor]

    def until_janitor(self, *among: Child) -> Child:
        wanted = among or tuple(self.children)
        self.until("a janitor", lambda: any(child.is_janitor for child in wanted))
        return next(child for child in wanted if child.is_janitor)

    def until_stored(self, count: int, *among: Child) -> None:
        goals = {child: child.stored + count for child in among or self.children}
        self.until("puts", lambda: all(child.stored >= goal for child, goal in goals.items()))

    def check_cap(self, *frozen: Child) -> int:
        """Freeze all children and check the directory against the cap; children in `frozen` stay frozen."""
        for child in self.children:
            child.freeze()
        used = sum(
            -(-path.stat().st_size // 4096) * 4096
            for path in self.base.rglob("*")
            if path.suffix in (".kvc", ".part")
        )
        for child in self.children:
            if child not in frozen:
                child.thaw()
        assert used <= CAP_BYTES
        return used


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path / "kv")
    yield group
    for child in group.children:
        child.end()


@pytest.mark.long
def test_all_members_together_stay_within_the_capacity_and_each_goes_on(group: Group) -> None:
    for _ in range(3):
        group.start()
    for _ in range(10):
        group.until_stored(10)
        used = group.check_cap()
    assert used > CAP_BYTES // 3
    assert len(group.janitors()) == 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_janitor_is_replaced_by_another_member(group: Group, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(2):
        group.start()
    for _ in range(2):
        group.until_stored(20 + draw.randrange(40))
        group.kill(group.until_janitor())
        group.check_cap()
        newcomer = group.start()
        group.until_janitor()
        group.until_stored(30)
        group.until_stored(1, newcomer)
        group.check_cap()


@pytest.mark.long
@pytest.mark.silence
def test_a_frozen_janitor_is_replaced_and_is_an_ordinary_member_when_it_goes_on(group: Group) -> None:
    one, other = group.start(), group.start()
    group.until_stored(30)
    janitor = group.until_janitor()
    follower = one if janitor is other else other
    janitor.freeze()
    group.until_janitor(follower)
    group.until_stored(60, follower)
    group.check_cap(janitor)
    janitor.thaw()
    for _ in range(5):
        group.until_stored(10)
        group.check_cap()
    group.until("one janitor", lambda: group.janitors() == [follower])


@pytest.mark.long
def test_rubbish_beside_the_members_changes_nothing(group: Group) -> None:
    group.start()
    group.until_stored(20)
    shared = group.base / ".kvstrata.shared"
    draw = random.Random(1)
    for round_ in range(20):
        for name in ("member.5", "lock.5", "janitor.999", f"x{round_}", "temp.7"):
            (shared / name).write_bytes(draw.randbytes(100))
        for path in shared.glob("*.*"):
            if path.name.startswith(("member", "janitor")):
                path.write_bytes(draw.randbytes(50))
        group.until_stored(5)
        group.check_cap()


# -- in this process ---------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_servers_with_and_without_shared_on_one_directory_are_told_what_to_change(
    tmp_path: Path,
) -> None:
    base = tmp_path / "kv"
    one = fs(base)
    await one.open(context())
    with pytest.raises(StorageError, match=r'belongs to another running server .* "shared": true'):
        await fs(base, shared=False).open(context())
    with pytest.raises(ConfigError, match=rf"capacity_gb: 1048576 bytes here, but {CAP_BYTES} bytes in a"):
        await fs(base, 1 << 20).open(context())
    await one.close()
    alone = fs(base, shared=False)
    await alone.open(context())
    with pytest.raises(StorageError, match=r"that does not share it; give each server a directory"):
        await fs(base).open(context())
    await alone.close()


@pytest.mark.long
async def test_two_members_that_load_what_the_other_deletes_see_it_whole_or_not_at_all(
    tmp_path: Path,
) -> None:
    base = tmp_path / "kv"
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for _ in range(2):
            member = fs(base, 0)
            await member.open(context())
            stack.push_async_callback(member.close)
            members.append(member)

        async def churn(member: FsAdapter, seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(60):
                number = draw.randrange(5)
                if draw.random() < 0.4:
                    [put] = await member.put([put_item(key_of(number), size_of(number))])
                    assert put.status in (PutStatus.STORED, PutStatus.EXISTS)
                elif draw.random() < 0.4:
                    await member.delete([key_of(number)])
                else:
                    item = load_item(key_of(number), size_of(number))
                    [load] = await member.load([item])
                    assert load.status in (LoadStatus.LOADED, LoadStatus.ABSENT)
                    if load.status is LoadStatus.LOADED:
                        assert loaded_payload(item, size_of(number)) == payload_of(item.key, size_of(number))
                    watched(item).check()

        await asyncio.gather(*(churn(member, seed) for seed, member in enumerate(members * 2)))
        for number in range(5):
            await members[0].put([put_item(key_of(number), size_of(number))])
        found = await members[1].exists([key_of(number) for number in range(5)])
        assert [one.presence for one in found] == [Presence.PRESENT] * 5


# -- whole servers -----------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers that share a directory."""
    started: list[ServerProcess] = []

    def starter(**settings: Any) -> ServerProcess:
        adapter = {"type": "fs", "base_path": str(tmp_path / "l2"), "shared": True, "capacity_gb": 1}
        flags = ("--no-http", "--l2-adapter", json.dumps({**adapter, **settings}))
        server = ServerProcess(tmp_path / f"server{len(started)}", l1_mb=16, l2="embedded", flags=flags)
        started.append(server)
        server.start()
        return server

    yield starter
    for server in started:
        server.close()


@pytest.mark.parametrize(
    "fate", ["dies", *(pytest.param(fate, marks=pytest.mark.long) for fate in ("lives", "stands still"))]
)
def test_two_servers_hit_each_others_chunks(start: Callable[..., ServerProcess], fate: str) -> None:
    one, other = start(), start()
    with RpcClient(one.socket_dir) as client:
        _, chain = stored(client, 6)
        until_stored(client)
        assert client.status()["l2_adapters"]["fs-0"]["numbers"]["janitor"] == 1
        if fate == "dies":
            one.kill()
        elif fate == "stands still":
            one.freeze()
        with RpcClient(other.socket_dir) as second:
            identity = second.identify()
            reply = second.lookup(identity.identity_id, chain, deadline_ms=20_000)
            assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks, reply.reason) == (6, 0, 6, "")
            check_and_release(second, reply, chain)
            _, theirs = stored(second, 8)
            until_stored(second)
            assert clear_l1(second) == 8
        if fate == "stands still":
            one.thaw()
        if fate == "lives":
            mine = client.identify()
            reply = client.lookup(mine.identity_id, theirs, deadline_ms=20_000)
            assert reply.n_chunks == 8
            check_and_release(client, reply, theirs)


@pytest.mark.long
def test_a_server_that_does_not_share_serves_without_the_directory_of_one_that_does(
    start: Callable[..., ServerProcess],
) -> None:
    start()
    second = start(shared=False)
    eventually("it is told", lambda: "belongs to another running server" in second.log.read_text())


if __name__ == "__main__":
    base_path, cap, first_number = sys.argv[1:]
    asyncio.run(put_for_ever(base_path, int(cap), int(first_number)))
