"""What attacks on the HTTP port cost engines and others, by the shape of the attack."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.responses import Response

from kvstrata.config.common_model import ListenSettings
from kvstrata.process.http import make_base
from kvstrata.process.http_gate import Access
from kvstrata.process.http_thread import make_port
from kvstrata.process.listen import listen
from tests.harness.controller_process import ControllerProcess
from tests.integration.process.test_http_strangers import port_of

pytestmark = pytest.mark.integration

STEP_S, ROUNDS = 0.004, 20
"""Maximum time for which a step may keep the interpreter.  A ping asks for it four times (to wake, to read, after the
pool, to write), and waits for SWITCH_S and a step each time: 18 of the 20 ms that an attack may cost."""
CHUNKED = "host: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
ONE_BYTE_CHUNKS = "1\r\nx\r\n" * 50_000
HEADERS = "".join(f"a{number}: b\r\n" for number in range(5_000))
SHAPES = {
    "probes": "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50,
    "metrics": "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50,
    "refused": "GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50,
    "foreign": "GET /metrics HTTP/1.1\r\nhost: evil.example\r\n\r\n" * 50,
    "one-byte chunks on a probe": f"GET /healthz HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}",
    "one-byte chunks on the metrics": f"GET /metrics HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}",
    "one-byte chunks on a route": f"POST /v1/clear HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}",
    "a long body": f"POST /v1/clear HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40000000\r\n\r\n{'x' * 400_000}",
    "a body of brackets": f"GET /metrics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 65536\r\n\r\n{'[' * 65_536}",
    "many headers": f"GET /healthz HTTP/1.1\r\nhost: localhost\r\n{HEADERS}\r\n",
    "a header without end": "GET /healthz HTTP/1.1\r\nhost: localhost\r\na: " + "b" * 400_000,
    "half a request": "GET /metrics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx",
    "nothing of HTTP": "\x16\x03\x01" * 20_000,
    "connections": "",
}
# Sends a text again and again over many connections, each until it ends, until its own input ends.
ATTACK = """
import json, select, socket, sys
port, text, most = json.load(open(sys.argv[1]))
text, links = text.encode("latin-1"), {}
def connect():
    link = socket.socket()
    link.setblocking(False)
    link.connect_ex(("127.0.0.1", port))
    links[link.fileno()] = [link, 0]
    poll.register(link, select.POLLIN | select.POLLOUT if text else select.POLLIN)
def close(fd):
    poll.unregister(fd)
    links.pop(fd)[0].close()
poll = select.poll()
poll.register(0, select.POLLIN)
print("begun", flush=True)
while True:
    while len(links) < most:
        connect()
    for fd, events in poll.poll():
        if fd == 0:
            sys.exit()
        try:
            link, sent = links[fd]
            if events & (select.POLLERR | select.POLLHUP):
                close(fd)
            elif events & select.POLLIN and not link.recv(1 << 16):
                close(fd)
            elif events & select.POLLOUT:
                links[fd][1] += link.send(text[sent:sent + 65536])
                if links[fd][1] == len(text):
                    poll.modify(fd, select.POLLIN)
        except BlockingIOError:
            pass
        except OSError:
            close(fd)
    if not text and len(links) == most:
        for fd in list(links)[:most // 2]:
            close(fd)
"""


@contextlib.contextmanager
def attacked(port: int, text: str, folder: Path, most: int = 100) -> Iterator[None]:
    """A process that sends `text` over up to `most` connections at a time."""
    asked = folder / "attack.json"
    asked.write_text(json.dumps([port, text, most]))
    with subprocess.Popen(
        [sys.executable, "-c", ATTACK, str(asked)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None and child.stdin is not None
            child.stdout.readline()
            yield
            assert child.poll() is None, "the attack has ended by itself"
        finally:
            child.stdin.close()
            child.wait()


class Steps:
    """The longest CPU time between two calls or returns of the port's thread, at each of which others may take over."""

    longest_s = before_s = 0.0

    def __call__(self, frame: object, event: str, argument: object) -> None:
        if threading.current_thread().name != "kv-http":
            sys.setprofile(None)
            return
        self.longest_s = max(self.longest_s, time.thread_time() - self.before_s)
        self.before_s = time.thread_time()


def send(port: int, text: str) -> None:
    """Send a text over a connection of its own, and read what comes until the port ends it."""
    with socket.create_connection(("127.0.0.1", port)) as link, contextlib.suppress(ConnectionError):
        link.sendall(text.encode("latin-1"))
        link.shutdown(socket.SHUT_WR)
        while link.recv(65536):
            pass


def app() -> FastAPI:
    made, _ = make_base("test", lambda: (True, ""))
    made.get("/metrics")(lambda: Response(bytes(256 << 10)))
    return made


async def test_no_attack_on_the_http_port_keeps_the_interpreter_from_an_engine() -> None:
    """What else an attack could cost an engine, turns of its loop, is in tests/unit/process/test_http_thread.py."""
    port, steps = await make_port(app, Access(ListenSettings(), "t" * 32)), Steps()
    listener = listen(ListenSettings(port=0))
    threading.setprofile(steps)
    task = asyncio.create_task(port.serve(listener))
    gc.freeze()
    try:
        for name, text in SHAPES.items():
            for turn in range(1, ROUNDS + 1):  # the machine may add time, and takes none away
                steps.longest_s = 0.0
                await asyncio.to_thread(send, listener.port, text)
                if steps.longest_s <= STEP_S:
                    break
                assert turn < ROUNDS, f"{name}: a step takes {steps.longest_s * 1000:.1f} ms"
        assert steps.before_s
    finally:
        threading.setprofile(None)
        gc.unfreeze()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.long
def test_half_logins_do_not_take_a_controllers_api(tmp_path: Path) -> None:
    half = "POST /v1/login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
    with ControllerProcess(tmp_path) as controller, attacked(port_of(controller), half, tmp_path, most=600):
        for _ in range(50):
            assert controller.ask("/v1/instances")["instances"] == []
            assert controller.text("/healthz")
