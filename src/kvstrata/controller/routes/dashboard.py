"""Serves the dashboard's static files (process/http_files.py)."""

from __future__ import annotations

from fastapi import FastAPI, HTTPException, Request, Response

from kvstrata.process.http_files import Files


def add_dashboard(app: FastAPI) -> None:
    """Serve the dashboard at `/` and its files below `/dashboard/`, from memory."""
    files = Files("kvstrata.controller")

    def answer(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"the dashboard has no file {name!r:.80}")
        status, headers, content = files.answer(name, request.headers.get("if-none-match", ""))
        return Response(content, status, headers=headers)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return answer(request, "index.html")

    @app.get("/dashboard/{name:path}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return answer(request, name)
