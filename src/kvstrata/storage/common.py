"""The fields that an entry of any type has; entry.py and stack.py act on them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.policy.store import StorePolicy


class CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that every type of adapter has."""

    type: Annotated[str, Meta(min_length=1, description="Type of the adapter.")]
    policy: Annotated[
        StorePolicy,
        Meta(
            description="Which chunks of L1 are put into this adapter. `through`: all; `on_evict`: those that L1 is "
            "about to evict; `second_touch`: those that are used a second time."
        ),
    ] = StorePolicy.THROUGH
    deadline_ms: Annotated[
        Annotated[int, Meta(ge=1, le=600_000)] | None,
        Meta(
            description="Milliseconds that one operation may take, and as many more for every 64 MB of its payload; "
            "not set: `l2.deadline_ms`."
        ),
    ] = None
    max_stuck_mb: Annotated[
        Annotated[float, Meta(ge=1, le=1 << 20)] | None,
        Meta(
            description="MB that operations past their deadline may keep pinned; once they reach this, nothing more is "
            "put or loaded; not set: a sixteenth of L1."
        ),
    ] = None
    isolation: Annotated[
        Literal["in_process", "process"] | None,
        Meta(description="`process` runs the adapter in a child process; not set: the type's own default."),
    ] = None
    host_kill_ms: Annotated[
        Annotated[int, Meta(ge=10, le=3_600_000)] | None,
        Meta(
            description="Milliseconds after which a child process that has work and sends nothing is killed; more if "
            "many bytes are under way; not set: three deadlines."
        ),
    ] = None
    eviction: Annotated[Any, Meta(description="Accepted, but has no effect.")] = None
    serde: Annotated[Any, Meta(description="Refused; `codec` replaced it.")] = None
    codec: Annotated[
        Any,
        Meta(
            description="How records are encoded: a name (`zstd`, `aes-gcm`, `mac`), an object with a `name` "
            "and its options, or a list of such names and objects, in this order."
        ),
    ] = None
    codec_staging_mb: Annotated[
        float,
        Meta(ge=1, le=1 << 20, description="MB of memory for records that are being encoded or decoded."),
    ] = 256
    codec_workers: Annotated[int, Meta(ge=1, le=64, description="Threads that encode and decode.")] = 2


COMMON = CommonFields.__struct_fields__
