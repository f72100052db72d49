"""`lmcache-gateway`: the proxy before serving engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvstrata.cli.boundary import guarded
from kvstrata.process.keeper import Restarts, keep


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
    return start("lmcache-gateway", flags, read, restarts, Gateway, plan, check)


if __name__ == "__main__":
    sys.exit(main())
