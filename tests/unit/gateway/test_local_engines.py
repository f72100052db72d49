"""Who is asked whether it is an engine, and what counts as one: against tables of sockets and scripted answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstrata.config.gateway_engines_model import LocalSettings
from kvstrata.gateway import local_engines
from kvstrata.gateway.engine_link import Address, LinkBroken, Unreachable
from kvstrata.gateway.fleet import Place
from kvstrata.gateway.local_engines import AGAIN_S, OTHERS, Listens, LocalEngines, listening

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
MODELS = b'{"object":"list","data":[{"id":"m"}]}'
VERSION = b'{"version":"0.11.0"}'
Answers = dict[tuple[int, str], Any]


def row(address: str, port: int, uid: int = 1_000, inode: int = 7, state: str = "0A") -> str:
    """A line of the kernel's table."""
    far = "0" * len(address) + ":0000"
    zeros = "00000000:00000000 00:00000000 00000000"
    return f"   0: {address}:{port:04X} {far} {state} {zeros} {uid:>5}        0 {inode} 1\n"


def test_only_ports_of_the_range_that_this_host_reaches_at_loopback_are_seen(tmp_path: Path) -> None:
    four, six = tmp_path / "tcp", tmp_path / "tcp6"
    four.write_text(
        HEAD
        + row("0100007F", 8000)
        + row("00000000", 8001, 0, 8)
        + row("0A00000A", 8002)  # another address of this host
        + row("0100007F", 8003, state="01")  # a connection
        + row("0100007F", 7999)
        + row("0100007F", 8006, 1_000, 9)
        + row("0100007F", 8006, 2_000, 10)
    )
    six.write_text(
        HEAD
        + row("0" * 24 + "01000000", 8004)
        + row("0" * 32, 8000, 1_000, 11)
        + row("0" * 16 + "FFFF00000100007F", 8005)
        + row("0" * 32, 9000)
    )
    found = {one.address.port: one for one in listening(range(8000, 8100), [four, six, tmp_path / "none"])}
    hosts = {port: one.address.host for port, one in found.items()}
    local = "127.0.0.1"
    assert hosts == {8000: local, 8001: local, 8004: "::1", 8005: local, 8006: local}
    assert found[8000].inodes == {"7", "11"} and found[8001].uids == {0}
    assert found[8006].uids == {1_000, 2_000}


def test_a_table_full_of_connections_is_not_read_to_its_end(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    connections = row("0100007F", 8000, state="01") * (OTHERS + 1)
    table.write_text(HEAD + row("0100007F", 8001) + connections + row("0100007F", 8002))
    assert [one.address.port for one in listening(range(8000, 8100), [table])] == [8001]


class Host:
    """A host with these sockets, whose ports answer by `answers`; the clock stands until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.there: list[Listens] = []
        self.answers: Answers = {}
        self.asked: list[tuple[int, str, str]] = []
        self.told: list[list[str]] = []
        self.now_s = 100.0
        self.taken: set[int] = set()
        monkeypatch.setattr(local_engines, "get", self._get)
        self.engines = LocalEngines(
            LocalSettings(**settings),
            "key",
            None,  # type: ignore[arg-type]
            self._found,
            lambda: self.taken,
            lambda: self.now_s,
            look=lambda ports: [one for one in self.there if one.address.port in ports],
        )

    def listens(self, port: int, uids: frozenset[int] = frozenset({os.getuid()}), inode: str = "1") -> None:
        self.there.append(Listens(Address("127.0.0.1", port, False), uids, frozenset({inode})))

    def engine(self, port: int, version: bytes = VERSION) -> None:
        self.answers |= {(port, "/version"): (200, version), (port, "/v1/models"): (200, MODELS)}

    def _found(self, places: list[Place]) -> None:
        self.told.append([place.name for place in places])

    async def _get(self, links: object, address: Address, path: str, key: str) -> tuple[int, bytes]:
        self.asked.append((address.port, path, key))
        answer = self.answers.get((address.port, path), Unreachable("refused"))
        if isinstance(answer, Exception):
            raise answer
        status, body = answer
        return int(status), bytes(body)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


async def test_engines_are_told_when_they_come_and_when_their_socket_goes(host: Host) -> None:
    host.listens(8000)
    host.engine(8000)
    await host.engines.look(1)
    await host.engines.look(1)
    assert host.told == [["127.0.0.1:8000"]]
    assert host.asked == [(8000, "/version", ""), (8000, "/v1/models", "key")], (
        "the key goes to an engine only"
    )
    host.there.clear()
    host.listens(8000, inode="2")  # another process took the port
    host.answers[8000, "/version"] = (404, b"")
    await host.engines.look(1)
    assert host.told[1:] == [[]]


async def test_strangers_ports_that_are_taken_and_shared_ones_are_never_asked(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stranger = os.getuid(), os.getuid() + 1
    host.taken = {8001}
    for port, uids in {8000: {stranger}, 8001: {own}, 8002: {own, stranger}, 8003: {0}, 9000: {own}}.items():
        host.listens(port, frozenset(uids))
        host.engine(port)
    await host.engines.look(1)
    assert {port for port, _, _ in host.asked} == {8003}
    open_to_all = Host(monkeypatch, any_user=True)
    open_to_all.there, open_to_all.answers = host.there, host.answers
    await open_to_all.engines.look(1)
    assert {port for port, _, _ in open_to_all.asked} == {8000, 8001, 8003}


NO_ENGINES: Mapping[str, Answers] = {
    "a gateway": {(8000, "/version"): (200, b'{"version":"1","gateway":"a"}'), (8000, "/v1/models"): (200, MODELS)},
    "a web server": {(8000, "/version"): (404, b"")},
    "not HTTP": {(8000, "/version"): LinkBroken("no HTTP")},
    "another document": {(8000, "/version"): (200, b"[]")},
    "no list of models": {(8000, "/version"): (200, VERSION), (8000, "/v1/models"): (200, b"{}")},
    "no model": {(8000, "/version"): (200, VERSION), (8000, "/v1/models"): (200, b'{"data":[]}')},
    "another key": {(8000, "/version"): (200, VERSION), (8000, "/v1/models"): (401, b"")},
}  # fmt: skip


@pytest.mark.parametrize("what", NO_ENGINES)
async def test_what_is_no_engine_is_asked_again_after_a_minute(host: Host, what: str) -> None:
    host.listens(8000)
    host.answers = dict(NO_ENGINES[what])
    for _ in range(3):
        await host.engines.look(1)
        host.now_s += AGAIN_S / 3
    assert [path for _, path, _ in host.asked].count("/version") == 1 and host.told == []
    host.engine(8000)
    await host.engines.look(1)
    assert host.told == [["127.0.0.1:8000"]]


@pytest.mark.parametrize("answer", [Unreachable("refused"), TimeoutError(), (503, b"")])
async def test_who_does_not_answer_yet_is_asked_soon_then_less_and_less_often(
    host: Host, answer: Any
) -> None:
    host.listens(8000)
    host.answers[8000, "/version"] = answer
    times: list[float] = []
    for second in range(300):
        before = len(host.asked)
        await host.engines.look(1)
        times += [second] if len(host.asked) > before else []
        host.now_s += 1
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[0] == 1 and pauses == sorted(pauses) and pauses[-1] == AGAIN_S
    host.engine(8000)
    host.now_s += AGAIN_S
    await host.engines.look(1)
    assert host.told == [["127.0.0.1:8000"]]
