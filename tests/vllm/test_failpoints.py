"""Promises P4 and P9 at every step of the protocol: the server dies or freezes there while real vLLM generates.

At each point of the table that an engine's requests reach, the tokens stay right, no call on the engine's threads
waits for the server, and caching is back once a server is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata import failpoints
from kvstrata.cli.asking import Ask, ask
from kvstrata.errors import Unavailable
from tests.harness.server_process import ServerProcess
from tests.vllm.conftest import Rig, rig_of, until
from tests.vllm.test_degraded import check_calls

pytestmark = [pytest.mark.vllm, pytest.mark.long]

NOT_FOR_ENGINES = re.compile(
    r"(hello|retrieve|prefetch|status|clear|sweep|explain|abort|cancel|corrupt|recut)\."
)
"""Steps that the requests of a healthy engine that is alone need not take."""
STOPPED = ("lookup.done", "commit.done", "load.read", "put.stored")


def cases() -> list[tuple[str, str]]:
    """Killed once in each step that an engine takes, stopped in some.

    tests/integration/client/test_client_degraded.py kills and stops the server at every point of every message.
    """
    points = [
        point
        for point in failpoints.POINTS
        if not NOT_FOR_ENGINES.match(point)
        and (point.startswith("attach.") or not point.endswith((".received", ".replied")))
    ]
    assert set(STOPPED) < set(points)
    return [*((point, "kill") for point in points), *((point, "stop") for point in STOPPED)]


@pytest.fixture(scope="module")
def rig(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine and a server with an L2, so that loads and puts are steps too."""
    folder = tmp_path_factory.mktemp("failpoints")
    with ServerProcess(folder / "server", l1_mb=96, l2="fs") as server:
        server.start()
        with rig_of(server, small_model, folder / "vllm") as rig:
            yield rig


@pytest.fixture(scope="module")
def known(rig: Rig) -> tuple[list[int], list[int]]:
    """(A prompt that is in L2, the tokens that follow it)."""
    prompt = rig.fresh_prompt(600)
    tokens = rig.stored(prompt)["tokens"]
    until(lambda: rig.server.get("/v1/status")["l2_store"]["backlog_bytes"] == 0, "putting the prompt to L2")
    return prompt, tokens


def restart(server: ServerProcess, armed: str) -> None:
    server.kill()
    server.wipe_segment()
    server._environment[failpoints.VARIABLE] = armed
    server.start()


def attached_again(server: ServerProcess) -> bool:
    try:
        return int(ask(server.url, Ask("/v1/status", timeout_s=2.0))["sessions"]["attached"]) >= 2
    except Unavailable:  # it halted meanwhile
        return False


def forgotten_in_l1(server: ServerProcess) -> bool:
    """Never true. What was computed before its lookup was answered is in L1 by now, and L2 would not be asked again."""
    try:
        ask(server.url, Ask("/v1/clear", {"tier": "l1"}, timeout_s=2.0))
    except Unavailable:
        pass  # it halts only now
    return False


@pytest.mark.parametrize(("point", "action"), cases())
def test_the_engine_gives_the_same_tokens_and_does_not_wait(rig, known, point, action):
    prompt, expected = known
    new = rig.fresh_prompt(600)
    rig.vllm.ask("take_calls")
    restart(rig.server, f"{point}={action}")
    until(
        lambda: rig.server.halted() or attached_again(rig.server),
        "attaching, so that L2 is asked before L1 is filled",
    )
    said = []

    def reached() -> bool:
        assert rig.again(prompt)["tokens"] == expected
        said.append(rig.again(new)["tokens"])
        return rig.server.halted() or forgotten_in_l1(rig.server)

    until(reached, f"reaching {point}")
    assert rig.again(prompt)["tokens"] == expected
    said.append(rig.again(new)["tokens"])
    check_calls(rig)
    restart(rig.server, "")
    until(rig.connected, "attaching again")
    assert until(lambda: rig.full_hit(prompt, 512), "hitting again")["tokens"] == expected
    said.append(rig.again(new)["tokens"])
    assert all(tokens == said[0] for tokens in said)
