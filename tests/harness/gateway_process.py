"""A real `lmcache-gateway` as a child process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from tests.harness import envoy_program
from tests.harness.own_process import OwnProcess
from tests.harness.waiting import eventually_async


class GatewayProcess(OwnProcess):
    """A gateway to start, kill, freeze and stop; `settings` are those of its file, `engines` their URLs.

    Probes come every 0.1 s, unless the settings say otherwise.
    """

    def __init__(self, folder: Path, engines: Sequence[str], /, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "gateway.log"
        self.file = folder / "gateway.yaml"
        self.settings: dict[str, Any] = {
            "engines": [{"url": url} for url in engines],
            **settings,
            "health": {"probe_s": 0.1, **settings.get("health", {})},
            "http": {"port": 0, **settings.get("http", {})},
            "envoy": str(envoy_program.program()),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        return int(self.ready["http_port"])

    @property
    def token(self) -> str:
        return Path(self.ready["http_token_file"]).read_text().strip()

    def write(self) -> None:
        """Write the settings into the file, which the gateway reads at its start and at SIGHUP."""
        self.file.write_text(yaml.safe_dump(self.settings))

    def start(self) -> None:
        """Start the gateway and wait until it is ready. Raises ServerFailed."""
        self.write()
        self.launch("gateway", ("--no-supervise", "--config", str(self.file)), os.environ)

    def ends(self) -> int:
        """Wait until the process has ended; return its exit status."""
        assert self._process is not None
        return self._process.wait(60)

    async def status(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}"}
        while True:
            async with session.get(f"{self.url}/gateway/status", headers=headers) as response:
                if response.status == 504:  # on a busy machine a test's short `silence_s` may cut this, too
                    continue
                assert response.status == 200, await response.text()
                return dict(await response.json())

    async def until(
        self, session: aiohttp.ClientSession, what: str, holds: Callable[[dict[str, Any]], object]
    ) -> None:
        """Wait until its status is so."""

        async def there() -> object:
            return holds(await self.status(session))

        await eventually_async(what, there)

    async def until_engine(self, session: aiohttp.ClientSession, name: str, state: str) -> None:
        """Wait until an engine is `up`, or `down`."""
        row = {"name": name, "state": state}
        await self.until(
            session, f"{row}", lambda page: any(row.items() <= one.items() for one in page["engines"])
        )

    def reload(self, **settings: Any) -> None:
        """Have it read these settings anew, and those that were changed in `settings`."""
        self.settings |= settings
        self.write()
        self.signal(signal.SIGHUP)

    async def until_sample(self, session: aiohttp.ClientSession, sample: str, value: float) -> None:
        """Wait until /metrics, whose page is up to 0.25 s old, has this value for a sample (name with labels)."""

        async def there() -> bool:
            return (await self.samples(session)).get(f"kvstrata_gateway_{sample}") == value

        await eventually_async(f"{sample} is {value}", there)

    async def samples(self, session: aiohttp.ClientSession) -> Mapping[str, float]:
        """The samples of /metrics, by name with labels."""
        headers = {"Authorization": f"Bearer {self.token}"}
        async with session.get(f"{self.url}/metrics", headers=headers) as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def __enter__(self) -> Self:
        self.start()
        return self
