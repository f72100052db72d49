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
    tails_after_s: Annotated[
        float,
        Meta(
            ge=-1,
            le=86_400,
            description="Seconds after which the tail of a prompt (its unfinished last chunk) is put to L2, if nothing "
            "has replaced it; -1: tails stay in L1.",
        ),
    ] = 60.0
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
