"""Two engines with a server each that share a remote tier and nothing else: what one computed, the other one hits."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstrata.cli import asking
from tests.harness import mooncake
from tests.harness.daemon import Unavailable
from tests.harness.server_process import ServerProcess
from tests.tools import remotes
from tests.vllm.conftest import Rig, rig_of, until
from tests.vllm.test_degraded import check_calls

pytestmark = [pytest.mark.vllm, pytest.mark.long]


class Scene(NamedTuple):
    """Two engines whose servers have the same remote tiers, all of them paused."""

    rigs: list[Rig]
    tiers: dict[str, remotes.Tier]
    """The tiers that this machine can run, by name."""


@pytest.fixture(scope="module")
def scene(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    environment = dict(os.environ)
    with contextlib.suppress(Unavailable):
        environment |= mooncake.environment()
    with contextlib.ExitStack() as stack:
        tiers = {}
        for name in remotes.NAMES:
            with contextlib.suppress(Unavailable):
                tiers[name] = stack.enter_context(remotes.tier(name, tmp_path_factory.mktemp(name)))
        flags = [word for tier in tiers.values() for word in ("--l2-adapter", json.dumps(tier.entry))]
        rigs = []
        for _ in range(2):
            folder = tmp_path_factory.mktemp("remote")
            server = ServerProcess(
                folder / "server", l1_mb=64, l2="embedded", flags=flags, environment=environment
            )
            stack.enter_context(server).start()
            rigs.append(stack.enter_context(rig_of(server, small_model, folder / "vllm")))
        scene = Scene(rigs, tiers)
        for name in tiers:
            change(scene, name, "pause")
        yield scene


def adapter_of(scene: Scene, name: str) -> str:
    return f"{scene.tiers[name].entry['type']}-{list(scene.tiers).index(name)}"


def change(scene: Scene, name: str, action: str) -> None:
    """Pause or resume a tier of both servers."""
    for rig in scene.rigs:
        path = f"/v1/l2/adapters/{adapter_of(scene, name)}/{action}"
        asking.ask(rig.server.url, asking.Ask(path, {}, timeout_s=60))


def put_chunks(rig: Rig, adapter: str) -> int:
    outcomes = rig.server.get("/v1/status")["l2_store"]["adapters"][adapter]["outcomes"]
    return int(outcomes.get("stored", 0))


@pytest.mark.parametrize("name", remotes.NAMES)
def test_another_engine_hits_with_the_same_tokens_and_computes_when_the_tier_is_killed(scene, name):
    if name not in scene.tiers:
        pytest.skip(f"this machine cannot run {name}")
    one, other = scene.rigs
    change(scene, name, "resume")
    prompt, later = one.fresh_prompt(1_400), one.fresh_prompt(1_400)
    cold, cold_later = one.stored(prompt), one.stored(later)
    assert cold["cached_tokens"] == cold_later["cached_tokens"] == 0
    until(lambda: put_chunks(one, adapter_of(scene, name)) == 10, "putting all chunks")
    warm = other.vllm.generate(prompt)
    assert (warm["cached_tokens"], warm["tokens"]) == (1_280, cold["tokens"])
    other.vllm.ask("take_calls")
    scene.tiers[name].server.kill()
    without = other.vllm.generate(later)
    assert (without["cached_tokens"], without["tokens"]) == (0, cold_later["tokens"])
    check_calls(other)
    in_l1 = other.again(prompt)
    assert (in_l1["cached_tokens"], in_l1["tokens"]) == (1_280, cold["tokens"])
    change(scene, name, "pause")
