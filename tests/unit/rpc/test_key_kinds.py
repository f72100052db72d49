"""What a key of each kind may ask at an instance and at a controller; each cell of the table is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from kvstrata.controller.answers import Answers
from kvstrata.errors import ClusterFailure
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.control_port import MAX_LATER, ControlPort
from kvstrata.rpc.zmq_curve import ClusterKeys, KeyFolder, KeyKind, read_cluster_keys, read_controller_keys
from kvstrata.rpc.zmq_link import Links
from kvstrata.rpc.zmq_server import Address
from tests.harness.waiting import HANG_S
from tests.unit.controller.member_messages import register

INSTANCE, GATEWAY, CONTROLLER = KeyKind.INSTANCE, KeyKind.GATEWAY, KeyKind.CONTROLLER
KEY = bytes(32)
AT_INSTANCE: list[tuple[Any, set[KeyKind]]] = [
    (wire.Changes(0, -1), {GATEWAY, CONTROLLER}),
    (wire.List(0, "l1", 0), {GATEWAY, CONTROLLER}),
    (wire.Do(0, wire.AskStatus(), 1_000), {CONTROLLER}),
    (wire.PeerHello(0, wire.CLUSTER_PROTOCOL_VERSION, "a", 1, "tcp", False), {INSTANCE}),
    (wire.Await(0, KEY, KEY, KEY, 0, 0), {INSTANCE}),
]
AT_CONTROLLER: list[tuple[Any, set[KeyKind]]] = [
    (register(), {INSTANCE}),
    (wire.Goodbye(1, "a", 1), {INSTANCE}),
    (wire.Where(1, "a", b"", 1), {INSTANCE}),
    (wire.GatewayBeat(1, wire.CLUSTER_PROTOCOL_VERSION, "g", "1", 1, "ttft", 0, 0, 0, 0), {GATEWAY}),
]


async def done(request: wire.ClusterRequest, _: Address) -> wire.ClusterReply:
    return wire.Done(request.seq, 1)


def keys_of(kind: KeyKind) -> ClusterKeys:
    """Clients without a key are of this kind."""
    return ClusterKeys(b"", kinds={"": frozenset({kind})})


def instance(kind: KeyKind) -> ControlPort:
    """A port that serves as an instance's does; every key is of this kind."""
    port = ControlPort(asyncio.get_running_loop(), 1, keys_of(kind))
    port.serve((CONTROLLER, GATEWAY), dict.fromkeys((wire.Changes, wire.List), done))
    port.serve((CONTROLLER,), {wire.Do: done})
    port.serve((INSTANCE,), dict.fromkeys((wire.PeerHello, wire.Await), done))
    return port


def controller(kind: KeyKind) -> ControlPort:
    """A controller's port, whose handlers were replaced."""
    port = ControlPort(asyncio.get_running_loop(), 1, keys_of(kind), requests=wire.TO_CONTROLLER)
    Answers(cast(Any, None), port, cast(Any, None))
    for request, (kinds, unlisted, _) in list(port._served.items()):
        port.serve(kinds, {request: done}, unlisted=unlisted)
    return port


@pytest.mark.parametrize("kind", KeyKind)
@pytest.mark.parametrize(("make", "table"), [(instance, AT_INSTANCE), (controller, AT_CONTROLLER)])
async def test_a_port_answers_a_key_of_each_kind_what_it_may_ask(
    make: Callable[[KeyKind], ControlPort], table: list[tuple[Any, set[KeyKind]]], kind: KeyKind
) -> None:
    port = make(kind)
    number = port.server.bind_tcp("localhost", 0, keys=None, anywhere=False)
    port.start()
    links = Links(asyncio.get_running_loop())
    link = links.ask(f"tcp://127.0.0.1:{number}")
    for request, may in table:
        if kind in may:
            await link.ask(request, wire.Done, HANG_S)
            continue
        with pytest.raises(ClusterFailure, match=f"is of kind {kind}") as refused:
            await link.ask(request, wire.Done, HANG_S)
        assert refused.value.code == "not_permitted", request
    assert port.refused["not_permitted"] == sum(kind not in may for _, may in table)
    links.close()
    await port.close()


async def test_a_port_refuses_more_than_it_may_have_under_way() -> None:
    port = ControlPort(asyncio.get_running_loop(), 1)
    going_on = asyncio.Event()

    async def late(request: wire.ClusterRequest, _: Address) -> wire.ClusterReply:
        await going_on.wait()
        return wire.Done(request.seq, 1)

    port.serve((CONTROLLER,), {wire.Changes: late})
    number = port.server.bind_tcp("localhost", 0, keys=None, anywhere=False)
    port.start()
    links = Links(asyncio.get_running_loop())
    link = links.ask(f"tcp://127.0.0.1:{number}")
    asked = [
        asyncio.create_task(link.ask(wire.Changes(0, 0), wire.Done, HANG_S)) for _ in range(MAX_LATER + 1)
    ]
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    [refused] = done
    assert isinstance(error := refused.exception(), ClusterFailure) and error.code == "refused"
    going_on.set()
    await asyncio.gather(*asked, return_exceptions=True)
    links.close()
    await port.close()


def test_key_files_say_what_each_key_is(tmp_path: Path) -> None:
    folder = KeyFolder(str(tmp_path / "keys"))
    folder.make(["a", "b"], ["gw"], overwrite=False)
    folder.add(["c"], overwrite=False)
    controller = read_controller_keys(str(folder.folder / "controller.keys"))
    members = {
        name: read_cluster_keys(str(folder.folder / f"{name}.keys"), "x") for name in ("a", "b", "c", "gw")
    }
    expected = {"a": {INSTANCE}, "b": {INSTANCE}, "c": {INSTANCE}, "gw": {GATEWAY}}
    for name, keys in members.items():
        public = zmq.curve_public(keys.secret).decode()
        assert controller.kinds_of(public) == expected[name]
        for other in members.values():
            assert other.kinds_of(public) == expected[name]
            assert other.clients is not None and public.encode() in other.clients
        assert keys.kinds_of(keys.server.decode()) == {CONTROLLER}
        assert keys.kinds_of("k" * 40) == set()
    assert controller.kinds_of("k" * 40) == set()
