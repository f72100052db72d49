"""What each process says about wrong settings and about settings without effect, against errors_golden.txt.

A line `$ PROCESS WORD …` gives the sources: `file=YAML`, `NAME=VALUE` (a variable), `extra=JSON` (an engine's option),
flags (TOKEN_FILE is a sound one); after `l2` stands an entry of `--l2-adapter`. The answer follows: `!` errors, `~`
notes.
`python -m tests.unit.config.test_errors_golden` writes all answers anew; a new line `$ …` gets its answer so.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from kvstrata.config.client_model import ClientSettings
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.config.flags import parse, server_settings
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.config.lmcache.keys import server_notes
from kvstrata.config.load import load
from kvstrata.connectors.settings import load_settings
from kvstrata.controller.process import plan as plan_controller
from kvstrata.errors import ConfigError
from kvstrata.gateway.plan import plan as plan_gateway
from kvstrata.server.plan import plan as plan_server
from kvstrata.tiers.config import configure_tier

GOLDEN = Path(__file__).with_name("errors_golden.txt")
SECRET = "hunter2"
NAMED = re.compile(r"([A-Z][A-Z0-9_]*|file|extra)=")


def check(process: str, words: list[str], folder: Path) -> list[str]:
    """Read the settings as `process` does, and check them against each other; returns the notes. Raises ConfigError."""
    named = dict(word.split("=", 1) for word in words if NAMED.match(word))
    flags = [
        word.replace("TOKEN_FILE", str(folder / "TOKEN_FILE")) for word in words if not NAMED.match(word)
    ]
    (folder / "TOKEN_FILE").write_text("t" * 32)
    (folder / "TOKEN_FILE").chmod(0o600)
    extra, text = json.loads(named.pop("extra", "{}")), named.pop("file", None)
    environment = {"HOME": "/home/me", **named}
    if text is not None:
        (folder / "FILE").write_text(text)
        environment["KVSTRATA_CONFIG_FILE"] = str(folder / "FILE")
    if process == "engine":
        return load_settings(extra, environment)[1]
    if process == "server":
        parsed, read = server_settings(flags, environment)
        plan_server(read(), environment, [])
        return parsed.notes + server_notes(environment, ClientSettings.__struct_fields__)
    struct: Any = ControllerSettings if process == "controller" else GatewaySettings
    parsed = parse(f"lmcache-{process}", flags)
    settings = load(
        struct,
        file=environment.get("KVSTRATA_CONFIG_FILE"),
        environment=environment,
        flags=parsed.settings,
        flag_names=parsed.names,
        wrong_flags=parsed.wrong,
    )
    if process == "controller":
        plan_controller(settings, environment)
    else:
        plan_gateway(settings)
    return parsed.notes


def answer(line: str) -> str:
    process, _, rest = line.removeprefix("$ ").partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        try:
            if process == "l2":
                configure_tier(json.loads(rest), 2)
                said: list[str] = []
            else:
                said = [f"~ {note}" for note in check(process, shlex.split(rest), Path(folder))]
        except ConfigError as error:
            said = [f"! {one}" for one in error.lines]
        return "".join(f"{one}\n" for one in [line, *said]).replace(f"{folder}/", "")


def answers() -> str:
    with mock.patch.dict("os.environ", {"KVSTRATA_TESTING": "1", "KUBERNETES_SERVICE_HOST": ""}):
        return "".join(answer(line) for line in GOLDEN.read_text().splitlines() if line.startswith("$ "))


def test_every_wrong_setting_is_named_as_before_and_no_secret_is_shown() -> None:
    assert (found := answers()) == GOLDEN.read_text()
    assert not [line for line in found.splitlines() if SECRET in line and not line.startswith("$ ")]


if __name__ == "__main__":
    GOLDEN.write_text(answers())
