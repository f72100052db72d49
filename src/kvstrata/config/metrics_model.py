"""Settings of /metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of /metrics."""

    exemplars: Annotated[
        bool,
        Meta(
            description="Name the last request in each bucket of `kvstrata_lookup_seconds`, to readers that ask for "
            "OpenMetrics. Whoever may read /metrics then sees ids of requests."
        ),
    ] = False
