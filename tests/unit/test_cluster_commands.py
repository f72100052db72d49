"""What a controller's commands answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.native.hashing import storage_keys
from kvstrata.rpc import wire
from kvstrata.rpc.cluster_wire import Command, CommandKind, CommandResult, encode
from kvstrata.server.cluster.commands import Commands
from kvstrata.server.engine import Cleared
from kvstrata.server.l2.prefetch import FetchOutcome
from kvstrata.types import RequestIdentity
from tests.harness.engine_in_process import EngineInProcess
from tests.harness.rpc_client import chain_of, part

SESSION, GROUP = b"s" * 16, b"g" * 16


@pytest.fixture
def server() -> Iterator[EngineInProcess]:
    server = EngineInProcess()
    server.attach(SESSION, GROUP)
    yield server
    server.close()


def test_a_pull_counts_what_is_there_when_it_ends(server: EngineInProcess) -> None:
    [identity] = server.feed(wire.encode(wire.Identify(SESSION, 1, RequestIdentity())))
    assert isinstance(identity, wire.IdentifyReply)
    chain = chain_of(identity.root, 4)
    server.store(SESSION, 2, identity, chain[:64])
    keys = storage_keys(chain, part().digest())
    engine = server.engine

    class PrefetchWhileTheSecondChunkLeaves:
        async def fetch(self, asked: bytes, n_slices: int, **more: Any) -> FetchOutcome:
            assert engine.pool.remove(keys[32:64]) == 1
            return FetchOutcome(2, 2, "")

    engine.prefetch = PrefetchWhileTheSecondChunkLeaves()  # type: ignore[assignment]

    class Peers:
        leases = None

    commands = Commands(engine, Peers(), lambda: None, None)  # type: ignore[arg-type]
    argument = {"keys": keys, "n_slices": 1, "identity": identity.root}
    body = server.loop.run_until_complete(commands._do(CommandKind.PULL, argument))
    assert body == {"count": 1, "loaded": 2, "reason": ""}


def test_a_command_that_is_refused_is_answered_and_logged(
    server: EngineInProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)

    class Peers:
        leases = None

    commands = Commands(server.engine, Peers(), lambda: None, None)  # type: ignore[arg-type]

    async def carry_out() -> None:
        for number in (1, 2):
            commands.take(Command(number, CommandKind.CLEAR, {"tier": "l3"}))
            while not any(result.number == number for result in commands.results()):  # noqa: ASYNC110 (the result has no event)
                await asyncio.sleep(0)

    server.loop.run_until_complete(carry_out())
    assert [result.ok for result in commands.results()] == [False, False]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith('command_refused command=clear message="tier: must be l1, l2 or all')


class NoPeers:
    leases = None


class Clears:
    """An engine whose clear ends so."""

    def __init__(self, cleared: object) -> None:
        self._cleared = cleared

    async def clear(self, tier: wire.Tier, tenant: str | None) -> object:
        return self._cleared


async def result_of(engine: object, kind: CommandKind, argument: dict[str, object]) -> CommandResult:
    """What the controller is told."""
    ended = asyncio.Event()
    commands = Commands(engine, NoPeers(), ended.set, None)  # type: ignore[arg-type]
    commands.take(Command(1, kind, argument))
    await ended.wait()
    [result] = commands.results()
    encode(result)
    return result


async def test_a_clear_is_answered_with_what_left_and_what_did_not() -> None:
    done = await result_of(
        Clears(Cleared({"l1": 3, "l2": 4}, 1, 2, 5)), CommandKind.CLEAR, {"tier": "all", "tenant": None}
    )
    assert done.ok
    assert done.body == {"count": 7, "l1": 3, "l2": 4, "pending": 3, "kept": 5}


async def test_a_result_that_cannot_be_told_is_a_failed_command_and_nothing_worse() -> None:
    unspeakable = Cleared({"l1": 1}, 0, 0, object())  # type: ignore[arg-type]
    done = await result_of(Clears(unspeakable), CommandKind.CLEAR, {"tier": "all", "tenant": None})
    assert not done.ok and "see its log" in done.message
