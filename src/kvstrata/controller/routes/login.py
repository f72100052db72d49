"""Routes by which a browser logs in and out (process/http_login.py)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from kvstrata.controller.door import LOGIN, Door
from kvstrata.controller.routes import requests
from kvstrata.controller.routes.views import Body
from kvstrata.errors import BadRequest, NotPermitted
from kvstrata.process.http_login import CODE_S, SESSION_S

NO_STORE = {"Cache-Control": "no-store"}


def router(door: Door, guarded: list[Any]) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter(tags=["login"])
    access, logins = door.access, door.logins

    @routes.post("/v1/dashboard-link", dependencies=guarded)
    async def link(request: Request, response: Response) -> Body:
        """A link that opens the dashboard in a browser and logs it in, once. Needs the token; no session is enough."""
        if not door.url:
            raise BadRequest(
                "http.host: a browser needs a tcp port, and this controller has a unix socket; start it with "
                "--host localhost to use the dashboard",
                field="http.host",
            )
        if not access.is_open and not access.bears_token(dict(request.headers.raw)):
            raise NotPermitted(
                "a link needs the token of this port, not a browser's session; ask with the token"
            )
        response.headers.update(NO_STORE)
        return {"url": door.link(), "once_within_s": None if access.is_open else CODE_S}

    @routes.post(LOGIN)
    async def log_in(body: requests.LoginBody, request: Request, response: Response) -> Body:
        """Begin a browser's session. Its requests carry the cookie and, as header `kvstrata-page-key`, the page key."""
        if not logins.take(body.code) and not access.is_token(body.code.encode("utf-8", "replace")):
            raise NotPermitted(
                "code: unknown, used before or too old; get a new link by `kvstrata ctl cluster dashboard-link`",
                field="code",
            )
        session = logins.begin()
        origin = request.headers.get("origin", door.url)
        response.headers.update(NO_STORE)
        response.set_cookie(
            logins.cookie_name,
            session.cookie,
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=origin.startswith("https:"),
        )
        return {"page_key": session.page_key, "session_s": SESSION_S}

    @routes.post("/v1/logout", dependencies=guarded, status_code=204)
    async def log_out(request: Request, response: Response) -> None:
        """End the browser's session."""
        logins.end(dict(request.headers.raw))
        response.headers.update(NO_STORE)
        response.delete_cookie(logins.cookie_name, httponly=True, samesite="strict")

    return routes
