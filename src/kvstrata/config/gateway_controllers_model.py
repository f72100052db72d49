"""Settings of the controllers that a gateway asks."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import LIMIT

ControllerUrl = Annotated[
    str,
    Meta(
        max_length=256,
        pattern=r"^tcp://[^\s/,@]+:[0-9]{1,5}$",
        extra={"demand": "must be tcp://HOST:PORT with a controller's reply port"},
    ),
]


class GatewayControllersSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster's controllers, which know what instances hold of a prompt."""

    urls: Annotated[
        list[ControllerUrl],
        Meta(
            max_length=8,
            description="Reply ports of all controllers of the cluster, as `tcp://HOST:8400`. One of them is asked "
            "with each prompt (`policy: ttft`), another one when it does not answer in time.",
        ),
    ] = []
    curve_file: Annotated[
        str,
        Meta(
            description="File with this gateway's CURVE keys, as `kvstrata cluster add` makes it for a member. Empty: "
            "the key that this user's processes on this host share."
        ),
    ] = ""
    insecure: Annotated[
        bool, Meta(description="The controllers were started with `--insecure`, and have no keys.")
    ] = False
    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$",
            extra={"demand": "must be at most 64 letters, digits and . _ -"},
            description="Name by which controllers know this gateway; empty: HOSTNAME-PORT.",
        ),
    ] = ""
    tenant: Annotated[
        str,
        Meta(max_length=256, description="The connectors' setting `tenant`: whose chunks are asked for."),
    ] = ""
    deadline_ms: Annotated[
        float,
        Meta(
            extra=LIMIT,
            gt=0,
            le=1_000,
            description="Longest time for which a request waits for the answer, in milliseconds; then it goes on "
            "without.",
        ),
    ] = 2.0
