"""A real Envoy with the settings of configs/envoy-picker.yaml, its ports those of the test."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from tests.harness.daemon import Spawned, free_port
from tests.harness.envoy_program import program
from tests.harness.waiting import eventually_async
from tests.tools.provision import ROOT

WATCH = ROOT / "src" / "kvstrata" / "gateway" / "envoy" / "watch.lua"
CONFIG = ROOT / "configs" / "envoy-picker.yaml"


class Envoy(Spawned):
    """Belongs to the test's loop."""

    def __init__(self, folder: Path, picker_port: int, engine_ports: Sequence[int]) -> None:
        self._folder = folder
        self.port = free_port()
        self.log = folder / "envoy.log"
        self.settings: Any = yaml.safe_load(CONFIG.read_text())
        resources = self.settings["static_resources"]
        engines, picker = resources["clusters"]
        resources["listeners"][0]["address"]["socket_address"]["port_value"] = self.port
        engines["load_assignment"]["endpoints"] = _endpoints(engine_ports)
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        manager["access_log_options"]["access_log_flush_interval"] = "0.05s"
        [watch] = [one for one in manager["http_filters"] if one["name"] == "watch"]
        watch["typed_config"]["default_source_code"]["filename"] = str(WATCH)
        picker["load_assignment"]["endpoints"] = _endpoints([picker_port])

    @property
    def processor(self) -> dict[str, Any]:
        """Settings of its filter that asks the picker."""
        [listener] = self.settings["static_resources"]["listeners"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        return dict(manager)["http_filters"][0]["typed_config"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        await asyncio.to_thread(self._spawn)

        async def listens() -> bool:
            assert isinstance(self._process, subprocess.Popen)
            assert self._process.poll() is None, self.log.read_text()[-4_000:]
            try:
                async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health"):
                    return True
            except aiohttp.ClientError:
                return False

        await eventually_async("Envoy listens", listens)

    def _spawn(self) -> None:
        config = self._folder / "envoy.yaml"
        config.write_text(yaml.safe_dump(self.settings))
        words = [program(), "-c", config, "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [*map(str, words)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ
            )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._process is not None:
            self.kill()


def _endpoints(ports: Sequence[int]) -> list[Any]:
    places = [{"socket_address": {"address": "127.0.0.1", "port_value": port}} for port in ports]
    return [{"lb_endpoints": [{"endpoint": {"address": place}} for place in places]}]
