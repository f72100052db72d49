"""`lmcache-gateway`: the proxy in front of serving engines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata.cli.boundary import guarded
from kvstrata.process.keeper import Restarts, keep

if TYPE_CHECKING:
    from kvstrata.config.gateway_model import GatewaySettings

PRINT = "--print-envoy"


@guarded("lmcache-gateway")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2: settings are wrong, 70: the gateway failed)."""
    return keep("lmcache-gateway", list(sys.argv[1:] if arguments is None else arguments), serve)


def serve(arguments: Sequence[str], restarts: Restarts) -> int:
    """Run the command in the process that serves. Imports are inside, so that the keeper's process stays small."""
    from kvstrata.cli.starting import start, taken
    from kvstrata.config.flags import parse
    from kvstrata.config.gateway_model import GatewaySettings
    from kvstrata.gateway.plan import plan, tcp_ports
    from kvstrata.gateway.process import Gateway

    def check(settings: GatewaySettings, lacking: list[str]) -> tuple[GatewaySettings, list[str]]:
        plan(settings)
        lacking += taken(tcp_ports(settings))
        return settings, []

    flags = parse("lmcache-gateway", arguments)
    read = flags.reader(GatewaySettings, os.environ)
    if PRINT in arguments:
        print_envoy(read)
        return 0
    return start("lmcache-gateway", flags, read, restarts, Gateway, plan, check)


def print_envoy(read: Callable[[], GatewaySettings]) -> None:
    """Print the configuration that Envoy gets; its engines are in a file of their own. Raises ConfigError."""
    from kvstrata.gateway.envoy.configuration import Place, configuration
    from kvstrata.gateway.envoy.process import program, takes_module
    from kvstrata.gateway.plan import plan
    from kvstrata.process.ports import resolve

    settings = read()
    plan(settings)
    _, version = program(settings)
    host, _ = resolve(settings.http.host, "http.host")
    place = Place(Path("/run/kvstrata-gateway"), host, settings.http.port)
    print(json.dumps(configuration(settings, place, 3 if takes_module(version) else -1), indent=2))


if __name__ == "__main__":
    sys.exit(main())
