"""Settings that several processes have."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

LIMIT = {"limit": True}
"""`extra` of a limit after which a live party counts as silent, dead or too slow; tests raise its default
(patience.py)."""
NAME = {"demand": "must be at most 64 letters, digits and . _ -"}

HTTP_HOST = "Address to listen on, or `unix:PATH`: a unix socket, which serves the same user and root without a token."


class ListenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an HTTP server."""

    host: Annotated[str, Meta(min_length=1, description=HTTP_HOST)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port; 0 takes a free one.")] = 8080
    token_file: Annotated[
        str,
        Meta(
            description="File with the bearer token that every request but the probes must carry, readable by its "
            "owner only. Empty: a token is made at each start, which `kvstrata ctl` finds if the same user runs it."
        ),
    ] = ""
    allowed_hosts: Annotated[
        list[
            Annotated[
                str,
                Meta(
                    pattern=r"^[A-Za-z0-9.:_\[\]-]{1,253}$",
                    extra={"demand": "must be a host's name or address, with or without a port"},
                ),
            ]
        ],
        Meta(
            description="Further names by which clients reach this port, such as `kvstrata` or, for browsers behind a "
            "proxy, `cache.example.net:8443`. Always allowed: the address of `host`, `localhost` and, if the port "
            "can be reached from elsewhere, this machine's name and every IP address."
        ),
    ] = []
    open_metrics: Annotated[
        bool | None, Meta(description="Serve /metrics without a token; empty: only on loopback.")
    ] = None


class PortSecuritySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that guard ports off loopback."""

    curve_secret_file: Annotated[
        str, Meta(description="File with the server's CURVE secret key (Z85, 40 characters).")
    ] = ""
    insecure: Annotated[bool, Meta(description="Open ports that lack a key or token to everybody.")] = False
