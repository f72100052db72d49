"""Settings of all L2 adapters together."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import LIMIT


class L2Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all L2 adapters together."""

    deadline_ms: Annotated[
        int,
        Meta(
            extra=LIMIT,
            ge=1,
            le=60_000,
            description="Milliseconds for one operation of an adapter without its own.",
        ),
    ] = 5_000
    drain_s: Annotated[
        float,
        Meta(
            extra=LIMIT,
            ge=0,
            le=600,
            description="Seconds that puts and loads under way may still take when the server stops; closing takes "
            "up to 5 s more.",
        ),
    ] = 10.0
