"""The parts of one gateway that its ports, admin pages and metrics share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.admission import Admission
from kvstrata.gateway.choosing import Choosing
from kvstrata.gateway.controllers.asking import Controllers
from kvstrata.gateway.door import Door
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.handover.legs import Legs
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.reading import Reader
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.sharing.sockets import Sharing
from kvstrata.gateway.tokens.source import Tokens

if TYPE_CHECKING:
    from kvstrata.gateway.request import Requests


@dataclass(slots=True)
class Parts:
    """The shared parts of one gateway. Belongs to the event loop."""

    settings: GatewaySettings
    """Replaced at a reload."""
    now_s: Callable[[], float]
    door: Door
    fleet: Fleet
    meters: Meters
    reader: Reader
    residency: Residency
    tokens: Tokens
    choosing: Choosing
    admission: Admission
    controllers: Controllers
    requests: Requests
    suspect: Callable[[ServingEngine], None]
    """Called with an engine whose connection failed, so that it is probed now."""
    legs: Legs
    sharing: Sharing | None
    """None: this gateway shares nothing with others."""
    stopping: bool = field(default=False)
    asked_s: float = field(default=-math.inf)
    """Time of the last readiness probe, which a load balancer in front of this gateway repeats."""

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, the reason. Counts as a readiness probe."""
        self.asked_s = self.now_s()
        why = "stopping" if self.stopping else "" if self.fleet.serving("") else "no engine serves"
        return not why, why
