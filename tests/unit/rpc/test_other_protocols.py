"""Processes of two releases that meet in a cluster: the error names both protocols and the process to upgrade."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvstrata.gateway.sharing import telling
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_server import Address

OURS = wire.CLUSTER_PROTOCOL_VERSION
ASKER = Address(b"")
NAMES = [one.__struct_config__.tag for one in wire.Greeting.__subclasses__()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rest", [[], [["any", {"shape": 1}], None]])
@pytest.mark.parametrize(
    ("protocol", "spoken", "upgrade"),
    [(OURS - 1, f"version {OURS - 1}", "asking"), (OURS + 1, f"version {OURS + 1}", "answering"),
     ("gateway-1", "a version below 15", "asking")],
)  # fmt: skip
async def test_a_greeting_in_another_protocol_is_told_both_versions_whatever_its_shape(
    name: str, rest: list[Any], protocol: object, spoken: str, upgrade: str
) -> None:
    failed = await answer_to([name, 7, protocol, *rest])
    assert (failed.seq, failed.code, failed.field) == (7, "wrong_version", "protocol")
    assert spoken in failed.message and f"the answering one {OURS}" in failed.message
    assert failed.message.endswith(f"upgrade the {upgrade} process")


@pytest.mark.parametrize("message", [["register", 7, OURS], ["register", 7, OURS, 1, 2], ["where", 7, 1, 1]])
async def test_an_invalid_request_of_this_protocol_is_told_what_is_wrong_with_it(message: list[Any]) -> None:
    failed = await answer_to(message)
    assert (failed.seq, failed.code) == (7, "bad_request")


async def test_a_whole_greeting_with_another_protocol_is_refused() -> None:
    beat = wire.GatewayBeat(7, OURS + 1, "g", "1", 1, "ttft", 0, 0, 0, 0)
    failed = await answer_to(msgspec.to_builtins(beat))
    assert failed.code == "wrong_version"


async def answer_to(message: Any) -> wire.Failure:
    """What a controller's port answers to these fields."""
    port = ControlPort(asyncio.get_running_loop(), 1, requests=wire.TO_CONTROLLER)
    sent: list[bytes] = []
    port.server.send = lambda _, frame: sent.append(frame)  # type: ignore[assignment,misc]
    port._on_frame(ASKER, msgspec.msgpack.encode(message))
    await port.close()
    failed = wire.ANSWERS.decode(sent[0])
    assert isinstance(failed, wire.Failure)
    return failed


@pytest.mark.parametrize(
    ("protocol", "upgrade"),
    [(telling.PROTOCOL - 1, "upgrade the other"), (telling.PROTOCOL + 1, "upgrade this")],
)
def test_a_gateway_that_hears_another_protocol_says_both_whatever_the_frame_holds(
    protocol: int, upgrade: str
) -> None:
    frame = msgspec.msgpack.encode([protocol, {"any": "shape"}])
    with pytest.raises(ValueError, match=f"{protocol}, this one {telling.PROTOCOL}; {upgrade} gateway"):
        telling.frame_of(frame)
