"""Interprets replies. Numbers in them are checked, since a server may send anything."""

from __future__ import annotations

from kvstrata.tiers.media.resp.connection import LARGEST_NUMBER, Reply, ServerError


def fields_of(text: bytes) -> dict[str, str]:
    """The lines `name:value` of INFO as a dictionary."""
    lines = text.decode(errors="replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def number_in(fields: dict[str, str], name: str) -> int:
    """A number of INFO, at most LARGEST_NUMBER; 0 if the field is missing, no number, or 20 or more characters long."""
    text = fields.get(name, "")
    number = int(text) if len(text) < 20 and text.isascii() and text.isdigit() else 0
    return min(number, LARGEST_NUMBER)


def port_of(text: bytes | str) -> int:
    """A port as a server names it; 0 if the text is not a port."""
    number = int(text) if len(text) < 6 and text.isascii() and text.isdigit() else 0
    return number if number < 1 << 16 else 0


def reason_of(reply: Reply) -> str:
    """The reason code for a reply that is not the requested one."""
    if not isinstance(reply, ServerError):
        return "protocol"
    return _REASONS.get(reply.code, "server_error")


_REASONS = {
    "OOM": "full",
    "LOADING": "loading",
    "BUSY": "busy",
    "MISCONF": "not_saved",
    "NOREPLICAS": "no_replicas",
    "READONLY": "read_only",
    "MASTERDOWN": "read_only",
    "NOAUTH": "denied",
    "NOPERM": "denied",
    "WRONGPASS": "denied",
    "CLUSTERDOWN": "cluster_down",
    "TRYAGAIN": "cluster_down",
    "MOVED": "cluster_down",
    "ASK": "cluster_down",
}
