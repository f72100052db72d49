"""What messages of a cluster consist of: their bases, and the fields that several kinds of messages have."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.rpc.attach_wire import ENGINE_URL
from kvstrata.types import LayoutIdentity

TAG_BYTES = 8
MAX_TAGS = 262_144
"""Tags in one message (2 MiB)."""
MAX_ENGINES = 64
"""Engines of one instance that its heartbeats name."""

Seq = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
InstanceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Endpoint = Annotated[str, Meta(max_length=256, pattern=r"^[^\s\x00-\x1f\x7f]*$")]
TierName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,32}$")]
"""`l1`, or the name of an L2 adapter."""
Tags = Annotated[bytes, Meta(max_length=MAX_TAGS * TAG_BYTES)]
Word = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A text without control characters, which pages and logs show as it is."""
MAX_ADAPTERS = 256
"""Adapters that one heartbeat of an instance names: the newest."""
MAX_ADAPTER_CHARS = 1_024
"""Those with longer names are left out."""
AdapterName = Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)]
EngineUrl = Annotated[str, Meta(max_length=256, pattern=ENGINE_URL)]


class ClusterRequest(msgspec.Struct, array_like=True, frozen=True):
    """Base of all requests, with their common first field."""

    seq: Seq


class ClusterReply(msgspec.Struct, array_like=True, frozen=True):
    """Base of all answers, with their common first fields."""

    seq: int
    epoch: int


class KvKind(msgspec.Struct, array_like=True, frozen=True):
    """One kind of KV, of engines that are attached to this instance."""

    layout: LayoutIdentity
    slices: list[bytes]
    """Digests of the slices of one engine, sorted; a chunk has one storage key for each slice."""
    spans: Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(max_length=4096)] = []
    """For each slice how many of a hit's last chunks are needed in it (windows, states), 0: all; empty: all in each."""
    chunk_bytes: Count = 0
    """Bytes of one chunk's longest records in all slices; 0: not known."""
    adapters: Annotated[list[AdapterName], Meta(max_length=MAX_ADAPTERS)] = []
    """`RequestIdentity.adapter` of the engines' requests, as last declared; the newest first."""
