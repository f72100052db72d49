"""Two engines with a server each that share a remote tier and nothing else: what one computed, the other one hits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import asking
from tests.harness import mooncake
from tests.harness.daemon import Unavailable
from tests.harness.server_process import ServerProcess
from tests.tools import remotes
from tests.vllm.conftest import Rig, rig_of, until
from tests.vllm.test_degraded import check_calls

pytestmark = [pytest.mark.vllm, pytest.mark.long]


@pytest.fixture(scope="module")
def rigs(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rig]]:
    """Two engines, each with a server that has no L2 yet."""
    environment = dict(os.environ)
    with contextlib.suppress(Unavailable):
        environment = mooncake.environment()
    environment |= remotes.MAY_BE_ADDED
    with contextlib.ExitStack() as stack:
        rigs = []
        for _ in range(2):
            folder = tmp_path_factory.mktemp("remote")
            server = ServerProcess(folder / "server", l1_mb=64, environment=environment)
            stack.enter_context(server).start()
            rigs.append(stack.enter_context(rig_of(server, small_model, folder / "vllm")))
        yield rigs


@contextlib.contextmanager
def joined(rig: Rig, entry: dict[str, Any]) -> Iterator[None]:
    """The rig's server has this adapter until the end of the block."""
    url = rig.server.url
    added = asking.ask(url, asking.Ask("/v1/l2/adapters", {"adapter": entry}, timeout_s=60))
    try:
        yield
    finally:
        asking.ask(url, asking.Ask(f"/v1/l2/adapters/{added['name']}?wait_s=0", None, "DELETE", timeout_s=60))


def put_chunks(rig: Rig) -> int:
    (adapter,) = rig.server.get("/v1/status")["l2_store"]["adapters"].values()
    return int(adapter["outcomes"].get("stored", 0))


@pytest.mark.parametrize("name", remotes.NAMES)
def test_another_engine_hits_with_the_same_tokens_and_computes_when_the_tier_is_killed(
    rigs: list[Rig], name: str, tmp_path: Path
) -> None:
    one, other = rigs
    with contextlib.ExitStack() as stack:
        try:
            tier = stack.enter_context(remotes.tier(name, tmp_path))
        except Unavailable as why:
            pytest.skip(str(why))
        for rig in rigs:
            stack.enter_context(joined(rig, tier.entry))
        prompt, later = one.fresh_prompt(1_400), one.fresh_prompt(1_400)
        cold, cold_later = one.stored(prompt), one.stored(later)
        assert cold["cached_tokens"] == cold_later["cached_tokens"] == 0
        until(lambda: put_chunks(one) == 10, "putting all chunks")
        warm = other.vllm.generate(prompt)
        assert (warm["cached_tokens"], warm["tokens"]) == (1_280, cold["tokens"])
        other.vllm.ask("take_calls")
        tier.server.kill()
        without = other.vllm.generate(later)
        assert (without["cached_tokens"], without["tokens"]) == (0, cold_later["tokens"])
        check_calls(other)
        in_l1 = other.again(prompt)
        assert (in_l1["cached_tokens"], in_l1["tokens"]) == (1_280, cold["tokens"])
