"""Messages between gateways and controllers, on the controllers' reply port (cluster_wire.py tells the rules).

A gateway sends a GatewayBeat now and then.  Its answer names the kinds of KV, from which the gateway derives the keys
of a prompt's chunks, and which engines belong to which instance.  With each prompt the gateway then asks what instances
hold of it (Holdings); no token leaves the gateway.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.rpc.cluster_fields import (
    TAG_BYTES,
    AdapterName,
    ClusterReply,
    ClusterRequest,
    Count,
    InstanceId,
    KvKind,
    Word,
)
from kvstrata.rpc.ping_wire import MAX_BYTES_S, MAX_LATENCY_US
from kvstrata.types import KEY_BYTES

MAX_HELD_TAGS = 16_384
"""Tags in one question of a gateway; of longer prompts it asks for the beginning."""
MAX_HOLDERS = 64
"""Instances in one answer: those that hold most."""
MAX_REPLICATED_KEYS = 16_384
"""Keys in one order to replicate."""
MAX_TOLD_INSTANCES = 1_024
MAX_TOLD_KINDS = 256
MAX_TOLD_ADAPTERS = 4_096
"""Instances, kinds of KV and adapters in the answer to one heartbeat of a gateway."""


class GatewayBeat(ClusterRequest, frozen=True, tag="gateway_beat"):
    """A gateway is there. Sent every `beat_ms` of the answer."""

    gateway: InstanceId
    version: Word
    port: Annotated[int, Meta(ge=0, le=65_535)]
    """Its HTTP port, on the host that the connection comes from; 0: a Unix socket."""
    policy: Word
    engines: Count
    engines_up: Count
    in_flight: Count
    requests_total: Count
    """Those that have ended."""


class TierRate(msgspec.Struct, array_like=True, frozen=True):
    """How fast an instance loads from one tier into its L1, or its engines from L1 into their blocks, as measured."""

    tier: Annotated[str, Meta(pattern="^(l1|l2|peer)$")]
    latency_us: Annotated[int, Meta(ge=0, le=MAX_LATENCY_US)]
    bytes_s: Annotated[int, Meta(ge=1, le=MAX_BYTES_S)]


class Served(msgspec.Struct, array_like=True, frozen=True):
    """An instance, as gateways need to know it."""

    instance: str
    kinds: list[int]
    """Of its engines: positions in the answer's list."""
    engines: list[str]
    """URLs of its engines, as far as they tell."""
    reads_peers: bool
    gives_to_peers: bool
    rates: list[TierRate]
    media: list[str] = []
    """Words of the media that its L2 tiers share with other instances, sorted."""
    adapters: list[list[int]] = []
    """For each of `kinds` the adapters of KvKind: positions in the answer's list."""


class GatewayHeard(ClusterReply, frozen=True, tag="gateway_beat"):
    """What the controller knows of instances and their engines."""

    beat_ms: int
    kinds: list[KvKind]
    """Without adapters."""
    instances: list[Served]
    adapters: list[AdapterName] = msgspec.field(default_factory=list)
    """At most MAX_TOLD_ADAPTERS."""


class Holdings(ClusterRequest, frozen=True, tag="holdings"):
    """Asks how much of a prompt each instance holds, from its start."""

    tags: Annotated[bytes, Meta(max_length=MAX_HELD_TAGS * TAG_BYTES)]
    """Tags of the storage keys, chunk by chunk."""
    n_slices: Annotated[int, Meta(ge=1, le=4096)]


class Holding(msgspec.Struct, array_like=True, frozen=True):
    """How much of a prompt one instance holds."""

    instance: str
    l1_chunks: Annotated[int, Meta(ge=0)]
    """Leading chunks in its L1."""
    own_chunks: Annotated[int, Meta(ge=0)]
    """Leading chunks in its L1 or in one of its own L2 tiers, at least `l1_chunks`."""
    unconfirmed_ms: Annotated[int, Meta(ge=0)] = 0
    """0: the directory has followed the instance; otherwise for how long it has not, and it may hold less by now."""
    shared_chunks: Annotated[int, Meta(ge=0)] = 0
    """Leading chunks in its tiers whose media others share, as far as it has put or found them there."""


class HoldingsReply(ClusterReply, frozen=True, tag="holdings"):
    """The instances that hold the first chunk, those that hold most first."""

    holdings: list[Holding]


class Replicate(ClusterRequest, frozen=True, tag="replicate"):
    """Asks for a copy of a prompt's chunks in another instance's L1, since they are read from `source` again and again.

    The answer is Done once the instance is commanded, and not when the chunks have arrived.
    """

    gateway: InstanceId
    """Who asks; it must have sent a GatewayBeat before."""
    source: InstanceId
    to: InstanceId
    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MAX_REPLICATED_KEYS * KEY_BYTES)]
    """Storage keys of the leading chunks, chunk by chunk."""
    n_slices: Annotated[int, Meta(ge=1, le=4096)]
    spans: Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(max_length=4096)]
    """See KvKind."""
    identity: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    """Root of their identity."""
    tenant: Annotated[str, Meta(max_length=256)]
