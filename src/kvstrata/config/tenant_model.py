"""Settings of single tenants."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one tenant."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    pool: Literal["shared", "own"] = "shared"
    max_gb: Annotated[float, Meta(gt=0, le=1 << 20)] | None = None
