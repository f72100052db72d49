"""A gateway asks a controller by all that decides a prompt's KV beside its tokens: adapter, weights, tenant, salt."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvstrata.types import canonical_json
from tests.harness.waiting import eventually_async
from tests.integration.gateway.controllers_scene import TOKENS, Scene

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


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
        stored[content] = await scene.store(number, len(stored))
    for cache in scene.caches:
        cache.adapter = ""

    async def found(content: str, model: str) -> set[tuple[str, str, int]]:
        return await holders(scene, stored[content], f"{next(numbers)}", model=model)

    async def adapters_told() -> bool:
        return await found("newer", "sql") == {(names[0], "l1", TOKENS)}

    async def serves() -> bool:
        engines = (await scene.gateway.status(scene.session))["engines"]
        return all("sql" in engine["models"] for engine in engines)

    await eventually_async("both engines are known to serve the adapter", serves)
    await eventually_async("the gateway knows the adapters", adapters_told)
    assert await found("other", "sql") == {(names[1], "l1", TOKENS)}
    assert not await found("older", "sql") and not await found("newer", "m")


async def test_a_prompt_is_looked_up_under_the_tenant_that_it_names(scene: Scene) -> None:
    scene.caches[1].tenant = "blue"
    tokens = await scene.store(1, 13)
    named = {"kv_transfer_params": {"kvstrata.tenant": "blue"}}
    assert await holders(scene, tokens, "blue", **named) == {(scene.engines[1].name, "l1", TOKENS)}
    others = {"kv_transfer_params": {"kvstrata.tenant": "red"}}
    assert not await holders(scene, tokens, "red", **others) and not await holders(scene, tokens, "none")
    scene.caches[1].tenant = ""


async def test_prompts_are_looked_up_under_the_weights_that_an_engine_has_now(scene: Scene) -> None:
    numbers = itertools.count()
    before = await scene.store(0, 11)
    scene.caches[0].adapter = canonical_json(["weights", "step 7", ""]).decode()
    after = await scene.store(0, 12)

    async def weights_told() -> bool:
        found = await holders(scene, after, f"after-{next(numbers)}")
        return found == {(scene.engines[0].name, "l1", TOKENS)}

    await eventually_async("the gateway knows the weights", weights_told)
    assert not await holders(scene, before, "before")
