"""Settings of /metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of /metrics."""

    old_names: Annotated[
        bool,
        Meta(
            description="Serve metrics under their former names too, for dashboards that still ask for those "
            "(docs/metrics.md#old-names); always in the plain text format. The next release has them no more."
        ),
    ] = False


class ServerMetricsSettings(MetricsSettings, frozen=True, kw_only=True):
    """Settings of the server's /metrics."""

    exemplars: Annotated[
        bool,
        Meta(
            description="Name the last request in each bucket of `kvstrata_lookup_seconds`, to readers that ask for "
            "OpenMetrics. Whoever may read /metrics then sees ids of requests."
        ),
    ] = False
