"""A controller process with its defaults, instances that speak its protocol without KV bytes, and a Chromium."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.harness import chromium
from tests.harness.cluster_instance import ClusterInstance
from tests.harness.controller_process import ControllerProcess


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    """A running controller, which asks its members for their condition every 0.2 s."""
    with ControllerProcess(tmp_path, flags=("--heartbeat-s", "0.4")) as process:
        yield process


@pytest.fixture
def instance(controller: ControllerProcess) -> Iterator[Callable[..., ClusterInstance]]:
    """Makes instances of this controller; they are closed at the end of the test."""
    made: list[ClusterInstance] = []

    def make(name: str, **more: Any) -> ClusterInstance:
        made.append(ClusterInstance(controller.ports["reply"], name, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium.browser() as running:
        yield running
