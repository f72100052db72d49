"""Settings of the log, which server and controller have."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

Level = Literal["debug", "info", "warning", "error"]

LogLevel = Annotated[Level, Meta(description="Least severe level that is logged.")]
LogFormat = Annotated[
    Literal["text", "json"],
    Meta(
        description="Form of the log's lines: `text`, or one JSON object a line with `time`, `level`, `component`, "
        "`message` and `fields`."
    ),
]
