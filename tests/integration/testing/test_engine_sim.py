"""The simulated engine, alone and with a cache server."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from kvstrata.testing.engine_sim.kv_events import BlockStored, KVEventBatch
from tests.harness.cache_engine import eventually
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

HANG_MS = 60_000
READY = re.compile(r"serving .* at (http://\S+?)(?:, KV events at (\S+?)(?:, their replay at (\S+))?)?$")
BLOCK = 4


class Sim:
    """The process, and the addresses that it told."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "kvstrata", "sim", "--port", "0"]
        command += ["--block-tokens", str(BLOCK), "--kv-blocks", "40000"]
        self.process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.before: list[str] = []
        """Lines until the one that tells the addresses."""
        found = None
        while found is None:
            self.line = self.process.stderr.readline()
            assert self.line, "".join(self.before)
            self.before.append(self.line)
            found = READY.search(self.line.strip())
        self.url, self.events, self.replay = found.groups()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_MS / 1000)


@pytest.fixture(scope="module")
def sim() -> Iterator[Sim]:
    any_port = "tcp://127.0.0.1:0"
    started = Sim(
        "--model", "m", "--adapter", "lora", "--speed", "20",
        "--kv-events-endpoint", any_port, "--kv-events-replay-endpoint", any_port, "--kv-events-topic", "kv",
    )  # fmt: skip
    try:
        yield started
        assert started.stop() == 0
    finally:
        started.process.kill()
        started.process.wait()


@pytest.fixture
def client(sim: Sim) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sim.url, timeout=HANG_MS / 1000, trust_env=False) as client:
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        yield client


def events(reply: httpx.Response) -> list[Any]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    data = [block.removeprefix("data: ") for block in reply.text.strip().split("\n\n")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def metric(client: httpx.Client, name: str) -> float:
    (value,) = re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abcdefghij", "max_tokens": 9}),
        ("/v1/completions", {"prompt": list(range(1000, 1010)), "max_tokens": 9}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}),
    ],
    ids=["text", "ids", "chat"],
)
def test_a_stream_says_what_the_whole_answer_says(client, path, body):
    whole = client.post(path, json=body)
    assert whole.status_code == 200
    told = events(client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}}))
    answer, text, again, end, cached = read(path, whole.json(), told)
    assert text == again
    assert len(text) == 9
    assert end == "length"
    assert answer == 9
    assert cached > 0 and cached % BLOCK == 0


def read(path: str, whole: Any, data: list[Any]) -> tuple[int, str, str, str, int]:
    """Tokens and text of the whole answer; text, reason of the end, and cached tokens of the stream."""
    assert data[-1] == "[DONE]"
    assert data[-2]["choices"] == []
    pieces = [each["choices"][0] for each in data[:-2]]
    if path == "/v1/chat/completions":
        assert pieces[0]["delta"]["role"] == "assistant"
        text = "".join(each["delta"]["content"] for each in pieces)
        said = whole["choices"][0]["message"]["content"]
    else:
        text, said = "".join(each["text"] for each in pieces), whole["choices"][0]["text"]
    cached = data[-2]["usage"]["prompt_tokens_details"]["cached_tokens"]
    return whole["usage"]["completion_tokens"], said, text, pieces[-1]["finish_reason"], cached


def test_errors_have_openais_shape(client: httpx.Client) -> None:
    bad = client.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": "x"}')
    assert bad.status_code == 400
    error = bad.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "max_tokens", 400)
    unknown = client.post("/v1/chat/completions", json={"model": "x", "messages": [{"role": "user"}]})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    assert client.get("/nowhere").json()["error"]["code"] == 404
    assert client.get("/v1/completions").status_code == 405
    render = client.post("/v1/completions/render", json={"prompt": "a"})
    assert (render.status_code, render.json()["error"]["type"]) == (403, "PermissionDeniedError")
    assert metric(client, "num_requests_running") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_ends_when_its_client_goes(client: httpx.Client, stream: bool) -> None:
    ended = 'request_success_total{engine="0",finished_reason="abort",model_name="m"}'

    def aborts() -> float:
        line = next(
            line for line in client.get("/metrics").text.splitlines() if line.startswith(f"vllm:{ended}")
        )
        return float(line.split()[-1])

    before = aborts()
    body = json.dumps({"prompt": "abc", "max_tokens": 100_000, "ignore_eos": True, "stream": stream}).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as leaver:
        leaver.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        if stream:
            assert leaver.recv(1 << 16).startswith(b"HTTP/1.1 200")
        else:
            while not metric(client, "num_requests_running"):
                pass
        assert metric(client, "num_requests_running") == 1
    while aborts() == before:
        pass
    assert metric(client, "num_requests_running") == metric(client, "num_requests_waiting") == 0
    assert metric(client, "kv_cache_usage_perc") == 0


def test_events_tell_the_blocks_and_a_gap_is_replayed(client: httpx.Client, sim: Sim) -> None:
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    with zmq.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.REQ) as unused:
        unused.close()
        live.rcvtimeo = HANG_MS
        live.subscribe(b"kv")
        live.connect(sim.events)
        # A new subscriber misses what is published before it is known, so ask until an event arrives.
        while not live.poll(100):
            client.post("/v1/completions", json={"prompt": "until one arrives", "max_tokens": 1})
            client.post("/reset_prefix_cache")
        tokens = list(range(2000, 2010))
        client.post("/v1/completions", json={"prompt": tokens, "max_tokens": 6})
        client.post("/v1/completions", json={"prompt": "last", "max_tokens": 1})
        numbers, stored, parents = [], [], []
        while list(b"last") not in stored:
            topic, number, payload = live.recv_multipart()
            assert topic == b"kv"
            numbers.append(int.from_bytes(number, "big"))
            for event in decoder.decode(payload).events:
                if isinstance(event, BlockStored) and event.token_ids != list(b"until one arrives")[:16]:
                    stored.append(event.token_ids)
                    parents.append((event.parent_block_hash, event.block_hashes[-1]))
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert stored[0] == tokens[:8]
        assert [len(each) for each in stored[1:-1]] == [BLOCK]  # 15 tokens have KV: three blocks
        assert parents[0][0] is None
        assert parents[1][0] == parents[0][1]
        assert replayed(context, sim.replay, numbers[1]) == numbers[1:]
        assert replayed(context, sim.replay, 0)[: numbers[-1] + 1] == list(range(numbers[-1] + 1))
        assert replayed(context, sim.replay, numbers[-1] + 1) == []


def replayed(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, first: int) -> list[int]:
    """Ask for the batches from `first` on, as vLLM's example does; returns the numbers of those that came."""
    with context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.rcvtimeo = HANG_MS
        asking.connect(endpoint)
        asking.send_multipart([b"", b"not a request", b"at all"])
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        numbers: list[int] = []
        while True:
            _, topic, number, payload = asking.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return numbers
            assert isinstance(msgspec.msgpack.decode(payload, type=KVEventBatch), KVEventBatch)
            numbers.append(int.from_bytes(number, "big"))


CHUNK = 16
PATIENCE_S = 120.0


SERVER = {"chunk_tokens": CHUNK}


def config(server: ServerProcess, **settings: Any) -> str:
    extra = {"socket_dir": str(server.socket_dir), "port": server.port, "chunk_size": CHUNK, **settings}
    return json.dumps(
        {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )


class Engine:
    """A simulated engine, attached to the server."""

    is_killed = False

    def __init__(self, server: ServerProcess, *flags: str, **settings: Any) -> None:
        self.sim = Sim("--model", "m", "--kv-transfer-config", config(server, **settings), *flags)
        self.client = httpx.Client(base_url=self.sim.url, timeout=HANG_MS / 1000, trust_env=False)

    def ask(self, prompt: list[int], **body: Any) -> int:
        reply = self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, **body})
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["completion_tokens"] == 3
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def metric(self, name: str) -> float:
        return metric(self.client, name)

    def kill(self) -> None:
        self.is_killed = True
        self.sim.process.kill()

    def close(self) -> None:
        self.client.close()
        try:
            assert self.is_killed or self.sim.stop() == 0
        finally:
            self.sim.process.kill()
            self.sim.process.wait()


@pytest.fixture
def start(server: ServerProcess) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def started(*flags: str, **settings: Any) -> Engine:
        engines.append(Engine(server, *flags, **settings))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def prompt(seed: int, tokens: int = 400) -> list[int]:
    return [seed * 10_000 + number for number in range(tokens)]


def until_hit(engine: Engine, other: Engine, first: int, tokens: int = 400) -> int:
    """Let one engine compute prompts until the other hits one; returns the cached tokens of the hit.

    Engines attach, and stores end, in the background: prompts before that are misses.
    """
    ends_s = time.monotonic() + PATIENCE_S
    for seed in range(first, first + 1000):
        engine.ask(prompt(seed, tokens))
        if cached := other.ask(prompt(seed, tokens)):
            return cached
        assert time.monotonic() < ends_s, "no prompt was hit"
    raise AssertionError


def test_what_one_engine_computes_another_loads(start: Callable[..., Engine]) -> None:
    first, second = start(), start()
    assert until_hit(first, second, 1) >= 400 - CHUNK
    loaded = second.metric("external_prefix_cache_hits_total")
    assert loaded >= 400 - CHUNK
    assert second.metric("prefix_cache_hits_total") == 0
    assert second.metric("external_prefix_cache_queries_total") >= loaded


def test_engines_go_on_when_the_server_is_killed(server: ServerProcess, start: Callable[..., Engine]) -> None:
    first, second = start(), start()
    until_hit(first, second, 1)
    server.kill()
    assert first.ask(prompt(5000)) == 0
    assert second.ask(prompt(5000)) == 0
    ends_s = time.monotonic() + PATIENCE_S
    while first.ask(prompt(5000)) != 400 - 4:  # its own blocks, but the last: that token is computed
        assert time.monotonic() < ends_s
    while not first.client.post("/reset_prefix_cache").json()["success"]:
        assert time.monotonic() < ends_s, "blocks are held for copies to a server that is gone"
    server.start()
    until_hit(first, second, 6000)


SLOW = ("--prefill-token-us", "1000", "--max-num-batched-tokens", "1024")


def promises(server: ServerProcess) -> Any:
    return server.get("/v1/status")["promises"]


def until_measured(server: ServerProcess, one: Engine, other: Engine, first: int) -> None:
    """Until the server knows how fast both compute, and how fast the other loads what one has computed."""
    for seed in range(first, first + 1_000):
        for engine in (one, other):
            engine.ask(prompt(seed, 200 + 40 * (seed % 20)))
        other.ask(prompt(seed + 2_000, 200 + 40 * (seed % 20)))
        computes = all(row["prompt_tokens_s"] for row in server.get("/v1/status")["engines"])
        if computes and any(row["load_rate"] for row in server.get("/v1/status")["peers"]):
            return
    raise AssertionError


@pytest.mark.parametrize("end", ["ready", "broken"])
def test_what_an_engine_computes_now_is_computed_by_no_other_unless_the_engine_dies(server, start, end):
    first, second = (start(*SLOW) for _ in range(2))
    seed = 20_000 if end == "ready" else 40_000  # the other case's prompts may be in L1
    until_hit(first, second, seed)

    def measured() -> bool:
        number = next(fresh)
        second.ask(prompt(number, 200 + 40 * (number % 20)))
        return any(row["prompt_tokens_s"] for row in server.get("/v1/status")["engines"])

    fresh = itertools.count(seed + 2_000)
    eventually("the second engine knows how fast it computes", measured)
    whole = prompt(seed + 9_000, 4_000)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        computing = pool.submit(first.ask, whole)
        eventually("the first engine has promised the prompt", lambda: promises(server)["live"])
        if end == "broken":
            first.sim.process.send_signal(signal.SIGSTOP)  # or it might be done too soon
        waiting = pool.submit(second.ask, whole)
        eventually("the second one waits for it", lambda: promises(server)["waits_now"] or waiting.done())
        if end == "broken":
            first.kill()
            computing.exception(PATIENCE_S)
        assert (waiting.result(PATIENCE_S) >= 4_000 - CHUNK) == (end == "ready")
    assert promises(server)["waits"].get(end)
    if end == "ready":
        assert computing.result() == 0
        eventually("the promise is withdrawn", lambda: not promises(server)["live"])


@pytest.mark.long
def test_what_an_engine_dies_over_is_computed_by_the_one_that_holds_blocks_for_it(server, start):
    first, second = (start(*SLOW) for _ in range(2))
    until_measured(server, first, second, 80_000)
    whole = prompt(90_000, 12_000)  # long, so that there is time to stop it after its first step
    stored = server.get("/v1/status")["pool"]["entries"]["ready"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        computing = pool.submit(first.ask, whole)
        waiting = pool.submit(second.ask, whole, kv_transfer_params={"kvstrata.wait_ms": 60_000})
        eventually("a step is stored", lambda: server.get("/v1/status")["pool"]["entries"]["ready"] > stored)
        first.sim.process.send_signal(signal.SIGSTOP)
        eventually("the second one holds blocks for the rest", lambda: promises(server)["waits"].get("soon"))
        first.kill()
        computing.exception(PATIENCE_S)
        assert 0 < waiting.result(PATIENCE_S) < 12_000 - CHUNK
