"""Settings that several kinds of process share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

# fmt: off
LIMIT = {"limit": True}
"""`extra` of a limit after which a live party counts as silent, dead or too slow; tests raise its default
(patience.py)."""
NAME = "must be at most 64 letters, digits and . _ -"
HTTP_HOST = "Address to listen on."


def says(description: str, *, demand: str = "", limit: bool = False, extra: Any = None, **bounds: Any) -> Meta:
    """A setting's meaning and bounds. `demand`: what its value must be, if type and bounds do not say it."""
    extra = extra or (LIMIT if limit else {"demand": demand} if demand else None)
    return Meta(description=description, extra=extra, **bounds)


Level = Literal["debug", "info", "warning", "error"]
LogLevel = Annotated[Level, says("Lowest level that is logged.")]
LogFormat = Annotated[Literal["text", "json"], says(
    "Format of log lines: `text`, or one JSON object per line with `time`, `level`, `component`, `message` and "
    "`fields`.")]
Place = Annotated[
    str,
    Meta(
        max_length=256,
        pattern=r"^([^\s/]+:([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?$",
        extra={"demand": "must be HOST:PORT, or empty"},
    ),
]
Host = Annotated[str, Meta(
    pattern=r"^[A-Za-z0-9.:_\[\]-]{1,253}$",
    extra={"demand": "must be a host's name or address, with or without a port"})]


class ListenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an HTTP server."""

    host: Annotated[str, says(HTTP_HOST, min_length=1)] = "127.0.0.1"
    port: Annotated[int, says("Port; 0 takes a free one.", ge=0, le=65_535)] = 8080
    token_file: Annotated[str, says(
        "File with the bearer token required in every request except probes, readable by its owner only. Empty: a "
        "token is created at each start; `kvstrata ctl` of the same user finds it.")] = ""
    allowed_hosts: Annotated[list[Host], says(
        "Further host names by which clients reach this port, such as `kvstrata` or, for browsers behind a proxy, "
        "`cache.example.net:8443`. Always allowed: the address of `host`, `localhost` and, if other machines can "
        "reach the port, this machine's name and every IP address.")] = []
    open_metrics: Annotated[bool | None, says("Serve /metrics without a token; empty: only on loopback.")] = None


class PortSecuritySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that guard ports off loopback."""

    curve_secret_file: Annotated[str, says("File with the server's CURVE secret key (Z85, 40 characters).")] = ""
    insecure: Annotated[bool, says("Open ports that require no key or token, to anyone who can reach them.")] = False
