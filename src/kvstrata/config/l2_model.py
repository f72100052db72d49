"""Settings of L2: those of all adapters together, and what adapters may be added while the server runs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import LIMIT


class L2RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapters that an admin may add while the server runs; those of `l2_adapters` can always be added again."""

    types: Annotated[
        Annotated[list[str], Meta(max_length=32)] | None,
        Meta(
            description="Types of adapters that an admin may add while the server runs; not set: `disk` and `fs`. "
            "Adapters of `l2_adapters` can always be added again, by their names."
        ),
    ] = None
    roots: Annotated[
        Annotated[list[str], Meta(max_length=64)] | None,
        Meta(
            description="Folders below which the directories of such adapters may lie; not set: kvstrata in the user's "
            "cache folder (XDG_CACHE_HOME or ~/.cache); an empty list: nowhere."
        ),
    ] = None
    hosts: Annotated[
        list[str],
        Meta(
            max_length=256,
            description="Servers that such adapters may connect to: `HOST` (any port), `HOST:PORT`, or `s3://BUCKET` "
            "and `gs://BUCKET` for a bucket at its usual provider. KV is sent there: name only servers that may have "
            "it.",
        ),
    ] = []


class L2Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all L2 adapters together."""

    prefetch_max_in_flight: Annotated[
        int, Meta(ge=1, le=1024, description="Lookups that may load from one L2 adapter at the same time.")
    ] = 8
    backlog_share: Annotated[
        float, Meta(gt=0, le=0.5, description="Share of L1 that chunks waiting for a put may pin.")
    ] = 0.25
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
    runtime: L2RuntimeSettings = L2RuntimeSettings()
    quotas_gb: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1 << 20)]],
        Meta(
            description="GB that a tenant may have in each L2 adapter, by tenant name. Only records that this server "
            "has put, found or loaded there since it started are counted."
        ),
    ] = {}
