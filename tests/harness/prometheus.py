"""A real Prometheus and its checker: the programs on PATH, or Debian's, unpacked into the cache folder."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.harness.daemon import Daemon
from tests.tools import fetch_debian

PACKAGE = "prometheus"
"""It has promtool too."""
EVERY = "500ms"
TIMEOUT_S = 120.0


class Prometheus(Daemon):
    """One server, which scrapes a target and evaluates rules every EVERY; its data lie in `folder`."""

    def __init__(self, folder: Path, job: str, target: str, token: str, rules: Sequence[Path]) -> None:
        """`target`: the host:port whose /metrics is read with `token`. Raises daemon.Unavailable."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        scrape = {
            "job_name": job,
            "static_configs": [{"targets": [target]}],
            "authorization": {"credentials": token},
        }
        settings = {
            "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY, "evaluation_interval": EVERY},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        super().__init__(folder / "prometheus.log", 1)

    def _command(self) -> tuple[Sequence[str], Mapping[str, str] | None]:
        program, environment = fetch_debian.program("prometheus", [PACKAGE])
        command = [
            program,
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.address}",
        ]
        return command, environment

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=TIMEOUT_S):
                return True
        except OSError:  # urllib's errors are among these
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API below /api/v1/. Raises AssertionError with the text of a refusal."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{url}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that a PromQL expression has now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found


CHECK_S = 60.0


class Promtool:
    def __init__(self) -> None:
        """Raises fetch_debian.Unavailable if the program cannot be had."""
        self._program, self._variables = fetch_debian.program("promtool", [PACKAGE])

    def __call__(self, *arguments: object, text: str = "") -> str:
        """Run `promtool ARGUMENTS` with `text` as its standard input; return what it complains about, or nothing."""
        done = subprocess.run(
            [self._program, *map(str, arguments)],
            input=text,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
        # `check metrics` complains with status 3, and is silent otherwise.
        return "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stdout}{done.stderr}"
