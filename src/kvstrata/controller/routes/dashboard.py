"""The static files of the dashboard, read from the package into memory once.

The files are the same for all users and need no token; the page asks the controller for numbers, which do need one.
Their security policy lets the page contact only its own port and run only its files.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import FastAPI, HTTPException, Request, Response

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


def add_dashboard(app: FastAPI) -> None:
    """Serve the dashboard at `/` and its files below `/dashboard/`, from memory."""
    files: dict[str, tuple[bytes, dict[str, str]]] = {}
    for name, content in _read(resources.files("kvstrata.controller") / "dashboard").items():
        media_type = MEDIA_TYPES[name[name.rfind(".") :]]
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        files[name] = content, {**HEADERS, "Content-Type": media_type, "ETag": etag}

    def answer(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"the dashboard has no file {name!r:.80}")
        content, headers = files[name]
        if request.headers.get("if-none-match", "") == headers["ETag"]:
            return Response(
                status_code=304, headers={k: v for k, v in headers.items() if k != "Content-Type"}
            )
        return Response(content, headers=headers)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return answer(request, "index.html")

    @app.get("/dashboard/{name:path}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return answer(request, name)


def _read(folder: Traversable, below: str = "") -> dict[str, bytes]:
    """The files of known types in a folder of the package, by their paths in it."""
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _read(entry, f"{below}{entry.name}/")
        elif entry.name[entry.name.rfind(".") :] in MEDIA_TYPES:
            found[below + entry.name] = entry.read_bytes()
    return found
