"""The engines of this host, found by themselves: sockets that listen on loopback and answer as an engine does.

    listens ─▶ asked ─▶ an engine, until its socket is gone
                 ├─▶ something else, asked again after AGAIN_S
                 └─▶ no answer yet (an engine that loads its model), asked again, each time after twice as long

1. Nothing is tried that does not listen: the kernel's table of sockets names the ports and their users.  Only sockets
   of this process's user or of root are asked, unless the settings allow others; a port that several users share is
   not asked.
2. An engine answers /version with its version, and /v1/models with a list of models.  A gateway says in its /version
   that it is one, so gateways do not send each other requests.
3. The engine's key goes only to who has answered /version.
4. Engines that the settings name are left to the settings.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstrata.config.gateway_engines_model import LocalSettings
from kvstrata.config.gateway_model import HealthSettings
from kvstrata.gateway.engine_link import Address, LinkBroken, Links, Unreachable
from kvstrata.gateway.fleet import Place
from kvstrata.gateway.probing import get, models_in
from kvstrata.observability.logging import EventLog

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS = "0A"
OTHERS = 512
"""Rows in a row that do not listen, after which the rest of a table is left out: the kernel gives listeners first."""
AGAIN_S = 60.0
AT_ONCE = 16
"""Sockets that are asked at a time."""
_HOSTS = {
    "00000000": "127.0.0.1",
    "0100007F": "127.0.0.1",
    "0" * 32: "::1",
    "0" * 24 + "01000000": "::1",
    "0" * 16 + "FFFF00000100007F": "127.0.0.1",
    "0" * 16 + "FFFF000000000000": "127.0.0.1",
}
"""Addresses in the kernel's notation of a little-endian machine → where this host reaches them."""


class Listens(NamedTuple):
    """A port that is listened on."""

    address: Address
    uids: frozenset[int]
    inodes: frozenset[str]
    """Of its sockets: others come with another process."""


class _Version(msgspec.Struct):
    version: str
    gateway: str = ""


def listening(ports: range, tables: Iterable[Path] = TABLES) -> list[Listens]:
    """Who listens on these ports at loopback, or at all addresses; over IPv4 if that is possible."""
    found: dict[int, tuple[set[str], set[int], set[str]]] = {}
    for host, port, uid, inode in itertools.chain.from_iterable(map(_rows, tables)):
        if port in ports:
            hosts, uids, inodes = found.setdefault(port, (set(), set(), set()))
            hosts.add(host)
            uids.add(uid)
            inodes.add(inode)
    return [
        Listens(Address(min(hosts), port, False), frozenset(uids), frozenset(inodes))
        for port, (hosts, uids, inodes) in sorted(found.items())
    ]


def _rows(table: Path) -> Iterator[tuple[str, int, int, str]]:
    """(Host, port, uid, inode) of each socket of a table that listens where this host reaches it by loopback."""
    try:
        file = table.open(encoding="ascii", buffering=1 << 14)
    except OSError:
        return
    with file:
        others = 0
        for line in itertools.islice(file, 1, None):
            fields = line.split()
            if fields[3] != LISTENS:
                others += 1
                if others > OTHERS:
                    return
                continue
            others = 0
            address, _, port = fields[1].partition(":")
            if address in _HOSTS:
                yield _HOSTS[address], int(port, 16), int(fields[7]), fields[9]


class LocalEngines:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        settings: LocalSettings,
        api_key: str,
        links: Links,
        found: Callable[[list[Place]], None],
        taken: Callable[[], Collection[int]],
        now_s: Callable[[], float],
        *,
        look: Callable[[range], list[Listens]] = listening,
    ) -> None:
        """`found` is told all engines whenever they change. `taken`: ports of ours, and of engines of the settings."""
        self._settings = settings
        self._api_key = api_key
        self._links = links
        self._found = found
        self._taken = taken
        self._now_s = now_s
        self._look = look
        self._users = {0, os.getuid()}
        self._engines: dict[Listens, Place] = {}
        self._others: dict[Listens, float] = {}
        """What is no engine, or none yet, with the time when it is asked again."""
        self._since: dict[Listens, float] = {}
        """When each of them was asked first."""
        self._told: list[Place] = []
        self._log = EventLog("local_engines")

    async def keep(self, health: Callable[[], HealthSettings]) -> None:
        """Look again and again, as often as engines are probed."""
        while True:
            await asyncio.sleep(health().probe_s)
            await self.look(health().timeout_s)

    async def look(self, timeout_s: float) -> None:
        """Look once, and ask what is new; each has `timeout_s` to answer."""
        ports = range(self._settings.first_port, self._settings.last_port + 1)
        taken, now_s = self._taken(), self._now_s()
        there = [
            one for one in self._look(ports) if one.address.port not in taken and self._may_ask(one.uids)
        ]
        self._engines = {one: place for one, place in self._engines.items() if one in there}
        self._others = {one: again_s for one, again_s in self._others.items() if one in there}
        self._since = {one: self._since.get(one, now_s) for one in there if one not in self._engines}
        new = [one for one in there if one not in self._engines and self._others.get(one, now_s) <= now_s]
        turns = asyncio.Semaphore(AT_ONCE)

        async def asked(one: Listens) -> None:
            async with turns:
                is_engine = await self._ask(one.address, timeout_s)
            if is_engine:
                self._engines[one] = Place(_name(one.address), one.address, self._api_key)
                self._others.pop(one, None)
            else:
                pause_s = AGAIN_S if is_engine is False else min(AGAIN_S, now_s - self._since[one])
                self._others[one] = now_s + pause_s

        await asyncio.gather(*map(asked, new))
        self._tell()

    def _may_ask(self, uids: frozenset[int]) -> bool:
        return len(uids) == 1 and (self._settings.any_user or uids <= self._users)

    async def _ask(self, address: Address, timeout_s: float) -> bool | None:
        """Whether an engine answers there; None: nobody does yet."""
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await get(self._links, address, "/version", "")
                if status != 200:
                    return None if status >= 500 else False
                if msgspec.json.decode(body, type=_Version).gateway:
                    return False
                status, body = await get(self._links, address, "/v1/models", self._api_key)
                if status in (401, 403):
                    says = "name its key in engines_from.local.api_key_file"
                    self._log.repeated(
                        30, str(address.port), "engine_wants_key", port=address.port, note=says
                    )
                    return False
                if status != 200:
                    return None
                return bool(models_in(body))
        except (Unreachable, TimeoutError):
            return None
        except (LinkBroken, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False

    def _tell(self) -> None:
        places = sorted(self._engines.values())
        if places != self._told:
            self._told = places
            self._log.info("engines_found", engines=",".join(place.name for place in places)[:500] or "none")
            self._found(places)


def _name(address: Address) -> str:
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
