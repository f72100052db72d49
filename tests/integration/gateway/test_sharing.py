"""Real gateways before the same engines tell each other what they have sent; a dead or frozen one delays nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq

from kvstrata.errors import ConfigError
from kvstrata.gateway.sharing.sockets import sharing_keys
from kvstrata.gateway.sharing.telling import PROTOCOL, Frame, Sent, encode
from kvstrata.rpc.zmq_curve import new_secret, public_of
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine, chat
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import at_rest
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration


class Scene:
    """Two engines whose answers wait, and gateways before them."""

    def __init__(self, folder: Path, gateways: int, **settings: Any) -> None:
        self.go = asyncio.Event()
        """Set to let the engines answer."""
        self.engines = [ScriptedEngine(behaviour=self.answer) for _ in range(2)]
        self.secret = new_secret()
        self.file = folder / "gateways.keys"
        self.file.write_text(f"secret {self.secret.decode()}\n")
        self.file.chmod(0o600)
        self.ports = [free_port() for _ in range(gateways)]
        self.folder, self.settings = folder, settings
        self.gateways: list[GatewayProcess] = []

    async def answer(self, got: Got, line: Line) -> None:
        await self.go.wait()
        await chat(got, line)

    def add(self) -> GatewayProcess:
        """Make the next gateway, which is not started yet."""
        number = len(self.gateways)
        sharing = {
            "listen": f"127.0.0.1:{self.ports[number]}",
            "gateways": [f"127.0.0.1:{one}" for one in self.ports],
            "curve_file": str(self.file),
        }
        urls = [engine.url for engine in self.engines]
        settings = {"policy": "least_loaded", "sharing": sharing, **self.settings}
        self.gateways.append(GatewayProcess(self.folder / f"gateway-{number}", urls, **settings))
        return self.gateways[-1]

    async def start(self, count: int | None = None) -> None:
        """Start the engines and all gateways, or the first ones."""
        for engine in self.engines:
            await engine.start()
        made = [self.add() for _ in self.ports[:count]]
        await asyncio.gather(*(asyncio.to_thread(gateway.start) for gateway in made))


async def in_flight(gateway: GatewayProcess, session: aiohttp.ClientSession, wanted: int) -> None:
    """Wait until a gateway knows of so many requests of others."""
    await gateway.until(session, f"{wanted} of others", lambda page: page["sharing"]["in_flight"] == wanted)


async def hear_each_other(gateways: Sequence[GatewayProcess], session: aiohttp.ClientSession) -> None:
    async def all_heard() -> bool:
        pages = [(await gateway.status(session))["sharing"] for gateway in gateways]
        return all(
            page["heard"] == len(gateways) - 1 and sum(page["to"].values()) == len(gateways) for page in pages
        )

    await eventually_async("each gateway hears the others", all_heard)


@pytest.fixture
async def scene(tmp_path: Path, session: aiohttp.ClientSession) -> AsyncIterator[Scene]:
    made = Scene(tmp_path, 2)
    try:
        await made.start()
        await hear_each_other(made.gateways, session)
        yield made
    finally:
        made.go.set()
        for gateway in made.gateways:
            with contextlib.suppress(ProcessLookupError):
                gateway.kill()
        for engine in made.engines:
            await engine.stop()


async def asks(gateway: GatewayProcess, session: aiohttp.ClientSession) -> int:
    async with session.post(gateway.url + CHAT, json=ask()) as response:
        await response.read()
        return response.status


async def test_a_gateway_knows_the_queues_of_the_other_and_they_come_to_zero(scene, session):
    first, second = scene.gateways
    one = [asyncio.create_task(asks(first, session))]
    await in_flight(second, session, 1)
    # The other's request fills one engine: ours goes to the other engine, which is idle.
    one.append(asyncio.create_task(asks(second, session)))
    await in_flight(first, session, 1)
    assert [len(engine.got) for engine in scene.engines] == [1, 1]
    status = await second.status(session)
    assert [row["in_flight"] for row in status["engines"]].count(1) == 1
    assert (await second.samples(session))["kvstrata_gateway_other_gateways"] == 1
    scene.go.set()
    assert await asyncio.gather(*one) == [200, 200]
    for gateway in scene.gateways:
        await in_flight(gateway, session, 0)
        await at_rest(gateway, session)


@pytest.mark.silence
async def test_a_frozen_gateway_is_forgotten_delays_nobody_and_is_known_again(scene, session):
    first, second = scene.gateways
    waiting = [asyncio.create_task(asks(first, session)) for _ in range(3)]
    await in_flight(second, session, 3)
    with first.frozen():
        await in_flight(second, session, 0)
        mine = [asyncio.create_task(asks(second, session)) for _ in range(3)]
        await eventually_async("all were sent", lambda: sum(len(engine.got) for engine in scene.engines) == 6)
    await in_flight(second, session, 3)
    await in_flight(first, session, 3)
    scene.go.set()
    assert set(await asyncio.gather(*waiting, *mine)) == {200}
    for gateway in scene.gateways:
        await in_flight(gateway, session, 0)
        await at_rest(gateway, session)


async def test_only_holders_of_the_secret_are_heard_and_garbage_of_theirs_changes_nothing(scene, session):
    gateway, port = scene.gateways[0], scene.ports[0]
    engine = scene.engines[0].name
    lied = Sent(number=1, engine=engine, uncached=9, keys=b"", ready_in_s=0.0, streams=True, loads=False)
    lie = encode(Frame(PROTOCOL, "f" * 16, [lied]))
    garbage = [b"", b"\xff" * 99, encode(Frame(99, "f" * 16, [])), encode(Frame(PROTOCOL, "no", []))]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for secret, frames in ((new_secret(), [lie]), (scene.secret, garbage)):
            push = context.socket(zmq.DEALER)
            push.setsockopt(zmq.CURVE_SERVERKEY, public_of(scene.secret))
            push.setsockopt(zmq.CURVE_SECRETKEY, secret)
            push.setsockopt(zmq.CURVE_PUBLICKEY, public_of(secret))
            push.setsockopt(zmq.LINGER, 0)
            push.connect(f"tcp://127.0.0.1:{port}")
            for frame in frames:
                push.send(frame)

        def refused(status: dict[str, Any]) -> bool:
            page = status["sharing"]
            return page["refused"] == len(garbage) and page["refused_handshakes"]

        await gateway.until(session, "the strangers are refused", refused)
        page = (await gateway.status(session))["sharing"]
        assert (page["heard"], page["in_flight"]) == (1, 0)
    finally:
        context.destroy(linger=0)


async def test_other_gateways_change_by_a_reload_and_a_new_port_needs_a_restart(scene, session):
    gateway = scene.gateways[0]
    gateway.reload(
        sharing={**gateway.settings["sharing"], "gateways": [], "listen": f"127.0.0.1:{scene.ports[0] + 1}"}
    )

    def logged() -> bool:
        log = gateway.log.read_text()
        return "needs_restart=sharing.listen" in log and "changed=sharing.gateways" in log

    await gateway.until(session, "nobody is told", lambda status: not status["sharing"]["to"])
    await eventually_async("the log tells it", logged)


def test_wrong_settings_name_what_to_change(tmp_path: Path) -> None:
    file = tmp_path / "member.keys"
    file.write_text(f"secret {new_secret().decode()}\nclient {public_of(new_secret()).decode()}\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"sharing\.curve_file: .* keys of several members"):
        sharing_keys(str(file))
