"""The dashboard's static files, as they are in the package: one page, its styles and its modules.

They are the same for everybody and open without a token: what they show they ask the API for, which wants one.
The policy that goes with them lets the page load and ask nothing but this controller, and run nothing but its files.
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
    # Always asked for again, and answered with 304: a page never runs with files of another version.
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
