"""Checks the host that an instance names in its `control_endpoint` against the address of its connection.  It may name:

1. the address that its connection comes from, or a name of that address;
2. any address of this machine, if the connection comes from this machine;
3. any host that the setting `peer_hosts` lists, by name, address or network.

Controllers, gateways and readers connect to these endpoints, so without this rule a member could direct them anywhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from kvstrata.errors import BadRequest, ConfigError, NotPermitted
from kvstrata.patience import patience

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
RESOLVE_S = 2.0
_FIELD = "control_endpoint"


class PeerHosts:
    """The rule, with the hosts of one controller's settings."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """`allowed`: host names, IP addresses, and networks such as `10.1.0.0/16`. Raises ConfigError."""
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for one in allowed:
            try:
                self._networks.append(ipaddress.ip_network(one))
            except ValueError as error:
                if "/" in one:
                    raise ConfigError(
                        f"peer_hosts: {one!r:.80} is not a network: {error}", field="peer_hosts"
                    ) from None
                self._names.add(one.lower())

    async def check(self, endpoint: str, source: str) -> None:
        """Raise NotPermitted or BadRequest unless an instance whose connection comes from `source` may name this
        endpoint (`tcp://host:port`, or empty).  Names are resolved, for at most RESOLVE_S.
        """
        host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]").lower()
        if not endpoint or host in self._names:
            return
        connected_from = _plain(ipaddress.ip_address(source))
        for address in await _addresses(host):
            if address == connected_from or any(address in network for network in self._networks):
                return
            if is_local(connected_from) and is_local(address):
                return
        raise NotPermitted(
            f"{_FIELD}: {endpoint} is not at {source}, where the instance's connection comes from; correct p2p.listen "
            f"or p2p.advertise of the instance, or list {host} in peer_hosts of the controller",
            field=_FIELD,
        )


async def _addresses(host: str) -> list[IpAddress]:
    """The addresses of a host. Raises BadRequest if its name cannot be resolved."""
    try:
        async with asyncio.timeout(patience(RESOLVE_S)):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
        why = str(error) or f"no answer within {RESOLVE_S:g} s"
        raise BadRequest(
            f"{_FIELD}: the controller cannot resolve {host!r:.80}: {why}; name an IP address in p2p.advertise, or "
            "list the name in peer_hosts of the controller",
            field=_FIELD,
        ) from None
    return [_plain(ipaddress.ip_address(str(where[0]).partition("%")[0])) for *_, where in found]


def is_local(address: IpAddress) -> bool:
    """Whether this is an address of this machine: the kernel then sends to it from that same address."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))  # sends nothing
        except OSError:
            return False
        return _plain(ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])) == address


def _plain(address: IpAddress) -> IpAddress:
    """An IPv4 address in IPv6 form as IPv4 address."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
