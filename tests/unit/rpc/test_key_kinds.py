"""What a key of each kind may ask at an instance and at a controller; each cell of the table is asked."""

from __future__ import annotations

import asyncio
import collections
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from kvstrata.controller.answers import Answers
from kvstrata.errors import ClusterFailure
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.control_port import MAX_LATER, ControlPort
from kvstrata.rpc.zmq_curve import KeyFolder, KeyKind, read_cluster_keys, read_controller_keys
from kvstrata.rpc.zmq_link import Links
from kvstrata.rpc.zmq_server import Address
from tests.harness.waiting import HANG_S
from tests.unit.controller.member_messages import register

INSTANCE, GATEWAY, CONTROLLER = KeyKind.INSTANCE, KeyKind.GATEWAY, KeyKind.CONTROLLER
KEY = bytes(32)
AT_INSTANCE: list[tuple[Any, set[KeyKind]]] = [
    (wire.Changes(0, -1), {GATEWAY, CONTROLLER}),
    (wire.List(0, "l1", 0), {GATEWAY, CONTROLLER}),
    (wire.Do(0, wire.CommandKind.STATUS, {}, 1_000), {CONTROLLER}),
    (wire.PeerHello(0, 7, "a", 1, "tcp", False), {INSTANCE}),
]
AT_CONTROLLER: list[tuple[Any, set[KeyKind]]] = [
    (register(), {INSTANCE}),
    (wire.Goodbye(1, "a", 1), {INSTANCE}),
    (wire.Where(1, "a", b"", 1), {INSTANCE}),
    (wire.GatewayBeat(1, "g", "1", 1, "ttft", 0, 0, 0, 0), {GATEWAY}),
    (wire.Replicate(1, "g", "a", "b", KEY, 1, [], KEY, "", []), {GATEWAY}),
]


def kinds_that_serve(port: ControlPort) -> None:
    """Register answers as an instance does."""

    async def done(request: wire.ClusterRequest) -> wire.ClusterReply:
        return wire.Done(request.seq, 1)

    port.serve((CONTROLLER, GATEWAY), dict.fromkeys((wire.Changes, wire.List), done))
    port.serve((CONTROLLER,), {wire.Do: done})
    port.serve((INSTANCE,), {wire.PeerHello: done})


@pytest.mark.parametrize("kind", KeyKind)
async def test_an_instance_answers_a_key_of_each_kind_what_it_may_ask(kind: KeyKind) -> None:
    port = ControlPort(asyncio.get_running_loop(), 1, lambda key: (kind,))
    kinds_that_serve(port)
    number = port.server.bind_tcp("localhost", 0, curve=None, insecure=False)
    port.start()
    links = Links(asyncio.get_running_loop())
    link = links.ask(f"tcp://127.0.0.1:{number}")
    for request, may in AT_INSTANCE:
        if kind in may:
            await link.ask(request, wire.Done, HANG_S)
            continue
        with pytest.raises(ClusterFailure, match=f"is of kind {kind}") as refused:
            await link.ask(request, wire.Done, HANG_S)
        assert refused.value.code == "not_permitted", request
    assert port.refused == sum(kind not in may for _, may in AT_INSTANCE)
    links.close()
    await port.close()


@pytest.mark.parametrize("kind", KeyKind)
def test_a_controller_answers_a_key_of_each_kind_what_it_may_ask(kind: KeyKind) -> None:
    sent: list[Any] = []
    begun: list[str] = []

    def job(work: Any, name: str) -> None:
        work.close()
        begun.append(name)

    cluster = SimpleNamespace(
        epoch=1, refused_requests=collections.Counter(),
        ranking=SimpleNamespace(where_now=lambda asked: [], seconds=SimpleNamespace(add=lambda s: None)),
    )  # fmt: skip
    server = SimpleNamespace(send=lambda address, frame: sent.append(wire.ANSWERS.decode(frame)))
    answers = Answers(
        cast(Any, cluster), cast(Any, None), cast(Any, server), cast(Any, SimpleNamespace(job=job)),
        cast(Any, None), lambda key: (kind,),
    )  # fmt: skip
    for request, may in AT_CONTROLLER:
        sent.clear()
        begun.clear()
        answers._on_request(Address(b"x", "k"), wire.encode(request))
        refused = [one for one in sent if isinstance(one, wire.Failure)]
        assert bool(refused) == (kind not in may), request
        assert bool(begun) + len(sent) == 1
        if refused:
            assert refused[0].code == "not_permitted" and f"is of kind {kind}" in refused[0].message


async def test_a_port_refuses_more_than_it_may_have_under_way() -> None:
    port = ControlPort(asyncio.get_running_loop(), 1)
    going_on = asyncio.Event()

    async def late(request: wire.ClusterRequest) -> wire.ClusterReply:
        await going_on.wait()
        return wire.Done(request.seq, 1)

    port.serve((CONTROLLER,), {wire.Changes: late})
    number = port.server.bind_tcp("localhost", 0, curve=None, insecure=False)
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
            assert other.curve.clients is not None and public.encode() in other.curve.clients
        assert keys.kinds_of(keys.server.decode()) == {CONTROLLER}
        assert keys.kinds_of("k" * 40) == set()
    assert controller.kinds_of("k" * 40) == set()
