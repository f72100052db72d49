"""The static files of the dashboard, read from the package into memory once.

The files are the same for all users and need no token; the page asks the controller for numbers, which do need one.
Their security policy lets the page contact only its own port and run only its files.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from kvstrata.errors import NotFound
from kvstrata.process.operations import Headers, Reply

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


class DashboardFiles:
    """The files, each with its type and the digest that browsers ask by."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}
        for name, content in _read(resources.files("kvstrata.controller") / "dashboard").items():
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            self._files[name] = content, MEDIA_TYPES[name[name.rfind(".") :]], etag

    def answer(self, name: str, headers: Headers) -> Reply:
        """A file, or 304 if the browser has it. Raises NotFound."""
        if name not in self._files:
            raise NotFound(f"the dashboard has no file {name!r:.80}")
        content, media_type, etag = self._files[name]
        known = headers.get(b"if-none-match", b"").decode("latin-1") == etag
        return Reply(b"" if known else content, 304 if known else 200, {**HEADERS, "etag": etag}, media_type)


def _read(folder: Traversable, below: str = "") -> dict[str, bytes]:
    """The files of known types in a folder of the package, by their paths in it."""
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _read(entry, f"{below}{entry.name}/")
        elif entry.name[entry.name.rfind(".") :] in MEDIA_TYPES:
            found[below + entry.name] = entry.read_bytes()
    return found
