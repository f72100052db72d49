"""Serves the dashboard's static files from the package: one page, its styles and its modules.

The files are the same for all users and need no token; the page asks the API for data, which does need one.  Their
security policy lets the page contact only this controller and run only its files.
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
    files = dict(_read(resources.files("kvstrata.controller") / "dashboard"))

    def answer(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"the dashboard has no file {name!r:.80}")
        content, media_type = files[name]
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {**HEADERS, "ETag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return answer(request, "index.html")

    @app.get("/dashboard/{name:path}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return answer(request, name)


def _read(folder: Traversable, below: str = "") -> list[tuple[str, tuple[bytes, str]]]:
    """(path, (content, media type)) of all files of known types in a folder of the package."""
    found = []
    for entry in folder.iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if entry.is_dir():
            found += _read(entry, f"{below}{entry.name}/")
        elif suffix in MEDIA_TYPES:
            found.append((below + entry.name, (entry.read_bytes(), MEDIA_TYPES[suffix])))
    return found
