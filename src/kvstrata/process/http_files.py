"""The static files of a port's dashboard, read from the package into memory once.

The files are the same for all users and need no token; the page asks the port for numbers, which do need one.  Their
security policy lets the page contact only its own port and run only its files.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The browser asks for each file again (answered with 304), so a page never mixes files of two versions.
    "Cache-Control": "no-cache",
}


class Answered(NamedTuple):
    """What a request for a file gets."""

    status: int
    headers: dict[str, str]
    content: bytes


class Files:
    """The files in folder `dashboard` of a room, beside those that all dashboards share."""

    def __init__(self, room: str) -> None:
        """`room`: the package whose folder it is; its files stand before shared ones of the same name."""
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for package in ("kvstrata.process", room):
            for name, content in _read(resources.files(package) / "dashboard").items():
                media_type = MEDIA_TYPES[name[name.rfind(".") :]]
                etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                self._files[name] = content, {**HEADERS, "Content-Type": media_type, "ETag": etag}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def answer(self, name: str, if_none_match: str) -> Answered:
        """The answer to a request for a file, by its `If-None-Match`. Raises KeyError if there is no such file."""
        content, headers = self._files[name]
        if if_none_match == headers["ETag"]:
            return Answered(304, {key: value for key, value in headers.items() if key != "Content-Type"}, b"")
        return Answered(200, headers, content)


def _read(folder: Traversable, below: str = "") -> dict[str, bytes]:
    """The files of known types in a folder of the package, by their paths in it."""
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _read(entry, f"{below}{entry.name}/")
        elif entry.name[entry.name.rfind(".") :] in MEDIA_TYPES:
            found[below + entry.name] = entry.read_bytes()
    return found
