"""The engines that controllers name: each connector with `engine_url` tells its server, and that its controllers.

    named ──▶ an engine ──▶ no longer named ──▶ gone once it serves no more, at the latest after GONE_S

1. Only hosts that the settings allow become engines: whoever can attach to one of the cluster's servers can have any
   URL named, and the requests of all clients would go there.
2. Engines that the settings name are left to the settings.
3. Controllers that do not answer change nothing, and neither does a server that has ended, since its engines go on.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvstrata.config.gateway_engines_model import EngineSettings
from kvstrata.errors import ConfigError
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Place, place_of
from kvstrata.observability.logging import EventLog

GONE_S = 60.0
"""Time for which an engine that serves stays although nobody names it: its server may just be starting again."""
MAX_FOUND = 4_096


class Allowed:
    """Which hosts may be engines."""

    def __init__(self, entries: Sequence[str], field: str) -> None:
        """`entries`: networks, addresses, names, and patterns of names. Raises ConfigError."""
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: list[str] = []
        for i, entry in enumerate(entries):
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                if "/" in entry or not entry.strip("0123456789."):
                    raise ConfigError(
                        f"{field}[{i}]: {entry!r:.200} is no network ({error}); write it as 10.0.0.0/8, or the name of "
                        "a host, as *.example.org",
                        field=f"{field}[{i}]",
                    ) from None
                self._names.append(entry.lower())

    def __contains__(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return any(fnmatch.fnmatchcase(host.lower(), name) for name in self._names)
        return any(address in network for network in self._networks)


class _Found(NamedTuple):
    place: Place
    named_s: float
    """When it was named for the last time."""


class ControllerEngines:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        allowed: Allowed,
        api_key: str,
        found: Callable[[list[Place]], None],
        serves: Callable[[str], bool],
        taken: Callable[[], Collection[Address]],
        now_s: Callable[[], float],
    ) -> None:
        """`found` is told all engines whenever they change. `serves`: whether the engine of a name does.
        `taken`: where the engines of the settings are."""
        self._allowed = allowed
        self._api_key = api_key
        self._found = found
        self._serves = serves
        self._taken = taken
        self._now_s = now_s
        self._engines: dict[str, _Found] = {}
        """By name."""
        self._told: list[Place] = []
        self._log = EventLog("controller_engines")

    def named(self, urls: Collection[str]) -> None:
        """All controllers that answer name these engines together."""
        now_s, taken = self._now_s(), self._taken()
        for url in urls:
            try:
                place = place_of(EngineSettings(url=url), self._api_key)
            except ConfigError:
                continue  # a port that cannot be
            if place.address.host not in self._allowed:
                self._log.repeated(
                    logging.WARNING, "not_allowed", "engine_not_allowed", url=url,
                    note="add its host to engines_from.controllers.allowed if it is yours",
                )  # fmt: skip
            elif place.address in taken:
                continue
            elif place.name in self._engines or len(self._engines) < MAX_FOUND:
                self._engines[place.name] = _Found(place, now_s)
        self._engines = {
            name: one
            for name, one in self._engines.items()
            if one.named_s == now_s or (self._serves(name) and now_s - one.named_s < GONE_S)
        }
        places = sorted(one.place for one in self._engines.values())
        if places != self._told:
            self._told = places
            self._log.info("engines_named", engines=",".join(place.name for place in places)[:500] or "none")
            self._found(places)
