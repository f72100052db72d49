"""When the transfer engine is opened again, and what happens to the engine before it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import TransferError
from kvstrata.p2p import reopening
from kvstrata.p2p.engines.base import Region
from kvstrata.p2p.engines.links import Devices, allowed_devices
from kvstrata.p2p.reopening import LIMITS, Cause, Limits, PeerEngine, ReopenPolicy
from tests.harness.waiting import until

ETH0, ETH1 = "eth0 10.0.0.1", "eth1 10.0.1.1"
PAUSE_S = LIMITS.first_pause_s


def policy(*devices: str, limits: Limits = LIMITS) -> ReopenPolicy:
    made = ReopenPolicy(limits)
    made.opened(frozenset(devices), 0.0)
    return made


def cause(one: ReopenPolicy, now_s: float, *devices: str) -> Cause | None:
    due = one.due(frozenset(devices), now_s)
    return due and due[0]


def test_a_device_that_becomes_usable_is_a_reason_to_reopen_at_once() -> None:
    one = policy("lo 127.0.0.1")
    due = one.due(frozenset({ETH0}), 0.0)
    assert due is not None and due[0] is Cause.DEVICES and ETH0 in due[1]


def test_a_device_that_is_lost_and_comes_back_is_no_reason_to_reopen() -> None:
    one = policy(ETH0, ETH1)
    assert [
        cause(one, float(now), *found) for now, found in enumerate(([ETH0], [], [ETH1], [ETH0, ETH1]))
    ] == [None] * 4


def test_devices_that_come_and_go_repeatedly_cause_ever_rarer_reopenings() -> None:
    one, opened = policy(ETH0), []
    for now_s in range(1, 3600):
        device = (ETH0, ETH1)[now_s % 2]
        if cause(one, float(now_s), device):
            one.opened(frozenset({device}), float(now_s), Cause.DEVICES)
            opened.append(now_s)
    pauses = [after - before for before, after in itertools.pairwise(opened)]
    assert pauses == sorted(pauses)
    assert 300 <= pauses[-1] <= 301
    assert len(opened) < 20


def test_pauses_between_reopenings_start_small_again_after_a_calm_time() -> None:
    one, now_s = policy(ETH0), 0.0
    for number in range(10):
        now_s += LIMITS.max_pause_s
        one.opened(frozenset({f"eth{number} 10.0.0.1"}), now_s, Cause.DEVICES)
    assert cause(one, now_s + PAUSE_S, ETH1) is None
    now_s += LIMITS.calm_s
    one.opened(frozenset({ETH0}), now_s, Cause.DEVICES)
    assert cause(one, now_s + PAUSE_S, ETH1) is Cause.DEVICES


def test_an_engine_that_could_not_be_opened_is_tried_again_after_a_pause() -> None:
    one = policy(ETH0)
    one.not_opened(1.0)
    assert cause(one, 1.0 + PAUSE_S - 0.01, ETH1) is None
    assert cause(one, 1.0 + PAUSE_S, ETH1) is Cause.DEVICES


def test_peers_that_answer_but_cannot_be_read_are_a_reason_to_reopen_after_a_while() -> None:
    one = policy(ETH0)
    for now_s in (100.0, 105.0, 109.0):
        one.failed(now_s)
    assert cause(one, 109.9, ETH0) is None
    assert cause(one, 110.0, ETH0) is Cause.UNREACHABLE


def test_few_failed_reads_are_no_reason_to_reopen_and_one_success_clears_them() -> None:
    one = policy(ETH0)
    one.failed(0.0)
    one.failed(1.0)
    assert cause(one, 1e6, ETH0) is None
    one.failed(2.0)
    one.reached()
    assert cause(one, 1e6, ETH0) is None
    for now_s in (1e6, 1e6 + 1, 1e6 + 2):
        one.failed(now_s)
    assert cause(one, 1e6 + 9, ETH0) is None


def test_peers_that_can_never_be_read_cause_a_reopening_every_ten_minutes_at_most() -> None:
    one, opened = policy(ETH0), []
    for now_s in range(24 * 3600):
        one.failed(float(now_s))
        if cause(one, float(now_s), ETH0):
            one.opened(frozenset({ETH0}), float(now_s), Cause.UNREACHABLE)
            opened.append(now_s)
    assert opened[1] - opened[0] < 60
    assert opened[-1] - opened[-2] >= LIMITS.max_unreachable_s
    assert len(opened) < 24 * 6 + 10


def test_devices_are_those_that_ucx_may_use() -> None:
    for setting, allows, refuses in (
        ("", ["eth0", "mlx5_0:1"], []),
        ("all", ["eth0", "mlx5_0:1"], []),
        ("eth0, mlx5_0:1", ["eth0", "mlx5_0:1"], ["eth1", "mlx5_0:2"]),
        ("^docker0,eth1", ["eth0"], ["docker0", "eth1"]),
    ):
        allowed = allowed_devices(setting)
        assert [allowed(name) for name in (*allows, *refuses)] == [True] * len(allows) + [False] * len(
            refuses
        )


# -- engines --------------------------------------------------------------------------------------------------


class StubEngine:
    """Tells what becomes of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.error: TransferError | None = None
        self.closed = 0

    async def open(self, regions: list[Region]) -> bytes:
        if self.error is not None:
            raise self.error
        return b"%d" % self.number

    async def close(self) -> None:
        self.closed += 1


class Rig:
    """Engines with numbers, and devices that a test changes."""

    def __init__(self) -> None:
        self.made: list[StubEngine] = []
        self.errors: list[TransferError | None] = []
        self.usable, self.idle = {ETH0}, {"eth1"}
        self.moves: list[tuple[int, bool]] = []
        """Engines that peers were moved to, and whether each was in place when they had been."""
        self.engines = PeerEngine("peer", self._make, linger_s=0.0, look=self._look)  # type: ignore[arg-type]

    def _look(self) -> Devices:
        return Devices(frozenset(self.usable), frozenset(self.idle))

    def _make(self) -> StubEngine:
        engine = StubEngine(len(self.made))
        engine.error = self.errors.pop(0) if self.errors else None
        self.made.append(engine)
        return engine

    async def _move(self, engine: StubEngine) -> Callable[[], None]:
        return lambda: self.moves.append((engine.number, self.engines.current is engine))

    async def start(self) -> None:
        await self.engines.open([Region(4096, 4096)], SystemClock())
        self.engines.start(self._move)  # type: ignore[arg-type]

    def use(self, *devices: str) -> None:
        self.usable = set(devices)
        self.engines.look_now()


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(reopening, "SETTLE_S", 0.0)
    made = Rig()
    yield made
    await made.engines.close()
    assert all(engine.closed or engine.error for engine in made.made), "an engine was left open"


async def test_a_reopened_engine_replaces_the_first_which_is_closed(rig: Rig) -> None:
    await rig.start()
    assert rig.engines.metadata == b"0"
    rig.use(ETH0, ETH1)
    await until(lambda: rig.made[0].closed)
    assert (rig.engines.metadata, rig.moves) == (b"1", [(1, True)])
    assert rig.engines.numbers() == {"reopened_devices": 1, "reopened_unreachable": 0, "reopen_failures": 0}
    assert rig.made[1].closed == 0


async def test_the_engine_in_use_stays_when_another_cannot_be_opened(rig: Rig) -> None:
    rig.errors = [None, TransferError("stub: no room to register", field="engine")]
    await rig.start()
    rig.use(ETH0, ETH1)
    await until(lambda: rig.engines.numbers()["reopen_failures"])
    assert (rig.engines.metadata, rig.made[0].closed, rig.moves) == (b"0", 0, [])
    assert "no room to register" in rig.engines.remarks()["reopened"]


async def test_without_any_device_the_first_engine_is_opened_with_the_first_link(rig: Rig) -> None:
    rig.errors = [TransferError("stub: no device", field="network")]
    rig.usable = set()
    await rig.start()
    assert (rig.engines.metadata, "eth1" in rig.engines.remarks()["reopened"]) == (b"", True)
    with pytest.raises(TransferError, match="no network device"):
        _ = rig.engines.current
    rig.use(ETH1)
    await until(lambda: rig.engines.metadata == b"1")
    assert rig.moves == [(1, True)]


@pytest.mark.parametrize(("field", "idle"), [("engine", {"eth1"}), ("network", set())])
async def test_an_error_that_no_new_device_mends_stops_the_start(
    rig: Rig, field: str, idle: set[str]
) -> None:
    rig.errors = [TransferError("stub: not installed", field=field)]
    rig.usable, rig.idle = set(), idle
    with pytest.raises(TransferError, match="not installed"):
        await rig.start()


async def test_a_machine_that_tells_nothing_of_its_devices_keeps_its_engine(rig: Rig) -> None:
    def refuse() -> Devices:
        raise PermissionError("no netlink here")

    rig.engines._look = refuse
    await rig.start()
    rig.engines.look_now()
    await until(lambda: not rig.engines._changed.is_set())
    assert rig.engines.metadata == b"0"


async def test_an_error_that_ends_the_watch_for_devices_is_shown_and_the_engine_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def move(engine: StubEngine) -> Callable[[], None]:
        raise KeyError("planted")

    monkeypatch.setattr(rig, "_move", move)
    await rig.start()
    rig.use(ETH0, ETH1)
    await until(lambda: "no new engine will be opened: KeyError('planted')" in rig.engines.remarks().values())
    assert rig.engines.metadata == b"0" and not rig.made[0].closed
    assert "the task that opens new transfer engines has failed" in caplog.text
