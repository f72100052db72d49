"""The level of this process's log over HTTP: what it is, and another one without a restart (FastAPI)."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from kvstrata.config.log_model import Level
from kvstrata.observability.logging import EventLog, current_level, set_level

LEVELS = get_args(Level)


class LogLevelBody(BaseModel):
    """The level of a log."""

    model_config = ConfigDict(extra="forbid")
    level: Level = Field(description="Least severe level that is logged.")


def router(log: EventLog, guarded: list[Any]) -> APIRouter:
    """The routes of this module. `log` gets a line for each change."""
    routes = APIRouter(dependencies=guarded, tags=["log"])

    @routes.get("/v1/log-level")
    async def log_level() -> LogLevelBody:
        """The least severe level that is logged now."""
        return LogLevelBody.model_validate({"level": current_level()})

    @routes.put("/v1/log-level")
    async def change_log_level(body: LogLevelBody) -> LogLevelBody:
        """Log from another level on, here and in the processes of isolated adapters.

        It holds until the process ends, or reads its settings again at SIGHUP.
        """
        was = current_level()
        is_quieter = LEVELS.index(body.level) > LEVELS.index(was)
        if is_quieter:
            log.info("log_level_changed", level=body.level, was=was)
        set_level(body.level)
        if not is_quieter:
            log.info("log_level_changed", level=body.level, was=was)
        return body

    return routes
