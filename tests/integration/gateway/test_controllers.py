"""A real gateway asks a real controller what real servers hold of a prompt, and never waits long for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvstrata.types import canonical_json
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster, key_files
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

COMPLETIONS = "/v1/completions"
CHUNKS = 64
TOKENS = CHUNKS * CHUNK_TOKENS
TOKENS_S = 2_000
"""Rate at which the engines seem to compute: so slow that a stall of 100 ms moves the measured rate little."""


async def answers(got: Got, line: Line) -> None:
    tokens = len(got.document["prompt"])
    await asyncio.sleep(tokens / TOKENS_S)
    details = {"cached_tokens": 0}
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": details}
    await line.answer({"id": "x", "choices": [{"text": "a"}], "usage": usage})


class Scene:
    """Two engines, each attached to a server of its own, a controller that knows both servers, and a gateway."""

    def __init__(self, cluster: Cluster, engines: list[ScriptedEngine], caches: list[CacheEngine]) -> None:
        self.cluster, self.engines, self.caches = cluster, engines, caches
        self.gateway: GatewayProcess
        self.session: aiohttp.ClientSession
        self.seeds: dict[int, set[int]] = {}
        """Of the prompts that were stored, by server."""

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.cluster.controller.ports['reply']}"

    async def store(self, number: int, seed: int) -> list[int]:
        """Store a prompt at a server; returns it once the controller knows of it."""
        tokens = prompt(CHUNKS, seed)
        cache = self.caches[number]
        await asyncio.to_thread(
            eventually, "the prompt is stored", lambda: set(cache.stored(tokens)) <= {"stored", "present"}
        )
        self.seeds.setdefault(number, set()).add(seed)
        await asyncio.to_thread(self.cluster.until_known, number)
        await self.until_followed()
        return tokens

    async def until_followed(self) -> None:
        """Wait until the gateway knows as many chunks of each instance as the controller does."""

        async def known() -> bool:
            followed = (await self.gateway.status(self.session))["followed"]
            ours = {one["instance"]: one["keys"] for one in followed}
            rows = (await asyncio.to_thread(self.cluster.controller.ask, "/v1/instances"))["instances"]
            return ours == {row["id"]: row["keys"] for row in rows if row["state"] == "live"}

        await eventually_async("the gateway knows it", known)

    async def page(self) -> dict[str, Any]:
        rows = (await self.gateway.status(self.session))["controllers"]
        return dict(rows[0]) if rows else {"member": False}

    async def until_told(self, count: int = 2) -> None:
        """Wait until the gateway knows all instances and their engines."""

        async def told() -> bool:
            row = await self.page()
            followed = (await self.gateway.status(self.session))["followed"]
            in_step = sum(
                one["in_step"] and len(one["engines"]) == len(one["models"]) == 1 for one in followed
            )
            return bool(row["member"] and in_step == count == len(followed))

        await eventually_async("the gateway knows the instances", told)

    async def only_in_l2(self, number: int) -> None:
        """Drop what a server has in L1, once its L2 has it."""
        controller = self.cluster.controller

        def in_l2() -> bool:
            row = self.cluster.member(number)
            wanted = CHUNKS * len(self.seeds[number])
            return row is not None and sum(row["keys"].values()) - row["keys"]["l1"] >= wanted

        await asyncio.to_thread(eventually, "the chunks are in L2", in_l2)
        body = {"tier": "l1", "instances": [f"instance-{number}"], "wait_s": 10}
        await asyncio.to_thread(controller.ask, "/v1/clear", body)
        await asyncio.to_thread(
            eventually, "the controller knows L1 is empty", lambda: not self.cluster.known(number)
        )
        await self.until_followed()

    async def reloaded(self) -> None:
        self.gateway.write()
        self.gateway.signal(signal.SIGHUP)

    async def send(self, tokens: list[int], word: str = "", **more: Any) -> None:
        body = {"model": "m", "prompt": tokens, "max_tokens": 1, **more}
        headers = {"X-Request-ID": word} if word else {}
        async with self.session.post(self.gateway.url + COMPLETIONS, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()

    async def decided(self, tokens: list[int], word: str, **more: Any) -> dict[str, Any]:
        await self.send(tokens, word, **more)
        operators = {"Authorization": f"Bearer {self.gateway.token}"}
        path = f"{self.gateway.url}/gateway/decisions/{word}"
        async with self.session.get(path, headers=operators, raise_for_status=True) as response:
            return dict(await response.json())

    async def known(self, tokens: list[int], word: str, **more: Any) -> set[tuple[str, str, int, str]]:
        """What the gateway knew of a prompt by its controller: engine, tier, tokens, source."""
        copies = (await self.decided(tokens, word, **more))["record"]["knowledge"].get("copies", [])
        return {
            (one.get("engine", ""), one["tier"], one["tokens"], one.get("source", ""))
            for one in copies
            if one["tier"] != "l0"
        }


@contextlib.asynccontextmanager
async def opened(folder: Path, kind: str = "none", n_servers: int = 2) -> AsyncIterator[Scene]:
    """A scene. `kind`: `keys` for key files, `fs` for an L2 at each server, `shared` for one of both."""
    l2, more, keys = kind, dict[str, Any](), dict[str, str]()
    if kind == "shared":
        entry = {"type": "fs", "base_path": str(folder / "shared"), "shared": True, "capacity_gb": 1}
        l2, more = "embedded", {"flags": ("--l2-adapter", json.dumps(entry))}
    if kind == "keys":
        controllers, members = key_files(folder)
        l2, keys = "none", {"curve_file": str(members)}
        more["flags"] = ("--cluster-curve-file", str(members))
        more["controller_flags"] = ("--curve-secret-file", str(controllers), "--heartbeat-s", "1")
    async with contextlib.AsyncExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(folder, l1_mb=64, n_servers=n_servers, chunk_tokens=CHUNK_TOKENS, l2=l2, **more)
        )
        engines, caches = [], []
        for number, server in enumerate(cluster.servers):
            engine = await stack.enter_async_context(
                ScriptedEngine("m", f"only-at-{number}", behaviour=answers)
            )
            settings = {"engine_url": engine.url}
            cache = CacheEngine(server.socket_dir, block_bytes=1024, num_blocks=4096, settings=settings)
            stack.enter_context(cache)
            engines.append(engine)
            caches.append(await asyncio.to_thread(cache.connect))
        made = Scene(cluster, engines, caches)
        made.session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60))
        )
        made.gateway = GatewayProcess(
            folder / "gateway",
            [one.url for one in engines],
            policy="ttft",
            controllers={"urls": [made.url], "name": "gw", **keys},
        )
        await asyncio.to_thread(made.gateway.start)
        stack.callback(made.gateway.kill)
        await made.until_told(n_servers)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with opened(tmp_path_factory.mktemp("scene")) as made:
        yield made


async def test_a_prompt_goes_to_the_engine_whose_server_has_it_in_l1(scene: Scene) -> None:
    for seed in range(6):
        number = seed % 2
        tokens = await scene.store(number, seed)
        decision = (await scene.decided(tokens, f"{seed}"))["record"]["decision"]
        assert decision["engine"] == scene.engines[number].name, decision
        assert (decision["way"]["tier"], decision["way"]["source"]) == ("l1", f"instance-{number}")

    async def shown() -> bool:
        (row,) = scene.cluster.controller.ask("/v1/cluster")["gateways"]
        facts = [row[name] for name in ("name", "policy", "engines", "engines_up", "port")]
        return facts == ["gw", "ttft", 2, 2, scene.gateway.port]

    await eventually_async("the controller shows the gateway", shown)


async def test_with_key_files_a_gateway_with_other_keys_is_told_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, "keys") as scene:
        await other_keys_are_told_nothing(scene, tmp_path)


async def other_keys_are_told_nothing(scene: Scene, tmp_path: Path) -> None:
    tokens = await scene.store(1, 2)
    assert ("l1", TOKENS, "instance-1") in {one[1:] for one in await scene.known(tokens, "own-keys")}
    _, others = key_files(tmp_path / "others")
    stranger = GatewayProcess(
        tmp_path / "stranger",
        [one.url for one in scene.engines],
        policy="ttft",
        controllers={"urls": [scene.url], "name": "stranger", "curve_file": str(others)},
    )
    try:
        await asyncio.to_thread(stranger.start)
        scene.gateway, before = stranger, scene.gateway
        for number in range(10):
            assert not await scene.known(tokens, f"other-keys-{number}")
        assert not (await scene.page())["member"]
        assert [row["name"] for row in scene.cluster.controller.ask("/v1/cluster")["gateways"]] == ["gw"]
        scene.gateway = before
    finally:
        stranger.kill()


async def test_a_prompt_goes_to_the_engine_whose_server_has_it_in_l2_only(tmp_path: Path) -> None:
    async with opened(tmp_path, "fs") as scene:
        for seed in range(4):
            number = seed % 2
            tokens = await scene.store(number, seed)
            await scene.only_in_l2(number)
            decision = (await scene.decided(tokens, f"{seed}"))["record"]["decision"]
            assert decision["engine"] == scene.engines[number].name, decision
            way = decision["way"]
            found = way["tier"], way["source"], way["cached_tokens"]
            assert found == ("l2", f"instance-{number}", TOKENS - 1)


async def test_what_one_server_put_into_a_shared_tier_all_can_load_until_one_finds_it_gone(tmp_path):
    async with opened(tmp_path, "shared") as scene:
        await shared_until_gone(scene, tmp_path)


async def shared_until_gone(scene: Scene, tmp_path: Path) -> None:
    tokens = await scene.store(0, 9)
    await scene.only_in_l2(0)
    names, numbers = [one.name for one in scene.engines], itertools.count()

    async def l2() -> set[tuple[str, int, str]]:
        found = await scene.known(tokens, f"l2-{next(numbers)}")
        return {(engine, n_tokens, source) for engine, tier, n_tokens, source in found if tier == "l2"}

    assert await l2() == {(name, TOKENS, "instance-0") for name in names}
    # Whoever loads it from there knows it too, and whoever does not find it tells all others.
    hit = await asyncio.to_thread(scene.caches[1].hit, tokens)
    assert hit == CHUNKS
    body = {"tier": "l1", "wait_s": 10}
    await asyncio.to_thread(scene.cluster.controller.ask, "/v1/clear", body)
    for record in (tmp_path / "shared").glob("server-*/[0-9a-f][0-9a-f]/**/*"):
        if record.is_file():
            record.unlink()

    async def gone() -> bool:
        await asyncio.to_thread(scene.caches[1].looked_up, tokens)
        return not await l2()

    await eventually_async("the directory has nothing of it any more", gone)


async def test_while_the_holder_is_busy_a_prompt_goes_elsewhere_and_is_read_from_the_peer(scene):
    tokens = await scene.store(0, 27)
    holder, other = scene.engines
    waits = asyncio.Event()

    async def hangs(got: Got, line: Line) -> None:
        await waits.wait()
        await line.answer({"choices": []})

    holder.behaviour = hangs
    # Prompts of this model name are sent to the holder alone, and wait there.
    body = {"model": "only-at-0", "prompt": prompt(4_000, 28), "max_tokens": 1}
    busy = [
        asyncio.ensure_future(scene.session.post(scene.gateway.url + COMPLETIONS, json=body))
        for _ in range(3)
    ]
    try:

        async def waiting() -> bool:
            return sum(b"only-at-0" in one.body for one in holder.got) == 3

        await eventually_async("the holder is busy", waiting)
        decision = (await scene.decided(tokens, "spilled"))["record"]["decision"]
        assert decision["engine"] == other.name, decision
        assert (decision["way"]["tier"], decision["way"]["source"]) == ("peer", "instance-0"), decision
    finally:
        waits.set()
        for one in await asyncio.gather(*busy):
            one.release()
        holder.behaviour = answers


async def test_a_reload_changes_the_controllers(scene: Scene) -> None:
    tokens = await scene.store(0, 35)
    urls, scene.gateway.settings["controllers"]["urls"] = scene.gateway.settings["controllers"]["urls"], []
    await scene.reloaded()

    async def none() -> bool:
        return not (await scene.gateway.status(scene.session))["controllers"]

    await eventually_async("no controller is left", none)
    assert not await scene.known(tokens, "without")
    scene.gateway.settings["controllers"] |= {"urls": urls, "name": "renamed"}
    await scene.reloaded()
    await scene.until_told()
    assert await scene.known(tokens, "with")
    names = [row["name"] for row in scene.cluster.controller.ask("/v1/cluster")["gateways"]]
    assert names == ["gw", "renamed"]


async def test_why_an_answer_ended_is_a_hint_to_its_instance_unless_the_client_says_what_comes_next(scene):
    tokens = await scene.store(1, 61)
    engine, cache, server = scene.engines[1], scene.caches[1], scene.cluster.servers[1]
    reasons: dict[str, str | None] = {"cut": "length", "said": "stop", "tools": "tool_calls"}

    async def looks_up(got: Got, line: Line) -> None:
        word = got.headers["x-request-id"]
        call = cache.client.lookup(
            cache.identity(), cache.hasher(tokens), request_id=f"cmpl-{word}-0-0123abcd", deadline_ms=10_000
        )
        assert await asyncio.to_thread(call.wait, 60)
        cache.client.release([call.result.lease])
        await line.answer({"id": "x", "choices": [{"text": "a", "finish_reason": reasons[word]}]})

    engine.behaviour = looks_up
    before = server.get("/v1/status")["counters"]["hinted_chunks"]
    try:
        await scene.send(tokens, "cut", model="only-at-1")
        says = {"kv_transfer_params": {"kvstrata.next": "end"}}
        await scene.send(tokens, "said", model="only-at-1", **says)
        await scene.send(tokens, "tools", model="only-at-1")
    finally:
        engine.behaviour = answers

    async def hinted() -> bool:
        counters = (await asyncio.to_thread(server.get, "/v1/status"))["counters"]
        return counters["hinted_chunks"] == before + CHUNKS

    await eventually_async("the hint reaches the prompt's chunks", hinted)
    assert await asyncio.to_thread(server.get, "/v1/explain/cmpl-tools-0")
    await scene.gateway.until_sample(scene.session, "told_hints_total", 1)


def lora(name: str, content: str) -> str:
    """An adapter, as the connector for vLLM puts it into a request's identity."""
    return canonical_json([name, content]).decode()


async def holders(scene: Scene, tokens: list[int], word: str, **more: Any) -> set[tuple[str, str, int]]:
    """By what engine and tier how many tokens of a prompt are known; a peer's is every engine's."""
    return {one[:3] for one in await scene.known(tokens, word, **more) if one[1] != "peer"}


async def test_prompts_of_a_lora_adapter_are_looked_up_by_the_content_that_each_instance_has(scene):
    names, numbers = [one.name for one in scene.engines], itertools.count()
    for engine in scene.engines:
        engine.models.append("sql")
        engine.parents["sql"] = "m"
    # The same name stands for other files at each engine; what was stored under older files counts no more.
    stored = {}
    for number, content in ((0, "older"), (0, "newer"), (1, "other")):
        scene.caches[number].adapter = lora("sql", content)
        stored[content] = await scene.store(number, 50 + len(stored))
    for cache in scene.caches:
        cache.adapter = ""

    async def found(content: str, model: str) -> set[tuple[str, str, int]]:
        return await holders(scene, stored[content], f"{next(numbers)}", model=model)

    async def adapters_told() -> bool:
        newer, other = await found("newer", "sql"), await found("other", "sql")
        return newer == {(names[0], "l1", TOKENS)} and other == {(names[1], "l1", TOKENS)}

    async def serves() -> bool:
        engines = (await scene.gateway.status(scene.session))["engines"]
        return all("sql" in engine["models"] for engine in engines)

    await eventually_async("both engines are known to serve the adapter", serves)
    await eventually_async("the gateway knows the adapters", adapters_told)
    assert not await found("older", "sql") and not await found("newer", "m")


async def test_a_prompt_is_looked_up_under_the_tenant_that_it_names(scene: Scene) -> None:
    scene.caches[1].tenant = "blue"
    tokens = await scene.store(1, 53)
    named = {"kv_transfer_params": {"kvstrata.tenant": "blue"}}
    assert await holders(scene, tokens, "blue", **named) == {(scene.engines[1].name, "l1", TOKENS)}
    others = {"kv_transfer_params": {"kvstrata.tenant": "red"}}
    assert not await holders(scene, tokens, "red", **others) and not await holders(scene, tokens, "none")
    assert not await holders(scene, tokens, "salted", cache_salt="s", **named)
    scene.caches[1].tenant = ""
