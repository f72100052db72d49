"""Bodies of up to 32 MiB at the ports of a real server and a real controller, while an engine pings."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.amount import amount
from tests.harness.controller_process import ControllerProcess
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess
from tests.integration.process.test_http_strangers import port_of, send, token_of

MOST = (32 << 20) - 100
TOKENS = b'{"model": "%s", "tokens": [' + b"4294967295," * 2_900_000 + b"1]}"
BODIES: dict[str, tuple[bytes, int, str]] = {
    "objects": (b"[" + b"{}," * (MOST // 3) + b"{}]", 413, "objects and lists"),
    "lists in lists": (b"[" * MOST, 413, "objects and lists"),
    "floats": (b'{"tokens": [' + b"1.5e9," * (MOST // 6) + b"1]}", 400, "tokens.0: Expected `int`"),
    "one number": (b'{"tokens": [' + b"9" * MOST + b"]}", 400, "an item of more than 65536 bytes"),
    "one text": (b'{"model": "' + b"x" * MOST + b'"}', 413, "beside its lists"),
    "escapes": (b'{"model": "' + b"\\u00e9" * (MOST // 6) + b'"}', 413, "beside its lists"),
    "members": (b"{" + b'"a":1,' * (MOST // 6) + b'"a":1}', 413, "colons"),
    "tokens": (TOKENS % b"nobody", 400, "'nobody' must name the one attached engine"),
}
OF_SERVER = amount(("lists in lists", "one number", "members", "tokens"), tuple(BODIES))
OF_CONTROLLER = amount(("objects", "floats"), tuple(BODIES)[:-1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), l1_mb=16) as process:
        process.start()
        yield process


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path_factory.mktemp("controller")) as process:
        yield process


def while_pinging(server: ServerProcess, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which runs on a thread while an engine pings the server."""
    done: list[Any] = []
    with RpcClient(server.socket_dir) as engine:
        thread = threading.Thread(target=lambda: done.append(work()))
        thread.start()
        while thread.is_alive():
            engine.ping()
        thread.join()
    return done[0]


def test_a_large_body_is_answered_while_an_engine_pings(server: ServerProcess) -> None:
    right = {"authorization": f"Bearer {token_of(server)}"}
    for name in OF_SERVER:
        body, expected, says = BODIES[name]
        status, answer = while_pinging(
            server, lambda body=body: send(port_of(server), right, body, request="POST /v1/prefetch")
        )
        assert (status, json.loads(answer)["code"]) == (expected, "bad_request"), name
        assert says in json.loads(answer)["message"]


def test_millions_of_tokens_are_prefetched(server: ServerProcess) -> None:
    right = {"authorization": f"Bearer {token_of(server)}"}
    status, answer = while_pinging(
        server, lambda: send(port_of(server), right, TOKENS % b"tiny", request="POST /v1/prefetch")
    )
    assert status == 202, answer
    job = json.loads(send(port_of(server), right, request=f"GET /v1/prefetch/{json.loads(answer)['job']}")[1])
    assert job["chunks"] == 2_900_001 // 16


def test_a_large_body_is_refused_by_a_controller(controller: ControllerProcess) -> None:
    for name in OF_CONTROLLER:
        body, expected, says = BODIES[name]
        status, answer = send(port_of(controller), controller.bearer(), body, request="POST /v1/lookup")
        assert (status, json.loads(answer)["code"]) == (expected, "bad_request"), name
        assert says in json.loads(answer)["message"]


def test_a_controller_takes_as_many_tokens_and_keys_as_its_api_says(controller: ControllerProcess) -> None:
    for field, listed, status, says in (
        ("tokens", b"7," * 1_048_575 + b"7", 400, "no engine has"),
        ("tokens", b"7," * 1_048_576 + b"7", 400, "at most 1048576 items"),
        ("keys", b",".join([b'"%064x"' % 7] * 65_536), 200, '"longest"'),
        ("keys", b",".join([b'"%064x"' % 7] * 65_537), 400, "at most 65536 items"),
        ("keys", b",".join([b'"nothing"'] * 20_000), 400, "keys[0]: must be 64 hexadecimal digits"),
        ("tokens", b",".join([b'"%064x"' % 7] * 2_000), 400, "should be a valid list"),
        ("keys", b"7," * 50_000 + b"7", 400, "should be a valid list"),
    ):
        body = b'{"%s": [%s]}' % (field.encode(), listed)
        found, answer = send(port_of(controller), controller.bearer(), body, request="POST /v1/lookup")
        assert (found, says in answer) == (status, True), answer[:500]
